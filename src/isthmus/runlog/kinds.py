"""What replicas told, together for each [[replicas]] table. Loads no torch: `isthmus watch` uses it."""

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.config import Member

SUMMED = ("forth_bytes", "back_bytes")  # over the replicas of a kind; the other figures are means
AVERAGED = ("compute_seconds", "up_seconds", "down_seconds")


def by_kind(members: Sequence[Member], values: Sequence[float]) -> dict[str, float]:
    """Mean over the replicas of each [[replicas]] table."""
    kinds: dict[str, list[float]] = {}
    for member, value in zip(members, values, strict=True):
        kinds.setdefault(member.config.name, []).append(value)
    return {name: sum(group) / len(group) for name, group in kinds.items()}


def measured_by_kind(
    members: Sequence[Member], told: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """One round's figures of every [[replicas]] table, from what its replicas told.

    Lists have one entry a process: bytes are sums over replicas, seconds means, peaks the largest.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for member in members:
        if member.name in told:
            kinds.setdefault(member.config.name, []).append(told[member.name])
    return {name: _together(facts) for name, facts in kinds.items()}


def _together(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    together: dict[str, Any] = {"replicas": len(facts), "bytes": {}}
    for key in ("seconds", "trip_seconds"):
        if known := [fact[key] for fact in facts if fact.get(key)]:
            together[key] = sum(known) / len(known)
    for fact in facts:
        for purpose, number in fact.get("bytes", {}).items():
            together["bytes"][purpose] = together["bytes"].get(purpose, 0) + int(number)
    lists = [fact["measured"] for fact in facts if fact.get("measured")]
    for key in (*SUMMED, *AVERAGED, "peak_bytes"):
        if not (rows := [row[key] for row in lists if row.get(key)]):
            continue
        columns = list(zip(*rows, strict=False))
        if key in SUMMED:
            together[key] = [sum(column) for column in columns]
        elif key in AVERAGED:
            together[key] = [round(sum(column) / len(column), 5) for column in columns]
        else:
            together[key] = [max(column) for column in columns]
    return together


def add_farewell(
    row: dict[str, Any], members: Sequence[Member], told: Mapping[str, Mapping[str, Any]]
) -> None:
    """What replicas counted after their last commits joins the figures of the last row."""
    for name, last in measured_by_kind(members, told).items():
        kind = row.setdefault("measured", {}).setdefault(name, {"replicas": last["replicas"], "bytes": {}})
        for purpose, number in last["bytes"].items():
            kind["bytes"][purpose] = kind["bytes"].get(purpose, 0) + number
        for key in (*SUMMED, *AVERAGED, "peak_bytes"):
            if key in last:
                before = kind.get(key) or [0] * len(last[key])
                join = max if key == "peak_bytes" else lambda a, b: a + b
                kind[key] = [join(a, b) for a, b in zip(before, last[key], strict=False)]
