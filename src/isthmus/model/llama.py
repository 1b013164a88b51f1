"""LLaMA as functions of named tensors: one replica, a stack of replicas and a single stage share them.

A weight has its own shape, (O, D), or carries the replicas of a stack in front, (R, O, D). The residual
stream is (B, L, D) or (R, B, L, D) alike. Attention has no parameters, so there the replica axis folds into
the batch.
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

Params = Mapping[str, Tensor]
Rope = tuple[Tensor, Tensor]  # cos and sin, (L, head_dim) each
RunLayer = Callable[..., Tensor]  # (weights, x, model, cos, sin) -> x
Weight = Tensor | Callable[[Tensor], Tensor]  # a matrix, or x -> x W^T where a stage defers its gradient
BoundaryFunction = Callable[[Tensor, Tensor], Tensor]  # (stream, tokens) -> stream
# For each number of layers, the boundaries behind them: rows of the leading axis, and what happens to them.
BoundaryFunctions = Mapping[int, Sequence[tuple[slice, BoundaryFunction]]]

LAYER_WEIGHTS = (
    "attention_norm.weight",
    *(f"attention.{matrix}.weight" for matrix in ("wq", "wk", "wv", "wo")),
    "ffn_norm.weight",
    *(f"feed_forward.{matrix}.weight" for matrix in ("w1", "w2", "w3")),
)
HEAD_WEIGHTS = ("norm.weight", "output.weight")


def init_tensor(name: str, shape: Sequence[int], model: ModelConfig, seed: int) -> Tensor:
    """A parameter's first value: a pure function of (seed, name), so a stage draws only its own. In
    float32 whatever torch's default type is: float64 would be other draws."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)  # norm gains
    if name.startswith(TABLES):
        return torch.zeros(tuple(shape), dtype=torch.float32)  # a boundary begins as the paper's
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = model.init_std
    if name.endswith(("wo.weight", "w2.weight")):  # what writes into the stream, 2 x layers times
        std /= math.sqrt(2 * model.layers)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32) * std


def init_params(model: ModelConfig, seed: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The first value of all parameters, or of these; each has its own generator, so threads draw them."""
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
    """cos and sin of RoPE, computed in float64 on the CPU: every device holds the same table."""
    half = model.width // model.heads // 2
    frequency = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).repeat(1, 2)  # (L, head_dim)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x W^T over the last axis; the master weight is read in the stream's precision."""
    if not isinstance(weight, Tensor):
        return weight(x)
    weight = weight.to(x.dtype)
    if weight.dim() == 2:
        return x @ weight.mT
    # (R, B, L, D) -> (R, B, L, O)
    return _Products.apply(x.flatten(1, -2), weight).unflatten(1, x.shape[1:-1])


class _Products(torch.autograd.Function):
    """x W^T of every replica. Autograd's own form would give the gradient of W transposed, and every step
    would have to copy all gradients."""

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
    gain = gain.to(x.dtype)
    return normed * (gain if gain.dim() == 1 else gain.view(-1, *[1] * (x.dim() - 2), gain.shape[-1]))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    # cos and sin keep their precision beside a bf16 stream: late positions need the exact angle.
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def embed(params: Params, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return look_up(params["tok_embeddings.weight"], tokens, dtype)


def look_up(table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table (V, D) or (R, V, D), for tokens (B, L) or (R, B, L)."""
    if table.dim() == 3:  # one table for each replica: one lookup in all of them, with shifted ids
        offset = torch.arange(table.shape[0], device=tokens.device) * table.shape[1]
        tokens = tokens + offset.view(-1, *[1] * (tokens.dim() - 1))
        table = table.flatten(0, 1)
    return F.embedding(tokens, table).to(dtype)


def attention(weights: Params, x: Tensor, model: ModelConfig, cos: Tensor, sin: Tensor) -> Tensor:
    def heads(matrix: str) -> Tensor:
        projected = linear(x, weights[f"attention.{matrix}.weight"])
        # (R B, heads, L, head_dim)
        return projected.flatten(0, -3).unflatten(-1, (model.heads, -1)).transpose(1, 2)

    q, k, v = rotate(heads("wq"), cos, sin), rotate(heads("wk"), cos, sin), heads("wv")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(mixed.transpose(1, 2).reshape(x.shape), weights["attention.wo.weight"])


def feed_forward(weights: Params, x: Tensor) -> Tensor:
    gate = F.silu(linear(x, weights["feed_forward.w1.weight"]))
    return linear(gate * linear(x, weights["feed_forward.w3.weight"]), weights["feed_forward.w2.weight"])


def layer_weights(params: Params, i: int) -> dict[str, Tensor]:
    """The weights of layer i under the names that all layers share: one compiled function serves them all."""
    return {name: params[f"layers.{i}.{name}"] for name in LAYER_WEIGHTS}


def layer(weights: Params, x: Tensor, model: ModelConfig, cos: Tensor, sin: Tensor) -> Tensor:
    normed = rms_norm(x, weights["attention_norm.weight"], model.norm_eps)
    x = x + attention(weights, normed, model, cos, sin)
    return x + feed_forward(weights, rms_norm(x, weights["ffn_norm.weight"], model.norm_eps))


def head(params: Params, x: Tensor, model: ModelConfig) -> Tensor:
    return linear(rms_norm(x, params["norm.weight"], model.norm_eps), params["output.weight"])


def head_weights(params: Params) -> dict[str, Tensor]:
    return {name: params[name] for name in HEAD_WEIGHTS}


def head_losses(weights: Params, x: Tensor, targets: Tensor, model: ModelConfig) -> Tensor:
    """Head and loss together: compiled as one, they need not write all logits in float32."""
    return token_losses(head(weights, x, model).view(*targets.shape, -1), targets)


def run_layers(
    params: Params, layers: range, x: Tensor, model: ModelConfig, rope: Rope, run_layer: RunLayer = layer
) -> Tensor:
    """`run_layer` is `layer` itself, or does the same: see `parts`."""
    for i in layers:
        x = run_layer(layer_weights(params, i), x, model, *rope)
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
    """The stream (B, L, D) or (R, B, L, D) after all layers, with every stage boundary on the way."""
    x = embed(params, tokens, dtype or params["tok_embeddings.weight"].dtype)
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
    """Logits of tokens (B, L) or (R, B, L)."""
    return head(params, stream(params, tokens, model, rope, boundary_fns, dtype), model)


def cross(x: Tensor, tokens: Tensor, here: Sequence[tuple[slice, BoundaryFunction]]) -> Tensor:
    """Apply the boundaries at this depth to their rows; the other rows stay as they are."""
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
    """Mean negative log-likelihood (nats per token): one number, or one for each replica of a stack."""
    full = logits.float() if logits.dtype == torch.bfloat16 else logits
    losses = F.cross_entropy(full.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    return losses.flatten(1).mean(1) if targets.dim() == 3 else losses.mean()


class Llama(nn.Module):
    """The whole model as a module, under the parameter names that every replica shares."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = model
        for name, value in init_params(model, seed).items():
            *path, leaf = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(leaf, nn.Parameter(value))
        cos, sin = rope_table(model, model.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, boundary_fns: BoundaryFunctions | None = None) -> Tensor:
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit the context of {self.config.context}")
        rope = (self.get_buffer("cos")[:length], self.get_buffer("sin")[:length])
        return forward(dict(self.named_parameters()), tokens, self.config, rope, boundary_fns)
