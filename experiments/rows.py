"""rows.toml as recipes. Standard library only, besides isthmus.config."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from isthmus.config import Recipe, parse_recipe
from isthmus.errors import ConfigError

FILE = Path(__file__).with_name("rows.toml")
_RACK = '[[replicas]]\nname = "rack"\nkind = "full"\ncount = {}\n\n'
_EDGE = """[[replicas]]
name = "edge"
kind = "pipelined"
stages = 4
count = {}
compression = "{}"
wire = "{}"
"""
_KEYS = {"fleet", "base", "full", "k", "wire", "h", "set", "seeds"}


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration at one scale, its seeds, and the file of results/ that keeps its lines."""

    name: str
    scale: str
    file: str
    toml: str
    settings: tuple[str, ...]  # as `--set` takes them
    seeds: tuple[int, ...]
    text: str = ""  # the half of the held-out text that it is scored on; "" is all of it

    def recipe(self, seed: int, corpus: str = "corpus") -> Recipe:
        return parse_recipe(self.toml, [*self.settings, f'data.corpus="{corpus}"', f"seed={seed}"])


@cache
def scales(path: Path = FILE) -> dict[str, dict[str, Any]]:
    return tomllib.loads(path.read_text(encoding="utf-8"))["scales"]


@cache
def rows(path: Path = FILE) -> tuple[Row, ...]:
    """Every row of the file, in its order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["rows"]
    return tuple(
        _row(name, scale, file, entry)
        for scale, files in tables.items()
        for file, entries in files.items()
        for name, entry in entries.items()
    )


def pick(names: list[str], scale: str | None = None) -> list[Row]:
    """The rows with these names or of these files; all of them if none is given."""
    if scale is not None and scale not in scales():
        raise ConfigError(f'--scale is "{scale}"; rows.toml has {", ".join(scales())}')
    # A trial of the machinery runs only when it is asked for.
    found = [row for row in rows() if row.scale == scale or (scale is None and row.scale != "toy")]
    for name in names:
        if not any(name in (row.name, row.file) for row in found):
            files = ", ".join(dict.fromkeys(row.file for row in found))
            raise ConfigError(f'rows.toml has no row and no file "{name}"; its files are {files}')
    return [row for row in found if not names or row.name in names or row.file in names]


def _row(name: str, scale_name: str, file: str, entry: dict[str, Any]) -> Row:
    if unknown := sorted(entry.keys() - _KEYS):
        raise ConfigError(
            f'{FILE.name}: row "{name}" has "{unknown[0]}"; a row has {", ".join(sorted(_KEYS))}'
        )
    scale = scales()[scale_name]
    inner_steps = entry.get("h", scale["inner_steps"])
    rounds = -(-scale["inner_steps"] * scale["rounds"] // inner_steps)  # the same tokens, whatever H is
    settings = [
        *scale["set"],
        f"outer.inner_steps={inner_steps}",
        f"outer.rounds={rounds}",
        *scale["base"][entry.get("base", "sparseloco")],
        *entry.get("set", ()),
    ]
    fleet = "".join(_fleet(entry, scale["replicas"]))
    # The paper's method has no clip; a recipe has.
    toml = f'name = "{scale_name}-{name}"\n[model]\npreset = "nano"\n[outer]\nclip = "none"\n{fleet}'
    seeds = tuple(range(entry.get("seeds", 3)))
    return Row(name, scale_name, file, toml, tuple(settings), seeds, scale.get("text", ""))


def _fleet(entry: dict[str, Any], replicas: int) -> Iterator[str]:
    kind = entry.get("fleet", "dense")
    full = entry.get("full", replicas // 2) if kind == "het" else 0
    if full:
        yield _RACK.format(full)
    compression = "none" if kind == "dense" else entry.get("k", "1/8")
    yield _EDGE.format(replicas - full, compression, entry.get("wire", "bf16"))
