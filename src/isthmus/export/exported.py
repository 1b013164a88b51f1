"""Read an exported folder: JSON, safetensors and a tokenizer.json.

Nothing in a folder is ever executed. `auto_map`, .py files, pickled weights, adapters and chat templates are
ignored; the boundaries run this package's own code.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isthmus.config import ModelConfig
from isthmus.config.fleet import WIRES
from isthmus.data.tokenizer import Encoder, tokenizer_bytes
from isthmus.errors import ConfigError
from isthmus.layout.wire import INT_BITS, VERSION
from isthmus.model.hf import CONFIG, PIPELINED, read_config, read_extra, read_json

TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True)
class KeptBoundaries:
    """The boundaries stored in a folder."""

    layers: dict[int, int | None]  # layers before the boundary -> its U, None: not compressed
    bases: list[Tensor]  # (D, K) each
    table: Tensor | None  # (V, D); None: the embedding
    learned: dict[int, Tensor]  # layers before the boundary -> its learned table (V, D), if it has one
    wire: str
    open_share: float | None


@dataclass(frozen=True)
class ExportedFolder:
    """What config.json says. Weights and boundaries are read on demand."""

    path: Path
    config: dict[str, Any]
    model: ModelConfig

    @classmethod
    def open(cls, path: Path) -> "ExportedFolder":
        return cls(path, read_json(path / CONFIG), read_config(path))

    @property
    def pipelined(self) -> bool:
        return self.config.get("model_type") == PIPELINED

    def boundaries(self) -> KeptBoundaries:
        try:
            return _boundaries(self.config, self.model, read_extra(self.path, "boundary."))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            known = ", ".join(WIRES)
            raise ConfigError(
                f"{self.path / CONFIG} does not describe its boundaries ({error!r:.200}; wires are {known}); "
                "export it again"
            ) from None

    def encoder(self) -> Encoder:
        """Return its tokenizer, with the token that ends a text."""
        path = self.path / TOKENIZER
        if not path.is_file():
            raise ConfigError(f"{self.path} holds no {TOKENIZER}; a model without one cannot read a prompt")
        encoder = Encoder(tokenizer_bytes(path), self.special_token("eos_token"), str(path))
        if encoder.vocab_size > self.model.vocab:
            raise ConfigError(
                f"{path} has {encoder.vocab_size:,} tokens, the model only {self.model.vocab:,}; "
                "copy the folder again"
            )
        return encoder

    def special_token(self, key: str) -> str | None:
        """Return a token from tokenizer_config.json, if it names one."""
        path = self.path / TOKENIZER_SETTINGS
        found = read_json(path).get(key) if os.path.lexists(path) else None
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None


def _boundaries(config: Mapping[str, Any], model: ModelConfig, extra: Mapping[str, Tensor]) -> KeptBoundaries:
    layers = {entry["layer"]: entry["basis"] for entry in config["boundaries"]}
    if not all(0 < layer < model.layers for layer in layers):
        raise ValueError(f"the model has {model.layers} layers, and boundaries before {list(layers)!s:.80}")
    bases = [extra[f"boundary.basis_{number}"] for number in range(len(config["subspace_dims"]))]
    if any(number is not None and not 0 <= number < len(bases) for number in layers.values()):
        raise ValueError(f"{len(bases)} U for the boundaries {layers!s:.80}")
    learned = {}
    if config.get("learned_tables", False):  # older folders lack the key
        learned = {layer: extra[f"boundary.learned_{i}"] for i, layer in enumerate(layers)}
    wire, share = config["wire"], config["open_share"]
    if wire not in WIRES:
        raise ValueError(f"wire is {wire!r:.40}")
    if wire in INT_BITS and (version := config.get("wire_version", 1)) != VERSION:
        raise ValueError(f"version {version!r:.40} of the {wire} wire, and not {VERSION}")
    table = extra["boundary.table"] if config["frozen_table"] else None
    return KeptBoundaries(layers, bases, table, learned, wire, None if share is None else float(share))
