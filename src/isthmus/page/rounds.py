"""Each replica's outcome in each round: contributed, late, refused or absent."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.page.source import Raw, Settled
from isthmus.runlog import Row

SHOWN = 60  # rounds on the page
MOST_STRANGERS = 16
WORDS = {
    "counted": "contributed",
    "late": "late",
    "refused": "refused",
    "missing": "missing",
    "away": "away",
    "delivered": "delivered",
    "awaited": "awaited",
}


@dataclass(frozen=True)
class Tally:
    """Counts over all rounds of a run: it may have tens of thousands, and the page shows only the last."""

    rows: dict[int, Row]
    rounds: frozenset[int]
    counted: Counter[str]  # replica -> rounds that counted its update
    strangers: frozenset[str]  # replicas in a manifest or a row, but not in the recipe
    simulated: bool


def tally(raw: Raw) -> Tally:
    names = [member.name for member in raw.recipe.fleet()]
    rows = {row.round: row for row in raw.rows if row.round}
    counted: Counter[str] = Counter()
    seen: set[str] = set()
    for t in rows.keys() | raw.settled.keys():
        who, refused = _took_part(raw.settled.get(t) or rows[t], names)
        counted.update(who)
        seen |= who | refused.keys()
    rounds = frozenset(rows.keys() | raw.settled.keys())
    real = raw.has_bucket or any(row.contributors is not None for row in raw.rows)
    return Tally(rows, rounds, counted, frozenset(seen - set(names)), bool(rounds) and not real)


def _took_part(one: Settled | Row, names: list[str]) -> tuple[set[str], Mapping[str, str]]:
    """Return (replicas whose update counted, refused ones with reasons), from a manifest or else a row."""
    if isinstance(one, Settled):
        return set(one.counted), one.refused
    if one.contributors is None:
        return set(names), {}  # simulated: every replica takes part
    return set(one.contributors), one.refused or {}


def grid(raw: Raw, all_rounds: Tally | None = None) -> dict[str, Any]:
    """Return each replica's outcome in each of the last rounds, with a reason if there is one."""
    known = all_rounds or tally(raw)
    fleet = [member.name for member in raw.recipe.fleet()]
    names = fleet + sorted(known.strangers)[:MOST_STRANGERS]
    last = max(known.rounds, default=0)
    numbers = [t for t in range(max(1, last - SHOWN + 1), last + 1) if t in known.rounds]
    found = {t: _words(raw, t, known.rows.get(t), fleet) for t in numbers}
    open_round = last + 1 if raw.has_bucket and last < raw.recipe.outer.rounds and not raw.behind else None
    rows = []
    for name in names:
        cells = [list(found[t].get(name, ("away", ""))) for t in numbers]
        if open_round:
            cells.append(["delivered" if name in raw.delivered else "awaited", ""])
        stranger = name in known.strangers
        rows.append({"replica": name, "counted": known.counted[name], "cells": cells, "stranger": stranger})
    return {
        "rounds": numbers + ([open_round] if open_round else []),
        "open": open_round,
        "settled": len(known.rounds),
        "rows": rows,
        "words": WORDS,
        "simulated": known.simulated,
    }


def _words(raw: Raw, t: int, row: Row | None, names: list[str]) -> dict[str, tuple[str, str]]:
    """Map replicas to (outcome, reason) of one round, from its manifest if there is one, else its row."""
    one = raw.settled.get(t)
    words: dict[str, tuple[str, str]] = {}
    for name in names:
        if one is None:
            words[name] = ("missing", "no update of it was counted")
        elif (t, name) in raw.late:
            words[name] = ("late", "its update came after the round was settled; it returned to its feedback")
        elif name in one.expected:
            words[name] = ("missing", "it was awaited and delivered nothing before the deadline")
        else:
            words[name] = ("away", "it was not a member of this round")
    who, refused = _took_part(one or row or Row(round=t), names)
    words |= {name: ("refused", reason) for name, reason in refused.items()}
    return words | {name: ("counted", "") for name in who}
