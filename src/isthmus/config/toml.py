"""TOML in, a checked Recipe out, and back. Unknown keys, wrong types and bad overrides are named."""

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.config.checks import choice, nearest, short
from isthmus.config.fleet import AUTO
from isthmus.config.model import PRESETS, ModelConfig
from isthmus.config.shipped import find_recipe
from isthmus.config.tree import Recipe
from isthmus.errors import ConfigError
from isthmus.reading import DOCUMENT_BYTES, read_text

MOST_DOTS = 64  # in one line: tomllib takes the square of a dotted key's length
MOST_TABLES = 8192  # of one kind
MOST_CHARACTERS = 4096  # of one value: the longest path that a system takes


def load_recipe(given: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, by file or by the name of one that ships, and apply `key=value` overrides such as
    `outer.keep=64` or `replicas.edge.count=2`."""
    return parse_recipe(find_recipe(given), overrides, str(given))


def parse_recipe(text: str, overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
    return _overridden(_parse(text, source), overrides)


# What a run did before there was a key for it, where the key's default is to do otherwise.
BEFORE = {("subspace", "decay_t_perp"): True}


def stored_recipe(text: str, source: str = "recipe") -> Recipe:
    """The recipe of a run, as `dump_recipe` wrote it: a key that it lacks is younger than the run."""
    table = _parse(text, source)
    for (section, key), value in BEFORE.items():
        found = table.setdefault(section, {})
        if isinstance(found, dict):
            found.setdefault(key, value)
    try:
        return _overridden(table, ())
    except ConfigError as error:  # nobody typed it just now: say where it lies
        raise ConfigError(f"{source}: {error}") from None


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The tables of a file, or one line that says why it cannot be read as TOML."""
    try:
        text = read_text(path, DOCUMENT_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"cannot read {what}: {error}") from None
    return _parse(text, str(path))


def _parse(text: str, source: str) -> dict[str, Any]:
    if len(text) > DOCUMENT_BYTES:
        raise ConfigError(f"{source} holds {len(text):,} characters; at most {DOCUMENT_BYTES:,} are read")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MOST_DOTS and not line.lstrip().startswith("#"):
            raise ConfigError(
                f"{source}, line {number} has {line.count('.')} dots; a key of ours has three at most"
            )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply; a recipe has tables and links in them") from None
    except ValueError as error:  # a TOMLDecodeError, or an integer of thousands of digits
        raise ConfigError(f"{source} is not valid TOML: {short(error, 200)}") from None


SMALLEST = (
    "`isthmus new mine.toml` writes one to begin with; the smallest has "
    'name = "mine", [model] with preset = "nano", and [[replicas]] with name = "rack"'
)


def _overridden(table: dict[str, Any], overrides: Sequence[str]) -> Recipe:
    for override in overrides:
        _override(table, override)
    if "model" in table and isinstance(table["model"], dict):
        table["model"] = _with_preset(table["model"])
    _prepare_auto(table.get("replicas"))
    return build_table(Recipe, table, "")


def _prepare_auto(replicas: Any) -> None:
    """Of a table that leaves k/d open, the wire is open too, unless it is stated; and its link must be
    stated: for a link that nobody knows nothing can be picked."""
    for replica in replicas if isinstance(replicas, list) else ():
        if not isinstance(replica, dict):
            continue
        if replica.get("compression") == AUTO:
            replica.setdefault("wire", AUTO)
        key = next((key for key in ("compression", "wire") if replica.get(key) == AUTO), None)
        if key and "link" not in replica:
            raise ConfigError(
                f'replica {short(replica.get("name", "?"))}: {key} = "auto" needs the link between its '
                "stages; give link = { mbps = ..., latency_ms = ... } (`isthmus doctor` measures both)"
            )


def _with_preset(model: dict[str, Any]) -> dict[str, Any]:
    name = model.get("preset", "custom")
    if name == "custom" or not isinstance(name, str):  # which is refused with the other fields
        return model
    choice("model.preset", name, tuple(PRESETS))
    # A preset gives defaults; a field beside it wins.
    return _stated(PRESETS[name]) | model


def build_table(cls: type, table: Any, where: str) -> Any:
    """One dataclass from one TOML table: unknown keys, missing keys and wrong types are named."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, not {_kind(table)}")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("derived")]
    prefix = f"{where}." if where else ""
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(
                f'unknown key "{prefix}{short(key)}"{nearest(key, known) or "; known: " + ", ".join(known)}'
            )
        values[key] = _convert(hints[key], value, f"{prefix}{key}")
    for f in dataclasses.fields(cls):
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and f.name not in values:
            hint = ""
            if where == "model" or f.name == "model":
                hint = f"; give model.preset, one of {', '.join(PRESETS)}"
            elif not table:
                hint = f": there is nothing in it. {SMALLEST}"
            raise ConfigError(f'"{prefix}{f.name}" is missing{hint}')
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):  # LinkConfig | None
        hint = typing.get_args(hint)[0]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build_table(hint, value, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list of tables ([[{where}]]), not {_kind(value)}")
        if len(value) > MOST_TABLES:
            raise ConfigError(f"{where} has {len(value):,} entries; it may have {MOST_TABLES:,}")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if where.endswith(".compression") and isinstance(value, int | float) and not isinstance(value, bool):
        return short(value)  # compression = 0.125 reads as well as "1/8"
    wanted = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        # One that no float holds is out of every bound, too.
        value = float(value) if abs(value) < 2**1000 else math.inf * (1 if value > 0 else -1)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        shown = f" ({short(repr(value) if isinstance(value, str) else value)})"
        shown = "" if isinstance(value, dict | list) else shown
        raise ConfigError(f"{where} is {_kind(value)}{shown}; it must be {wanted}")
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has {len(value):,} characters; it may have {MOST_CHARACTERS:,}")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(f"{where} is not UTF-8 text")  # typed in a terminal of another encoding
    return value


def _kind(value: Any) -> str:
    return {
        dict: "a table",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a whole number",
    }.get(type(value), "a number" if isinstance(value, float) else type(value).__name__)


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f'--set {override}: write it as key=value, for example "outer.keep=64"')
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        value = text  # --set outer.values=2bit needs no quotes
    *path, last = key.strip().split(".")
    at: Any = table
    for part in path:
        if isinstance(at, list):
            at = _entry(at, part, override)
        elif isinstance(at, dict):
            at = at.setdefault(part, {})
        if not isinstance(at, dict | list):
            raise ConfigError(f'--set {override}: "{part}" holds no keys')
    if isinstance(at, list):
        raise ConfigError(f"--set {override}: name the entry, for example replicas.NAME.{last}=...")
    at[last] = value


def _entry(entries: list[Any], part: str, override: str) -> Any:
    """A [[replicas]] table by its name, or by its number from 0."""
    names = [
        short(entry.get("name", i)) if isinstance(entry, dict) else str(i) for i, entry in enumerate(entries)
    ]
    if part in names:
        return entries[names.index(part)]
    if part.isdigit() and int(part) < len(entries):
        return entries[int(part)]
    raise ConfigError(f'--set {override}: there is no "{part}"; there is {", ".join(names) or "none"}')


def as_tables(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a file states it, without what follows from it."""
    return dataclasses.asdict(recipe) | {"model": _stated(recipe.model)}


def _stated(model: ModelConfig) -> dict[str, Any]:
    return {
        f.name: getattr(model, f.name) for f in dataclasses.fields(model) if not f.metadata.get("derived")
    }


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML; `parse_recipe` gives it back unchanged."""
    table = as_tables(recipe)
    replicas = table.pop("replicas")
    sections = {key: table.pop(key) for key in list(table) if isinstance(table[key], dict)}
    lines = _lines(table)
    for key, section in sections.items():
        lines += ["", f"[{key}]", *_lines(section)]
    for replica in replicas:
        lines += ["", "[[replicas]]", *_lines(replica)]
    return "\n".join(lines) + "\n"


def _lines(table: dict[str, Any]) -> list[str]:
    return [toml_line(key, value) for key, value in table.items() if value is not None]


def toml_line(key: str, value: Any) -> str:
    return f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(_lines(value)) + " }"
    if isinstance(value, str):
        # As JSON writes it, but TOML has no pairs of surrogates, and DEL is a control character there.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
