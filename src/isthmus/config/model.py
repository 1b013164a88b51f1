"""A model's sizes, and the presets. Standard library only."""

from dataclasses import dataclass, field, replace

from isthmus.config.checks import above, within
from isthmus.errors import ConfigError

# The largest models there are, with room: 4096 layers of 131072 x 524288 are 10,000 times their parameters.
MOST = {
    "vocab": 1 << 24,
    "width": 1 << 17,
    "layers": 4096,
    "heads": 1 << 14,
    "ffn": 1 << 19,
    "context": 1 << 22,
}

TABLES = "boundaries."  # what the names of learned tables begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A LLaMA: RMSNorm, RoPE, SwiGLU, untied head."""

    preset: str = "custom"
    vocab: int
    width: int
    layers: int
    heads: int
    ffn: int
    context: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    start: str = ""  # a Hugging Face LLaMA folder to go on from; "": random weights
    # Learned tables at stage boundaries. A recipe sets it from subspace.anchor; no file states it.
    boundary_tables: int = field(default=0, metadata={"derived": True})

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            within(f"model.{name}", getattr(self, name), 1, most)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"model.heads is {self.heads} and model.width {self.width}; "
                "the width must be an even number of entries for every head"
            )
        above("model.rope_theta", self.rope_theta, 0, 1e12)
        within("model.norm_eps", self.norm_eps, 0, 1)
        above("model.init_std", self.init_std, 0, 1e3)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full-model name and shape, in the order that every replica shares."""
        d, f = self.width, self.ffn
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab, d)}
        for i in range(self.layers):
            block = f"layers.{i}"
            shapes[f"{block}.attention_norm.weight"] = (d,)
            for matrix in ("wq", "wk", "wv", "wo"):
                shapes[f"{block}.attention.{matrix}.weight"] = (d, d)
            shapes[f"{block}.ffn_norm.weight"] = (d,)
            shapes[f"{block}.feed_forward.w1.weight"] = (f, d)
            shapes[f"{block}.feed_forward.w3.weight"] = (f, d)
            shapes[f"{block}.feed_forward.w2.weight"] = (d, f)
        shapes["norm.weight"] = (d,)
        shapes["output.weight"] = (self.vocab, d)
        shapes |= {f"{TABLES}{i}.weight": (self.vocab, d) for i in range(self.boundary_tables)}
        return shapes

    @property
    def plain(self) -> "ModelConfig":
        """The LLaMA alone, without learned tables."""
        return replace(self, boundary_tables=0)

    @property
    def num_parameters(self) -> int:
        d, f = self.width, self.ffn
        return 2 * self.vocab * d + self.layers * (4 * d * d + 3 * d * f + 2 * d) + d

    @property
    def num_stored(self) -> int:
        """Parameters, and the entries of learned tables: what is trained, sent and saved."""
        return self.num_parameters + self.boundary_tables * self.vocab * self.width

    @property
    def token_bytes(self) -> int:
        """Token ids cross a link as the smallest integer type that holds the vocabulary."""
        return 1 if self.vocab <= 2**8 else 2 if self.vocab <= 2**16 else 4


def _preset(
    name: str, vocab: int, width: int, layers: int, heads: int, ffn: int, context: int
) -> ModelConfig:
    return ModelConfig(
        preset=name, vocab=vocab, width=width, layers=layers, heads=heads, ffn=ffn, context=context
    )


# 178m, 512m and 1b are the paper's (Tables 6 and 9 of arXiv 2601.02360, corrected: docs/method.md, Sizes).
PRESETS: dict[str, ModelConfig] = {
    model.preset: model
    for model in (
        _preset("nano", 1024, 128, 4, 4, 384, 128),
        _preset("10m", 8192, 256, 8, 4, 704, 512),
        _preset("20m", 8192, 384, 8, 6, 1024, 512),
        _preset("178m", 32000, 1024, 9, 8, 2688, 2048),
        _preset("512m", 32000, 1536, 12, 12, 5440, 2048),
        _preset("1b", 32000, 2048, 16, 8, 8192, 1024),
    )
}
