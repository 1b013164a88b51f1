"""A LLaMA whose residual stream crosses stage boundaries in k of its d dimensions, as in training.

This file ships with an exported model and needs only torch and transformers:

AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

or, with the folder on the Python path,

from modeling_isthmus import IsthmusForCausalLM
    IsthmusForCausalLM.from_pretrained(FOLDER)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

WIRES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}
WIRE_VERSION = 2  # of the few-bit wires; version 1 was not causal
LEAST = (127 - 22) << 3  # the first 12 bits of the float32 2^-22, the least step
LAYERS = {"qwen2": Qwen2DecoderLayer, "qwen3": Qwen3DecoderLayer}  # LLaMA's with biases, or with norms


class IsthmusConfig(LlamaConfig):
    """LLaMA's keys and seven more.

    family          the type of the layers: llama, qwen2 or qwen3
    boundaries      list of {"layer": number of layers before it, "basis": number of its U, or null}
    subspace_dims   k of each U
    wire            the type of the stream on the link, or its bits
    wire_version    of the few-bit wires
    frozen_table    whether T is its own table, not the embedding
    learned_tables  whether every boundary adds a learned table
    open_share      a, the share that passes outside U in a finishing round, or null
    """

    model_type = "isthmus_pipelined"


class IsthmusForCausalLM(LlamaForCausalLM):
    """Before layer `layer` the stream x of token t becomes (x - T[t]) U U^T + T[t]: sec. 2.2 of arXiv
    2601.02360. T is the embedding, or its own table if the run froze one. A boundary may add a row that it
    learned for the token. If the run was opening its boundaries, a share a of what lies outside U also
    passes, and the learned row fades."""

    config_class = IsthmusConfig

    def __init__(self, config: IsthmusConfig) -> None:
        super().__init__(config)
        version = getattr(config, "wire_version", 1)
        if config.wire in BITS and version != WIRE_VERSION:
            raise ValueError(
                f"this model was exported with version {version} of the {config.wire} wire, and this code "
                f"reads version {WIRE_VERSION}; export its run again: isthmus export RUN --to hf FOLDER "
                "--as pipelined"
            )
        if layer := LAYERS.get(getattr(config, "family", "llama")):
            layers = [layer(config, i) for i in range(config.num_hidden_layers)]
            self.model.layers = nn.ModuleList(layers)
        self.boundary = nn.Module()
        for i, dim in enumerate(config.subspace_dims):
            self.boundary.register_buffer(f"basis_{i}", torch.zeros(config.hidden_size, dim))
        if config.frozen_table:
            self.boundary.register_buffer("table", torch.zeros(config.vocab_size, config.hidden_size))
        self.learned = getattr(config, "learned_tables", False)
        for i in range(len(config.boundaries) if self.learned else 0):
            learned = torch.zeros(config.vocab_size, config.hidden_size)
            self.boundary.register_buffer(f"learned_{i}", learned)
        self.wire, self.bits = WIRES.get(config.wire), BITS.get(config.wire)
        self.tokens: Tensor | None = None  # (B, L) of the current forward
        self.model.register_forward_pre_hook(self._remember, with_kwargs=True)
        for i, entry in enumerate(config.boundaries):
            hook = self._boundary_hook(i, entry["basis"])
            self.model.layers[entry["layer"]].register_forward_pre_hook(hook)
        self.post_init()

    def _remember(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.tokens = args[0] if args else kwargs.get("input_ids")
        if self.tokens is None:
            raise ValueError("the boundaries need input_ids; inputs_embeds alone do not say which tokens")

    def _boundary_hook(self, boundary: int, number: int | None):
        def hook(_module: nn.Module, args: tuple) -> tuple:
            x = self._cross(args[0], number)
            return (x + self._learned(boundary, x.dtype) if self.learned else x, *args[1:])

        return hook

    def _learned(self, boundary: int, dtype: torch.dtype) -> Tensor:  # (B, L, D)
        assert self.tokens is not None  # set by _remember, before the first layer
        part = F.embedding(self.tokens, self.boundary.get_buffer(f"learned_{boundary}")).to(dtype)
        return part if self.config.open_share is None else part * (1 - self.config.open_share)

    def _cross(self, x: Tensor, number: int | None) -> Tensor:  # (B, L, D) -> (B, L, D)
        if number is None:
            return self._carry(x)
        assert self.tokens is not None  # set by _remember, before the first layer
        basis = self.boundary.get_buffer(f"basis_{number}").to(x.dtype)  # (D, K)
        own = self.config.frozen_table
        table = self.boundary.get_buffer("table") if own else self.model.embed_tokens.weight
        frozen = F.embedding(self.tokens, table).to(x.dtype)
        if self.config.open_share is None:
            return self._carry((x - frozen) @ basis) @ basis.mT + frozen
        drift = x - frozen
        return self._carry(x - (1 - self.config.open_share) * (drift - (drift @ basis) @ basis.mT))

    def _carry(self, z: Tensor) -> Tensor:
        if self.bits:
            return carried(z, self.bits)
        assert self.wire is not None
        return z.to(self.wire).to(z.dtype) if self.wire.itemsize < z.dtype.itemsize else z


def carried(z: Tensor, bits: int) -> Tensor:
    """Round z (..., L, K) to a few bits: each value is a whole number of its token's step, within the range.
    The step is a float with 3 bits of mantissa, rounded up. A token that is not finite becomes nan."""
    most, x = 2 ** (bits - 1) - 1, z if z.dtype == torch.float64 else z.float()
    peak = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).float()  # (..., L, 1)
    needed = ((peak * (1 / most)).view(torch.int32) + ((1 << 20) - 1)) >> 20
    step = (needed.clamp(LEAST, LEAST + 254) << 20).view(torch.float32)
    step = torch.where(peak.isfinite(), step, torch.nan).to(x.dtype)
    return ((x / step).round().clamp(-most, most) * step).to(z.dtype)
