"""A replica's report with its update, read by `isthmus status` and `watch`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

MAX_WORD = 200  # characters of a short text
MOST_LOSS = 1e6  # nats
MAX_PROCESSES = 32  # larger replicas report no `measured`: the commit would get too long
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Figure = Annotated[float, Meta(ge=-(2.0**63), le=2.0**63)]
Loss = Annotated[float, Meta(ge=0.0, lt=MOST_LOSS)]
Purpose = Annotated[str, Meta(pattern=r"^[a-z_]{1,40}\Z")]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out losses of theta^(round), in nats, as one replica measured them; see row.py."""

    round: Count
    full: Loss
    pipelined: Loss | None = None
    mixed: Loss

    @classmethod
    def from_dict(cls, body: Any) -> "HeldOut | None":
        """Parse a stranger's report: None unless it is fully valid."""
        if not isinstance(body, dict) or not _is_number(body.get("round"), int) or body["round"] < 0:
            return None
        losses = {name: number(body, name) for name in ("full", "pipelined", "mixed")}
        if losses["full"] is None or losses["mixed"] is None:
            return None
        if any(loss is not None and not 0 <= loss < MOST_LOSS for loss in losses.values()):
            return None
        return cls(
            round=body["round"], full=losses["full"], pipelined=losses["pipelined"], mixed=losses["mixed"]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One replica's figures of one outer round. Readers check types and sizes, not whether they are true."""

    loss: Figure | None = None
    grad_norm: Figure | None = None
    seconds: Figure | None = None  # of the inner steps
    trip_seconds: Figure | None = None  # slowest link, there and back
    bytes: Mapping[Purpose, Count] = field(default_factory=dict)  # by purpose, since the last commit
    measured: Mapping[Purpose, Annotated[Sequence[Figure], Meta(max_length=MAX_PROCESSES)]] = field(
        default_factory=dict
    )  # one number per process
    held_out: HeldOut | None = None  # the last that this replica measured, if it measures

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON fields, without unknown values."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != {}}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Facts":
        """Parse a stranger's report; values of a wrong type or size are left out."""
        return cls(
            loss=number(body, "loss"),
            grad_norm=number(body, "grad_norm"),
            seconds=number(body, "seconds"),
            trip_seconds=number(body, "trip_seconds"),
            bytes={name: n for name, n in _named(body, "bytes") if _is_number(n, int) and n >= 0},
            measured={name: row for name, row in _named(body, "measured") if _is_figures(row)},
            held_out=HeldOut.from_dict(body.get("held_out")),
        )

    def plus(self, more: "Facts") -> "Facts":
        """Add what another part of the same process counted."""
        total = {key: self.bytes.get(key, 0) + more.bytes.get(key, 0) for key in {**self.bytes, **more.bytes}}
        return replace(self, bytes=total, measured={**self.measured, **more.measured})

    @classmethod
    def gather(cls, processes: Sequence["Facts"]) -> "Facts":
        """Combine a replica's facts: those of its first process, with every process's bytes and figures."""
        total: Counter[str] = Counter()
        for facts in processes:
            total.update(facts.bytes)
        measured = {}
        if len(processes) <= MAX_PROCESSES:
            for name in processes[0].measured:
                measured[name] = [n for facts in processes for n in facts.measured.get(name, [0])]
        return replace(processes[0], bytes=dict(total), measured=measured)


def number(body: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of reasonable size, or None."""
    return body[key] if _is_number(body.get(key), int | float) else None


def _named(body: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a table that have plain names."""
    table = body.get(key)
    for name, value in table.items() if isinstance(table, dict) else ():
        if isinstance(name, str) and re.fullmatch("[a-z_]{1,40}", name):
            yield name, value


def _is_figures(row: Any) -> bool:
    listed = isinstance(row, list) and len(row) <= MAX_PROCESSES
    return listed and all(_is_number(n, int | float) and n >= 0 for n in row)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < 2**63
