"""An exported folder, read as what it is: JSON, safetensors and a tokenizer.json from somebody else.

Nothing in a folder is ever executed. `auto_map`, .py files, pickled weights, adapters and chat templates are
not looked at; the code of the boundaries is that of this package.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from isthmus.config import ModelConfig
from isthmus.config.fleet import WIRES
from isthmus.data.tokenizer import Encoder
from isthmus.data.tokenizer_file import tokenizer_bytes
from isthmus.errors import ConfigError
from isthmus.model.hf import CONFIG, PIPELINED, read_config, read_extra, read_json

TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True)
class KeptBoundaries:
    """The boundaries that a folder kept, every number and shape checked."""

    layers: dict[int, int | None]  # layers before the boundary -> which U, None: it is not compressed
    bases: list[Tensor]  # (D, K) each
    table: Tensor | None  # (V, D); None: the embedding
    learned: dict[int, Tensor]  # layers before the boundary -> its learned table (V, D), where it has one
    wire: str
    open_share: float | None


@dataclass(frozen=True)
class ExportedFolder:
    """What config.json says. Weights and boundaries are read when they are asked for."""

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
        """Its tokenizer, with the token that ends a text."""
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
        """A token that tokenizer_config.json names, if it names one."""
        path = self.path / TOKENIZER_SETTINGS
        found = read_json(path).get(key) if os.path.lexists(path) else None
        found = found.get("content") if isinstance(found, dict) else found
        return found if isinstance(found, str) else None


def _boundaries(config: Mapping[str, Any], model: ModelConfig, extra: Mapping[str, Tensor]) -> KeptBoundaries:
    layers: dict[int, int | None] = {}
    for entry in config["boundaries"]:
        layer, number = entry["layer"], entry["basis"]
        if type(layer) is not int or not 0 < layer < model.layers or layer in layers:
            raise ValueError(f"a boundary before layer {layer!r:.40}")
        if number is not None and type(number) is not int:
            raise ValueError(f"U number {number!r:.40}")
        layers[layer] = number
    used = sorted({number for number in layers.values() if number is not None})
    if used != list(range(len(used))):
        raise ValueError("its U are not numbered from 0")
    bases = [extra[f"boundary.basis_{number}"] for number in used]
    table = extra["boundary.table"] if config["frozen_table"] else None
    for basis in bases:
        if basis.ndim != 2 or basis.shape[0] != model.width or not 0 < basis.shape[1] <= model.width:
            raise ValueError("U has another width than the model")
    learned = {}
    if config.get("learned_tables", False):  # not in folders that were written before there were any
        learned = {layer: extra[f"boundary.learned_{i}"] for i, layer in enumerate(layers)}
    tables = [*learned.values(), *([table] if table is not None else [])]
    if any(tuple(one.shape) != (model.vocab, model.width) for one in tables):
        raise ValueError("a table has another shape than the embedding")
    if not all(t.is_floating_point() for t in (*bases, *tables)):
        raise ValueError("U and tables are floating point")
    wire, share = config["wire"], config["open_share"]
    if wire not in WIRES:
        raise ValueError(f"wire is {wire!r:.40}")
    if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
        raise ValueError(f"open_share is {share!r:.40}; it is 0 to 1")
    return KeptBoundaries(layers, bases, table, learned, wire, None if share is None else float(share))
