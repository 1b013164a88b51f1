"""Rows and facts of a run, as far as they have the right type and a size that can be drawn.

What a run wrote passes unchanged. What somebody else wrote loses whatever would break a sum, a scale or a
line of text further on; no other module checks again. Standard library only.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, cast

from isthmus.config import Recipe
from isthmus.layout.traffic import PURPOSES
from isthmus.printing import visible
from isthmus.runlog.row import AVERAGED, SUMMED, Row
from isthmus.runlog.row import LARGEST as LARGEST_OF_KIND

LARGEST = 1e15
MOST_CHARACTERS = 300
MOST_PATH = 4096  # characters of a path
MOST_ENTRIES = 4096
MOST_ROWS = 100_000
LAST_ROUND = 10**9
NUMBERS = ("lr", "loss_train", "loss_full", "loss_pipelined", "loss_mixed", "grad_norm")
AMOUNTS = ("seconds", "tokens_per_second", "fleet_seconds")
LISTS = (*SUMMED, *AVERAGED, *LARGEST_OF_KIND)
ABOUT_AMOUNTS = (
    "group",
    "pieces",
    "parameters",
    "peak_bytes",
    "predicted_bytes",
    "reserved_bytes",
    "restarts",
)


class About(TypedDict, total=False):
    """about.json. Versions before and after this one may have other keys."""

    isthmus: str
    torch: str
    device: str
    device_type: str  # of a simulation; "cpu" or "cuda"
    device_used: str  # of real processes; such as "cuda:0"
    precision: str
    compiled: bool
    mode: str
    group: int  # replicas that a simulator stacks at once
    pieces: int  # micro-steps into which it cuts a batch
    parked: bool
    predicted_bytes: int
    peak_bytes: int
    reserved_bytes: int
    parameters: int
    auto: list[str]
    corpus: str
    tokenizer_sha256: str
    start_sha256: str
    started: str
    status: str  # running, finished, interrupted or failed
    error: str | None
    restarts: int
    run: str  # a bucket's run_id


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
    shown = visible(" ".join(shown[: 2 * most].split()))
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def clean_rows(found: Iterable[Any], recipe: Recipe) -> tuple[list[Row], int]:
    """(rows in the order of their rounds, how many entries are not rows); of a repeated round, the last."""
    rows: dict[int, Row] = {}
    strange = 0
    for row in found:
        at = row.get("round") if isinstance(row, Mapping) else None
        if (
            isinstance(at, bool)
            or not isinstance(at, int)
            or not 0 <= at <= LAST_ROUND
            or (len(rows) == MOST_ROWS and at not in rows)
        ):
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
    if isinstance(row.get("bytes"), dict):
        found["bytes"] = {name: int(n) for name, n in _named(row["bytes"], PURPOSES, amount).items()}
    if isinstance(row.get("dense_bytes"), dict):
        found["dense_bytes"] = _named(row["dense_bytes"], ("stages", "replicas"), amount)
    found["measured"] = _named(row.get("measured"), kinds, _figures)
    found["bias"] = _named(row.get("bias"), kinds, _bias)
    if isinstance(names := row.get("contributors"), list):
        found["contributors"] = [text(name, 80) for name in names[:MOST_ENTRIES]]
    if isinstance(refused := row.get("refused"), dict):
        entries = list(refused.items())[:MOST_ENTRIES]
        found["refused"] = {text(name, 80): text(reason) for name, reason in entries}
    if isinstance(anchor := row.get("anchor"), str):
        found["anchor"] = text(anchor, 200)
    return Row(round=row["round"], **found)


def _named(value: Any, names: Iterable[str], read: Callable[[Any], Any]) -> dict[str, Any]:
    """The entries of a mapping that are asked for and can be read, in its own order: a row that is read and
    written again is the same line."""
    if not isinstance(value, dict):
        return {}
    wanted = set(names)
    found = {name: read(entry) for name, entry in value.items() if name in wanted}
    return {name: entry for name, entry in found.items() if entry is not None}


def _figures(value: Any) -> dict[str, Any] | None:
    """What the processes of one kind measured in a round; see `measured` in the README."""
    if not isinstance(value, dict):
        return None
    figures: dict[str, Any] = {"replicas": int(amount(value.get("replicas")) or 1) or 1}
    figures["bytes"] = {name: int(n) for name, n in _named(value.get("bytes"), PURPOSES, amount).items()}
    figures |= _named(value, ("seconds", "trip_seconds"), amount)
    figures |= _named(value, LISTS, _amounts)
    return {name: figures[name] for name in (*value, *figures) if name in figures}


def _amounts(value: Any) -> list[float] | None:
    if not isinstance(value, list):
        return None
    return [0 if (read := amount(entry)) is None else read for entry in value[:MOST_ENTRIES]]


def _bias(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    return {"outside": _amounts(value.get("outside")) or [], "drift": amount(value.get("drift"))}


def clean_about(found: Any) -> About:
    """Facts of a run: amounts as numbers, the rest as text, true or false, or a list of texts."""
    about: dict[str, Any] = {}
    for key, value in list(found.items())[:64] if isinstance(found, dict) else ():
        if key in ABOUT_AMOUNTS:
            if (known := amount(value)) is not None:
                about[key] = int(known)
        elif isinstance(value, list):
            about[key] = [str(entry)[:MOST_CHARACTERS] for entry in value[:MOST_ENTRIES]]
        elif isinstance(value, str | bool) or value is None:
            about[key] = value[:MOST_PATH] if isinstance(value, str) else value
        else:
            about[key] = text(value)
    return cast(About, about)


def shown_about(found: Any) -> About:
    """The same for a page: one short line each, and none where there is nothing to say."""
    about = clean_about(found)
    lines = {text(key, 80): value for key, value in about.items() if value not in (None, [], "")}
    for key, value in lines.items():
        lines[key] = value if key in ABOUT_AMOUNTS else text(value)
    return cast(About, lines)
