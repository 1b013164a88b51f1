"""Round by round, who contributed, was late, was refused or did not come."""

from typing import Any

from isthmus.watch.source import Raw

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


def grid(raw: Raw) -> dict[str, Any]:
    """For every replica a word for each of the last rounds, the reason where there is one, and its score."""
    names = [member.name for member in raw.recipe.fleet()]
    found = settled(raw)
    strangers = {name for words in found.values() for name in words} - set(names)
    names += sorted(strangers)[:MOST_STRANGERS]
    last = max(found, default=0)
    numbers = [t for t in range(max(1, last - SHOWN + 1), last + 1) if t in found]
    open_round = last + 1 if raw.has_bucket and last < raw.recipe.outer.rounds and not raw.behind else None
    rows = []
    for name in names:
        cells = [list(found[t].get(name, ("away", ""))) for t in numbers]
        if open_round:
            cells.append(["delivered" if name in raw.delivered else "awaited", ""])
        score = sum(words.get(name, ("",))[0] == "counted" for words in found.values())
        rows.append({"replica": name, "counted": score, "cells": cells, "stranger": name in strangers})
    return {
        "rounds": numbers + ([open_round] if open_round else []),
        "open": open_round,
        "settled": len(found),
        "rows": rows,
        "words": WORDS,
        "simulated": bool(found)
        and not raw.has_bucket
        and all(r.get("contributors") is None for r in raw.rows),
    }


def settled(raw: Raw) -> dict[int, dict[str, tuple[str, str]]]:
    """round -> replica -> (word, reason); from manifests where there are some, else from rows."""
    names = [member.name for member in raw.recipe.fleet()]
    found: dict[int, dict[str, tuple[str, str]]] = {}
    for row in raw.rows:
        t = row["round"]
        if t == 0:
            continue
        if row.get("contributors") is None:
            found[t] = dict.fromkeys(names, ("counted", ""))  # simulated: nobody is late there
            continue
        words = {name: ("missing", "no update of it was counted") for name in names}
        words |= {name: ("refused", reason) for name, reason in (row.get("refused") or {}).items()}
        found[t] = words | dict.fromkeys(row["contributors"], ("counted", ""))
    for t, one in raw.settled.items():
        words = {}
        for name in names:
            if (t, name) in raw.late:
                words[name] = (
                    "late",
                    "its update came after the round was settled; it returned to its feedback",
                )
            elif name in one.expected:
                words[name] = ("missing", "it was awaited and delivered nothing before the deadline")
            else:
                words[name] = ("away", "it was not a member of this round")
        words |= {name: ("refused", reason) for name, reason in one.refused.items()}
        found[t] = words | dict.fromkeys(one.counted, ("counted", ""))
    return found
