"""Model sizes and presets. Standard library only."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from isthmus.config.checks import above, choice, within
from isthmus.errors import ConfigError

# Far above the largest models: 4096 layers of 131072 x 524288 are 10,000 times their parameters.
MOST = {
    "vocab": 1 << 24,
    "width": 1 << 17,
    "layers": 4096,
    "heads": 1 << 14,
    "kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "ffn": 1 << 19,
    "context": 1 << 22,
}

TABLES = "boundaries."  # prefix of the names of learned tables


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How RoPE stretches beyond the pre-training context; only "llama3" reads the numbers."""

    type: str = "default"  # no stretching; or "llama3": slow frequencies are divided by `factor`
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        choice("model.rope_scaling.type", self.type, ("default", "llama3"))
        within("model.rope_scaling.factor", self.factor, 1, 1e6)
        above("model.rope_scaling.low_freq_factor", self.low_freq_factor, 0, 1e6)
        above("model.rope_scaling.high_freq_factor", self.high_freq_factor, self.low_freq_factor, 1e6)
        original = self.original_max_position_embeddings
        within("model.rope_scaling.original_max_position_embeddings", original, 1, MOST["context"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder with RMSNorm, RoPE and SwiGLU: LLaMA, and with the keys below Mistral, Qwen 2 and Qwen 3."""

    preset: str = "custom"
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int = 0  # shared by `heads` (grouped-query attention); 0: as many as heads
    head_dim: int = 0  # 0: width / heads
    ffn: int
    context: int
    tie_embeddings: bool = False  # share one table between embedding and head; a fleet with stages unties it
    qk_norm: bool = False  # RMSNorm of every head's query and key, as in Qwen 3
    attention_bias: bool = False  # on query, key and value, as in Qwen 2
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    norm_eps: float = 1e-5
    init_std: float = 0.02
    start: str = ""  # a Hugging Face folder to continue from; "": random weights
    stage_cut: str = "layers"  # embedding and head count as one each; or "flops": stages of equal work
    # Learned tables at stage boundaries. A recipe derives them from subspace.anchor; no file states them.
    boundary_tables: int = field(default=0, metadata={"derived": True})

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            within(f"model.{name}", getattr(self, name), 0 if name in ("kv_heads", "head_dim") else 1, most)
        if self.width % self.heads or (not self.head_dim and self.head_size % 2):
            raise ConfigError(
                f"model.heads is {self.heads} and model.width {self.width}; "
                "the width must be an even number of entries for every head"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")
        if self.heads % self.num_kv_heads:
            raise ConfigError(
                f"model.kv_heads is {self.kv_heads} and model.heads {self.heads}; every key head serves the "
                "same number of heads, so kv_heads must divide heads (0: as heads)"
            )
        if self.qk_norm and self.attention_bias:
            raise ConfigError(
                "model.qk_norm and model.attention_bias: no model of transformers has both; set one of them"
            )
        choice("model.stage_cut", self.stage_cut, ("layers", "flops"))
        above("model.rope_theta", self.rope_theta, 0, 1e12)
        within("model.norm_eps", self.norm_eps, 0, 1)
        above("model.init_std", self.init_std, 0, 1e3)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's full-model name and shape, in the order that all replicas share."""
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab, self.width)}
        layer = self.layer_shapes().items()
        for i in range(self.layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer}
        shapes["norm.weight"] = (self.width,)
        if not self.tie_embeddings:
            shapes["output.weight"] = (self.vocab, self.width)
        shapes |= {f"{TABLES}{i}.weight": (self.vocab, self.width) for i in range(self.boundary_tables)}
        return shapes

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every parameter of a layer, the same for all layers."""
        d, f, head = self.width, self.ffn, self.head_size
        rows = {"wq": self.heads * head, "wk": self.num_kv_heads * head, "wv": self.num_kv_heads * head}
        shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (d,)}
        shapes |= {f"attention.{matrix}.weight": (number, d) for matrix, number in rows.items()}
        if self.attention_bias:
            shapes |= {f"attention.{matrix}.bias": (number,) for matrix, number in rows.items()}
        if self.qk_norm:
            shapes |= {"attention.q_norm.weight": (head,), "attention.k_norm.weight": (head,)}
        shapes["attention.wo.weight"] = (d, self.heads * head)
        shapes["ffn_norm.weight"] = (d,)
        shapes |= {"feed_forward.w1.weight": (f, d), "feed_forward.w3.weight": (f, d)}
        return shapes | {"feed_forward.w2.weight": (d, f)}

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def plain(self) -> "ModelConfig":
        """Return the model without learned tables."""
        return replace(self, boundary_tables=0)

    @property
    def num_parameters(self) -> int:
        return _num_parameters(self.plain)

    @property
    def num_stored(self) -> int:
        """Count parameters and entries of learned tables: what is trained, sent and saved."""
        return self.num_parameters + self.boundary_tables * self.vocab * self.width

    @property
    def token_bytes(self) -> int:
        """Bytes of a token id on a link: the smallest integer type that holds the vocabulary."""
        return 1 if self.vocab <= 2**8 else 2 if self.vocab <= 2**16 else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensors(ModelConfig):
    """The parameters of a model that the user's own program builds: in a run of named tensors, in place of
    [model]. Of the other fields nothing follows."""

    vocab: int = 1
    width: int = 2
    layers: int = 1
    heads: int = 1
    ffn: int = 1
    context: int = 1
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), metadata={"derived": True})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.tensors)


@lru_cache(maxsize=256)
def _num_parameters(model: ModelConfig) -> int:
    return sum(map(prod, model.shapes().values()))


def _preset(
    name: str, vocab: int, width: int, layers: int, heads: int, ffn: int, context: int = 2048, **more: Any
) -> ModelConfig:
    shape = {"vocab": vocab, "width": width, "layers": layers, "heads": heads, "ffn": ffn}
    return ModelConfig(preset=name, **shape, context=context, **more)


QWEN = {"tie_embeddings": True, "norm_eps": 1e-6, "rope_theta": 1e6}
SMOLLM2 = {"tie_embeddings": True, "rope_theta": 1e5}
LLAMA32 = {"tie_embeddings": True, "rope_theta": 5e5, "rope_scaling": RopeScaling(type="llama3", factor=32.0)}

# 178m, 512m and 1b are the paper's (Tables 6 and 9 of arXiv 2601.02360, corrected: docs/method.md, Sizes).
# The smaller ones are published models, with a shorter context.
PRESETS: dict[str, ModelConfig] = {
    model.preset: model
    for model in (
        _preset("nano", 1024, 128, 4, 4, 384, 128),
        _preset("10m", 8192, 256, 8, 4, 704, 512),
        _preset("20m", 8192, 384, 8, 6, 1024, 512),
        _preset("178m", 32000, 1024, 9, 8, 2688),
        _preset("512m", 32000, 1536, 12, 12, 5440),
        _preset("1b", 32000, 2048, 16, 8, 8192, 1024),
        _preset("smollm2-135m", 49152, 576, 30, 9, 1536, kv_heads=3, **SMOLLM2),
        _preset("smollm2-360m", 49152, 960, 32, 15, 2560, kv_heads=5, **SMOLLM2),
        _preset("qwen2.5-0.5b", 151936, 896, 24, 14, 4864, kv_heads=2, attention_bias=True, **QWEN),
        _preset("qwen3-0.6b", 151936, 1024, 28, 16, 3072, kv_heads=8, head_dim=128, qk_norm=True, **QWEN),
        _preset("llama3.2-1b", 128256, 2048, 16, 32, 8192, kv_heads=8, **LLAMA32),
    )
}
