"""Lines of results/: one JSON object for each finished run, appended whole. What identifies a run.

Standard library only, besides isthmus.config.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.config import Recipe, ReplicaConfig, stored_recipe
from isthmus.errors import ConfigError
from isthmus.layout.wire import INT_BITS, VERSION

Line = dict[str, Any]

LOSSES = ("loss_full", "loss_pipelined", "loss_mixed")
FIELDS = (
    "row", "scale", "seed", "digest", "recipe", "commit", "device", "torch", "corpus", "corpus_tokens",
    "parameters", "tokens", "seconds", "tokens_per_second", "curve",
)  # fmt: skip
# These do not change what a run computes, or follow from other settings.
_APART = {"name", "seed", "data.corpus", "data.eval_every", "bucket.norm_limit", "model.boundary_tables"}
# Defaults that changed since the first lines were written. A digest knows the value that they had then.
FIRST = {"outer.clip": "none", "subspace.decay_t_perp": True}


def digest(recipe: Recipe, wire_version: int = VERSION) -> str:
    """Return the hash of the settings that differ from their first defaults, so that a new recipe key or
    default keeps the digests of old lines. A wire of few bits adds its version."""
    settings: dict[str, Any] = {}
    for section in dataclasses.fields(recipe):
        value = getattr(recipe, section.name)
        if section.name == "replicas":
            settings["replicas"] = [_changed(replica, ReplicaConfig) for replica in value]
        elif dataclasses.is_dataclass(value):
            settings |= {f"{section.name}.{k}": v for k, v in _changed(value, type(value)).items()}
    settings.pop("model.preset", None)  # only a name for the sizes next to it
    if wire_version > 1 and any(replica.wire in INT_BITS for replica in recipe.replicas):
        settings["wire_version"] = wire_version
    for key, first in FIRST.items():
        section, name = key.split(".")
        settings[key] = getattr(getattr(recipe, section), name)
        if settings[key] == first:
            del settings[key]
    kept = {key: value for key, value in settings.items() if key not in _APART}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


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


def wire_version(line: Mapping[str, Any]) -> int:
    """0 if all stage links carry floats; else the version of the few-bit wire: 1 was not causal, 2 is."""
    recipe = stored_recipe(line["recipe"])
    if not any(replica.wire in INT_BITS for replica in recipe.replicas):
        return 0
    known = (v for v in range(1, VERSION + 1) if digest(recipe, v) == line["digest"])
    return next(known, 1)


def scored_on(fingerprint: str, text: str) -> str:
    """Return what a line calls its text: the fingerprint, and the half that was scored, if not all was."""
    return f"{fingerprint}/{text}" if text else fingerprint


def identity(line: Mapping[str, Any]) -> tuple[int, str, str]:
    """Equal for two lines of the same run, whatever its row is called."""
    return line["seed"], line["digest"], line["corpus"]


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


def read(folder: Path) -> list[Line]:
    """Every run of results/. Of a run that was made twice, the later line counts."""
    found: dict[tuple, Line] = {}
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
        found |= {(line["scale"], *identity(line)): line for line in read_file(path)}
    return list(found.values())


def read_file(path: Path) -> Iterator[Line]:
    """The lines of one file; the last one is left out if a kill cut it short."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for number, part in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            line = json.loads(part)
            needed = FIELDS if line.get("failed") else (*FIELDS, *LOSSES)
            lacking = [name for name in needed if line.get(name) is None]
        except (ValueError, AttributeError):
            raise ConfigError(f"{path}, line {number} is not a JSON object; remove that line") from None
        if lacking:
            raise ConfigError(f'{path}, line {number} has no "{lacking[0]}"; remove it and run it again')
        yield line
