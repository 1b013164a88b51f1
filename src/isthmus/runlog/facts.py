"""A replica's report with its update, read by `isthmus status` and `watch`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, get_type_hints

from msgspec import Meta, ValidationError, convert

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
        """Parse what `to_dict` returns; leave out what readers would refuse, such as an infinite norm."""
        known = {}
        for name, kind in get_type_hints(cls, include_extras=True).items():
            with suppress(ValidationError):
                known |= {name: convert(body[name], kind)} if name in body else {}
        return cls(**known)

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
