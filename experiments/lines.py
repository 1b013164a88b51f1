"""Lines of results/: one JSON object per finished run, appended whole, and what identifies a run.

Standard library only: the page is drawn, and what is missing is listed, without torch.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.catalog import rows_of, tune_name
from experiments.tables import Scale, recipe_of
from isthmus.config import Recipe, ReplicaConfig
from isthmus.errors import ConfigError

Line = dict[str, Any]

# What every line names; the page is not drawn from a line that lacks one of them.
LOSSES = ("loss_full", "loss_pipelined", "loss_mixed")
FIELDS = (
    "row", "scale", "seed", "digest", "recipe", "commit", "device", "torch", "corpus", "corpus_tokens",
    "parameters", "tokens", "seconds", "tokens_per_second", "curve",
)  # fmt: skip
# These do not change what a run computes: its name, the folder of its text, how often it is scored; or they
# follow from other settings.
_APART = {"name", "seed", "data.corpus", "data.eval_every", "bucket.norm_limit", "model.boundary_tables"}
# Defaults that have changed since the first lines were written: digests know the value that they had then.
FIRST = {"outer.clip": "none", "subspace.decay_t_perp": True}


def digest(recipe: Recipe) -> str:
    """Of the settings that differ from their first defaults: a new recipe key, or a new default, leaves the
    digests of old runs."""
    flat = json.dumps(_differing(recipe), sort_keys=True)
    return hashlib.sha256(flat.encode()).hexdigest()[:12]


def _differing(recipe: Recipe) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for section in dataclasses.fields(recipe):
        value = getattr(recipe, section.name)
        if section.name == "replicas":
            settings["replicas"] = [_changed(replica, ReplicaConfig) for replica in value]
        elif dataclasses.is_dataclass(value):
            settings |= {f"{section.name}.{k}": v for k, v in _changed(value, type(value)).items()}
    settings.pop("model.preset", None)  # only a name for the sizes beside it
    for key, first in FIRST.items():
        section, name = key.split(".")
        settings[key] = getattr(getattr(recipe, section), name)
        if settings[key] == first:
            del settings[key]
    return {key: value for key, value in settings.items() if key not in _APART}


def _changed(value: Any, cls: type) -> dict[str, Any]:
    found = {}
    for f in dataclasses.fields(cls):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        now = getattr(value, f.name)
        if now != default:
            if dataclasses.is_dataclass(now) and not isinstance(now, type):
                now = dataclasses.asdict(now)
            found[f.name] = now
    return found


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line; several workers may do so at once. When this returns, the line survives a kill."""
    data = json.dumps(dict(line), allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = os.fstat(file).st_size
        if end and os.pread(file, 1, end - 1) != b"\n":  # a kill cut the last line short: remove it
            whole = os.pread(file, end, 0)
            os.ftruncate(file, whole.rfind(b"\n") + 1)
        os.write(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def read(folder: Path, scale: Scale) -> list[Line]:
    """Every line of this scale, in the order of the files' names; of a run made twice, the last counts."""
    lines: dict[tuple, Line] = {}
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
        lines |= {identity(line): line for line in read_file(path) if line["scale"] == scale.name}
    return list(lines.values())


def read_file(path: Path) -> Iterator[Line]:
    """The lines of one file, of whichever scale; a last one that a kill cut short is left out."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for number, part in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            line = json.loads(part)
            needed = FIELDS if line.get("failed") else (*FIELDS, *LOSSES)
            lacking = [name for name in needed if line.get(name) is None]
        except (ValueError, AttributeError):
            raise ConfigError(f"{path}, line {number} is not a JSON object; remove that line") from None
        if lacking:
            raise ConfigError(f'{path}, line {number} has no "{lacking[0]}"; remove it, run it anew')
        yield line


def identity(line: Mapping[str, Any]) -> tuple:
    """Equal for two lines of the same run, in whichever rows and tables it appears."""
    return line["seed"], line["digest"], line["corpus"]


def tuned_lrs(scale: Scale, lines: Sequence[Line]) -> dict[str, float]:
    """The learning rate of each method: the best of the tune table as a full forward, once all are there."""
    rows, found = rows_of(scale), dict(scale.lr)
    losses = {(line["seed"], line["digest"]): _loss(line) for line in lines}
    for method, lrs in scale.lrs.items():
        tried = {}
        for lr in lrs:
            row = rows[tune_name(method, lr)]
            recipe = recipe_of(row, scale, row.seeds[0], "", scale.lr)
            tried[lr] = losses.get((recipe.seed, digest(recipe)))
        if None not in tried.values() and min(tried.values()) < float("inf"):
            found[method] = min(lrs, key=tried.__getitem__)
    return found


def _loss(line: Line) -> float:
    return float("inf") if line.get("failed") else line["loss_full"]
