"""Parse TOML into a checked Recipe, and write it. Errors name unknown keys, wrong types, bad overrides."""

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.config.checks import choice, nearest, short
from isthmus.config.fleet import AUTO
from isthmus.config.gone import gone_key, without_gone_keys
from isthmus.config.model import PRESETS, ModelConfig, NamedTensors
from isthmus.config.shipped import find_recipe
from isthmus.config.tree import Recipe
from isthmus.errors import ConfigError
from isthmus.reading import DOCUMENT_BYTES, read_text

MOST_DOTS = 64  # in one line: tomllib's time is quadratic in a dotted key's length
MOST_CHARACTERS = 4096  # of one value: the longest path that a system allows


Tensors = Sequence[tuple[str, tuple[int, ...]]]  # (name, shape)
Overrides = Mapping[str, Any] | Sequence[str]  # {"outer.keep": 64}, or ["outer.keep=64"]


def load_recipe(given: str | Path, overrides: Overrides = ()) -> Recipe:
    """Read a recipe, from a file or by the name of a shipped one, and apply overrides such as `outer.keep=64`
    or `{"replicas.edge.count": 2}`."""
    return parse_recipe(find_recipe(given), overrides, str(given))


def parse_recipe(text: str, overrides: Overrides = (), source: str = "recipe") -> Recipe:
    return _overridden(_parse(text, source), settings(overrides))


def settings(overrides: Overrides) -> list[str]:
    """Return overrides in the form of --set."""
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [f"{key}={_toml(value)}" for key, value in overrides.items()]
    return list(overrides)


# For runs older than a key whose default changed behaviour: the value they ran with.
BEFORE = {("subspace", "decay_t_perp"): True}


def stored_recipe(
    text: str, source: str = "recipe", tensors: Tensors = (), overrides: Overrides = ()
) -> Recipe:
    """Parse a run's recipe, as `dump_recipe` wrote it. It may lack newer keys; removed keys are dropped.
    `tensors`: names and shapes that replace its [model]."""
    table = without_gone_keys(_parse(text, source))
    model = table.get("model", {})
    if isinstance(model, dict) and (tensors := tensors or _named(model.get("tensors", ()), source)):
        table["model"] = dataclasses.asdict(NamedTensors())
        for derived in ("tensors", "boundary_tables"):
            del table["model"][derived]
    for (section, key), value in BEFORE.items():
        found = table.setdefault(section, {})
        if isinstance(found, dict):
            found.setdefault(key, value)
    try:
        recipe = _overridden(table, settings(overrides))
        return dataclasses.replace(recipe, model=NamedTensors(tensors=tuple(tensors))) if tensors else recipe
    except ConfigError as error:  # the user did not just type it, so name its location
        raise ConfigError(f"{source}: {error}") from None


def _named(listed: Any, source: str) -> Tensors:
    try:
        return [(str(name), tuple(map(int, shape))) for name, shape in listed]
    except (TypeError, ValueError):
        raise ConfigError(f"{source}: model.tensors is not a list of names and shapes") from None


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Return a file's tables, or raise one line that says why it is not readable TOML."""
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
        return tomllib.loads(text.removeprefix("\ufeff"))  # Windows editors write a byte order mark
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
    """For a table with k/d = "auto", set the wire to "auto" too unless it is stated. Require its link:
    without one, nothing can be picked."""
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
    if name == "custom" or not isinstance(name, str):  # refused later, with the other fields
        return model
    choice("model.preset", name, tuple(PRESETS))
    # A preset gives defaults; fields stated next to it take precedence.
    preset = _stated(PRESETS[name])
    if "heads" in model:
        preset["kv_heads"] = 0  # the preset's may not divide a different number of heads
    if isinstance(scaling := model.get("rope_scaling"), dict):
        model = model | {"rope_scaling": preset["rope_scaling"] | scaling}
    return preset | model


def build_table(cls: type, table: Any, where: str) -> Any:
    """Build a dataclass from a TOML table; errors name unknown keys, missing keys and wrong types."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table, not {_kind(table)}")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("derived")]
    prefix = f"{where}." if where else ""
    values = {}
    for key, value in table.items():
        if key not in known:
            if line := gone_key(re.sub(r"\[\d+\]", "", f"{prefix}{key}")):
                raise ConfigError(line)
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
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if where.endswith(".compression") and isinstance(value, int | float) and not isinstance(value, bool):
        return short(value)  # accept compression = 0.125 as well as "1/8"
    wanted = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        # A number beyond float range is also out of every bound.
        value = float(value) if abs(value) < 2**1000 else math.inf * (1 if value > 0 else -1)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        shown = f" ({short(repr(value) if isinstance(value, str) else value)})"
        shown = "" if isinstance(value, dict | list) else shown
        raise ConfigError(f"{where} is {_kind(value)}{shown}; it must be {wanted}")
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has {len(value):,} characters; it may have {MOST_CHARACTERS:,}")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(f"{where} is not UTF-8 text")  # typed in a terminal with another encoding
    return value


def _kind(value: Any) -> str:
    names = {dict: "a table", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}
    return names.get(type(value), "a number" if isinstance(value, float) else type(value).__name__)


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f'--set {override}: write it as key=value, for example "outer.keep=64"')
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        value = text  # so --set outer.values=2bit needs no quotes
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
    """Find a [[replicas]] table by its name, or by its number from 0."""
    names = [
        short(entry.get("name", i)) if isinstance(entry, dict) else str(i) for i, entry in enumerate(entries)
    ]
    if part in names:
        return entries[names.index(part)]
    if part.isdigit() and int(part) < len(entries):
        return entries[int(part)]
    raise ConfigError(f'--set {override}: there is no "{part}"; there is {", ".join(names) or "none"}')


def as_tables(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as a file states it, without derived values."""
    return dataclasses.asdict(recipe) | {"model": _stated(recipe.model)}


def _stated(model: ModelConfig) -> dict[str, Any]:
    if isinstance(model, NamedTensors):
        return {"tensors": [[name, list(shape)] for name, shape in model.tensors]}
    derived = [f.name for f in dataclasses.fields(model) if f.metadata.get("derived")]
    return {name: value for name, value in dataclasses.asdict(model).items() if name not in derived}


def dump_recipe(recipe: Recipe, with_model: bool = True) -> str:
    """Write the resolved recipe as TOML; `parse_recipe` reads it back unchanged. run.json states named
    tensors elsewhere; with them only `stored_recipe` reads it."""
    table = as_tables(recipe)
    if not with_model:
        del table["model"]
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
    if isinstance(value, list):  # of tensors, one in a line
        return "[\n" + "".join(f"  {json.dumps(each)},\n" for each in value) + "]"
    if isinstance(value, str):
        # Quote as JSON does, except that TOML has no surrogate pairs and treats DEL as a control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
