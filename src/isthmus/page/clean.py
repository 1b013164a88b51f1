"""Rows and facts of a run, as far as they have the right type and a size that can be drawn.

What a run wrote passes unchanged. What somebody else wrote loses whatever would break a sum, a scale or a
line of text further on; no other module checks again.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from isthmus.config import Recipe
from isthmus.layout.traffic import PURPOSES
from isthmus.runlog import About, Row
from isthmus.runlog.row import AVERAGED, SUMMED
from isthmus.runlog.row import LARGEST as LARGEST_OF_KIND

LARGEST = 1e15
MOST_CHARACTERS = 300
MOST_ENTRIES = 4096
NUMBERS = ("lr", "loss_train", "loss_full", "loss_pipelined", "loss_mixed", "grad_norm")
AMOUNTS = ("seconds", "tokens_per_second", "fleet_seconds")
LISTS = (*SUMMED, *AVERAGED, *LARGEST_OF_KIND)
ABOUT_AMOUNTS = ("parameters", "peak_bytes", "predicted_bytes", "restarts")


def number(value: Any) -> float | None:
    """A finite number that survives being scaled; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= LARGEST else None  # which NaN is not


def amount(value: Any) -> float | None:
    known = number(value)
    return known if known is not None and known >= 0 else None


def text(value: Any, most: int = MOST_CHARACTERS) -> str:
    """One printable line; markup stays what it is, letters, and is only ever shown as text."""
    shown = value if isinstance(value, str) else repr(value) if isinstance(value, list | dict) else str(value)
    shown = "".join(c if c.isprintable() else " " for c in shown[: 2 * most])
    shown = " ".join(shown.split())
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def clean_rows(found: Iterable[Any], recipe: Recipe) -> tuple[list[Row], int]:
    """(rows in the order of their rounds, how many entries are not rows); of a repeated round, the last."""
    rows: dict[int, Row] = {}
    strange = 0
    for row in found:
        at = row.get("round") if isinstance(row, Mapping) else None
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= 10**9:
            strange += 1
        else:
            rows[at] = clean_row(row, recipe)
    return [rows[at] for at in sorted(rows)], strange


def clean_row(row: Mapping[str, Any], recipe: Recipe) -> Row:
    kinds = [replica.name for replica in recipe.replicas]
    found: dict[str, Any] = {name: int(amount(row.get(name)) or 0) for name in ("inner_steps", "tokens")}
    found |= {name: number(row.get(name)) for name in NUMBERS}
    found |= {name: amount(row.get(name)) for name in AMOUNTS}
    found |= {name: _named(row.get(name), kinds, number) for name in ("train_by_kind", "loss_by_kind")}
    found["bytes"] = {name: int(n) for name, n in _named(row.get("bytes"), PURPOSES, amount).items()}
    found["dense_bytes"] = _named(row.get("dense_bytes"), ("stages", "replicas"), amount)
    found["measured"] = _named(row.get("measured"), kinds, _figures)
    found["bias"] = _named(row.get("bias"), kinds, _bias)
    if isinstance(names := row.get("contributors"), list):
        found["contributors"] = [text(name, 80) for name in names[:MOST_ENTRIES]]
    if isinstance(refused := row.get("refused"), dict):
        entries = list(refused.items())[:MOST_ENTRIES]
        found["refused"] = {text(name, 80): text(reason) for name, reason in entries}
    return Row(round=row["round"], **found)


def _named(value: Any, names: Iterable[str], read: Callable[[Any], Any]) -> dict[str, Any]:
    """The entries of a mapping that are asked for and can be read."""
    if not isinstance(value, dict):
        return {}
    found = {name: read(value[name]) for name in names if name in value}
    return {name: entry for name, entry in found.items() if entry is not None}


def _figures(value: Any) -> dict[str, Any] | None:
    """What the processes of one kind measured in a round; see `measured` in the README."""
    if not isinstance(value, dict):
        return None
    figures: dict[str, Any] = {"replicas": int(amount(value.get("replicas")) or 1) or 1}
    figures["bytes"] = {name: int(n) for name, n in _named(value.get("bytes"), PURPOSES, amount).items()}
    figures |= _named(value, ("seconds", "trip_seconds"), amount)
    return figures | _named(value, LISTS, _amounts)


def _amounts(value: Any) -> list[float] | None:
    return [amount(entry) or 0 for entry in value[:MOST_ENTRIES]] if isinstance(value, list) else None


def _bias(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    return {"outside": _amounts(value.get("outside")) or [], "drift": amount(value.get("drift"))}


def clean_about(found: Any) -> About:
    """Facts of a run: amounts as numbers, all else as a line of text."""
    if not isinstance(found, dict):
        return {}
    entries = [(text(key, 80), value) for key, value in list(found.items())[:64]]
    about: dict[str, Any] = {key: text(value) for key, value in entries if value not in (None, [], "")}
    for key in ABOUT_AMOUNTS:
        about.pop(key, None)
        if (known := amount(found.get(key))) is not None:
            about[key] = int(known)
    return cast(About, about)
