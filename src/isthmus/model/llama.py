"""LLaMA and its relatives (Mistral, Qwen 2, Qwen 3) as functions of named tensors, for one replica, a stack
of replicas or a single stage.

A weight has its own shape, (O, D), or a stack's replicas in front, (R, O, D). Likewise the residual stream is
(B, L, D) or (R, B, L, D). The product of queries and keys has no parameters, so there the replica axis folds
into the batch.
"""

import hashlib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.config import ModelConfig
from isthmus.config.model import TABLES
from isthmus.layout.stages import EMBEDDING

Params = Mapping[str, Tensor]
Rope = tuple[Tensor, Tensor]  # cos and sin, (L, head_dim) each
RunLayer = Callable[..., Tensor]  # (weights, x, model, cos, sin) -> x
Weight = Tensor | Callable[[Tensor], Tensor]  # a matrix, or x -> x W^T if a stage defers its gradient
BoundaryFunction = Callable[[Tensor, Tensor], Tensor]  # (stream, tokens) -> stream
# For each number of layers, the boundaries after them: rows of the leading axis, and their function.
BoundaryFunctions = Mapping[int, Sequence[tuple[slice, BoundaryFunction]]]


def init_tensor(name: str, shape: Sequence[int], model: ModelConfig, seed: int) -> Tensor:
    """Draw a parameter's first value as a pure function of (seed, name), so a stage draws only its own. The
    draw is in float32 whatever torch's default type is: float64 would draw other values."""
    if len(shape) == 1:  # biases and norm gains
        return torch.full(tuple(shape), 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float32)
    if name.startswith(TABLES):
        return torch.zeros(tuple(shape), dtype=torch.float32)  # a boundary begins like the paper's
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = model.init_std
    if name.endswith(("wo.weight", "w2.weight")):  # these write into the stream, 2 x layers times
        std /= math.sqrt(2 * model.layers)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32) * std


def init_params(model: ModelConfig, seed: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Draw the first values of all parameters, or of these, in threads: each has its own generator."""
    wanted = {name: shape for name, shape in model.shapes().items() if names is None or name in names}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "init") as threads:
        drawn = threads.map(lambda name: init_tensor(name, wanted[name], model, seed), wanted)
        return dict(zip(wanted, drawn, strict=True))


def rope_table(
    model: ModelConfig,
    length: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Rope:
    """Compute RoPE's cos and sin in float64 on the CPU, so that every device has the same table."""
    half, scaling = model.head_size // 2, model.rope_scaling
    with torch.device("cpu"):  # whatever the caller's default device is
        frequency = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        if scaling.type == "llama3":  # keep fast frequencies, divide slow ones, blend in between
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            turns = frequency * (scaling.original_max_position_embeddings / (2 * math.pi))
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            frequency = frequency * (kept + (1 - kept) / scaling.factor)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        angle = angle.repeat(1, 2)  # (L, head_dim)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Compute x W^T over the last axis, reading the master weight in the stream's precision."""
    if not isinstance(weight, Tensor):
        return weight(x)
    weight = weight.to(x.dtype)
    if weight.dim() == 2:
        return x @ weight.mT
    # (R, B, L, D) -> (R, B, L, O)
    return _Products.apply(x.flatten(1, -2), weight).unflatten(1, x.shape[1:-1])


class _Products(torch.autograd.Function):
    """Computes x W^T for every replica. Autograd's own form would return the transposed gradient of W, and
    every step would have to copy all gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.bmm(grad, weight), torch.bmm(grad.mT, x)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    full = x.float() if x.dtype == torch.bfloat16 else x
    normed = (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed * for_stream(gain, x)


def for_stream(vector: Tensor, x: Tensor) -> Tensor:
    """Reshape a gain or a bias (D,), or a stack's (R, D), so that it broadcasts over x (..., D)."""
    vector = vector.to(x.dtype)
    return vector if vector.dim() == 1 else vector.view(-1, *[1] * (x.dim() - 2), vector.shape[-1])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    # cos and sin keep their precision with a bf16 stream: late positions need the exact angle.
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def embed(params: Params, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return look_up(params[EMBEDDING], tokens, dtype)


def look_up(table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up rows of a table (V, D) or (R, V, D) for tokens (B, L) or (R, B, L)."""
    if table.dim() == 3:  # one table per replica: one lookup in all, with shifted ids
        offset = torch.arange(table.shape[0], device=tokens.device) * table.shape[1]
        tokens = tokens + offset.view(-1, *[1] * (tokens.dim() - 1))
        table = table.flatten(0, 1)
    return F.embedding(tokens, table).to(dtype)


def queries_keys_values(
    weights: Params, x: Tensor, model: ModelConfig, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return every head's, (R B, heads, L, head_dim), with RoPE applied to queries and keys."""

    def heads(matrix: str) -> Tensor:
        projected = linear(x, weights[f"attention.{matrix}.weight"])
        if model.attention_bias:
            projected = projected + for_stream(weights[f"attention.{matrix}.bias"], projected)
        projected = projected.unflatten(-1, (-1, model.head_size))
        if model.qk_norm and matrix != "wv":
            gain = weights[f"attention.{matrix[1]}_norm.weight"]
            projected = rms_norm(projected, gain, model.norm_eps)
        return projected.flatten(0, -4).transpose(1, 2)

    return rotate(heads("wq"), cos, sin), rotate(heads("wk"), cos, sin), heads("wv")


def mix(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Compute causal attention, (B, heads, L, head_dim); neighbouring heads of q share one of k and v."""
    group = q.shape[1] // k.shape[1]
    # Flash attention reads shared heads directly, but only in half precision; torch's other kernels would
    # fall back to one that keeps all L x L scores.
    shared = group > 1 and q.is_cuda and q.dtype == torch.bfloat16
    if group > 1 and not shared:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=shared)


def attention(weights: Params, x: Tensor, model: ModelConfig, cos: Tensor, sin: Tensor) -> Tensor:
    mixed = mix(*queries_keys_values(weights, x, model, cos, sin))
    return linear(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1), weights["attention.wo.weight"])


def feed_forward(weights: Params, x: Tensor) -> Tensor:
    gate = F.silu(linear(x, weights["feed_forward.w1.weight"]))
    return linear(gate * linear(x, weights["feed_forward.w3.weight"]), weights["feed_forward.w2.weight"])


def layer_weights(params: Params, i: int, model: ModelConfig) -> dict[str, Tensor]:
    """Return layer i's weights under names common to all layers, so that one compiled function serves all."""
    return {name: params[f"layers.{i}.{name}"] for name in model.layer_shapes()}


def layer(weights: Params, x: Tensor, model: ModelConfig, cos: Tensor, sin: Tensor) -> Tensor:
    normed = rms_norm(x, weights["attention_norm.weight"], model.norm_eps)
    x = x + attention(weights, normed, model, cos, sin)
    return x + feed_forward(weights, rms_norm(x, weights["ffn_norm.weight"], model.norm_eps))


def head(params: Params, x: Tensor, model: ModelConfig) -> Tensor:
    _, table = head_names(model)
    return linear(rms_norm(x, params["norm.weight"], model.norm_eps), params[table])


def head_names(model: ModelConfig) -> tuple[str, str]:
    """Return the last norm's gain, and the table: the embedding if tied. Autograd sums its uses."""
    return "norm.weight", EMBEDDING if model.tie_embeddings else "output.weight"


def head_weights(params: Params, model: ModelConfig) -> dict[str, Tensor]:
    return {name: params[name] for name in head_names(model)}


def head_losses(weights: Params, x: Tensor, targets: Tensor, model: ModelConfig) -> Tensor:
    """Compute head and loss together: compiled as one, they need not write all logits in float32."""
    return token_losses(head(weights, x, model).view(*targets.shape, -1), targets)


def run_layers(
    params: Params, layers: range, x: Tensor, model: ModelConfig, rope: Rope, run_layer: RunLayer = layer
) -> Tensor:
    """Run layers; `run_layer` is `layer` itself, or an equivalent: see `parts`."""
    for i in layers:
        x = run_layer(layer_weights(params, i, model), x, model, *rope)
    return x


def stream(
    params: Params,
    tokens: Tensor,
    model: ModelConfig,
    rope: Rope,
    boundary_fns: BoundaryFunctions | None = None,
    dtype: torch.dtype | None = None,
    run_layer: RunLayer = layer,
) -> Tensor:
    """Return the stream (B, L, D) or (R, B, L, D) after all layers and every stage boundary between them."""
    x = embed(params, tokens, dtype or params[EMBEDDING].dtype)
    boundary_fns, done = boundary_fns or {}, 0
    for edge in sorted(boundary_fns):
        x = run_layers(params, range(done, edge), x, model, rope, run_layer)
        x, done = cross(x, tokens, boundary_fns[edge]), edge
    return run_layers(params, range(done, model.layers), x, model, rope, run_layer)


def forward(
    params: Params,
    tokens: Tensor,
    model: ModelConfig,
    rope: Rope,
    boundary_fns: BoundaryFunctions | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the logits of tokens (B, L) or (R, B, L)."""
    return head(params, stream(params, tokens, model, rope, boundary_fns, dtype), model)


def cross(x: Tensor, tokens: Tensor, here: Sequence[tuple[slice, BoundaryFunction]]) -> Tensor:
    """Apply the boundaries at this depth to their rows, and leave the other rows unchanged."""
    parts, done = [], 0
    for rows, function in here:
        if rows.start > done:
            parts.append(x[done : rows.start])
        parts.append(function(x[rows], tokens[rows]))
        done = rows.stop
    if done < x.shape[0]:
        parts.append(x[done:])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood (nats per token): one number, or one per replica of a stack."""
    full = logits.float() if logits.dtype == torch.bfloat16 else logits
    losses = F.cross_entropy(full.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    return losses.flatten(1).mean(1) if targets.dim() == 3 else losses.mean()


class Llama(nn.Module):
    """The whole model as a module, with the parameter names that every replica shares."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = model
        device = torch.get_default_device()
        if device.type == "meta":  # only to count parameters: nothing is drawn
            first = {name: torch.empty(shape) for name, shape in model.shapes().items()}
        else:
            first = init_params(model, seed)
        for name, value in first.items():
            *path, leaf = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(leaf, nn.Parameter(value.to(device)))
        cos, sin = rope_table(model, model.context, device=device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, boundary_fns: BoundaryFunctions | None = None) -> Tensor:
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit the context of {self.config.context}")
        rope = (self.get_buffer("cos")[:length], self.get_buffer("sin")[:length])
        return forward(dict(self.named_parameters()), tokens, self.config, rope, boundary_fns)
