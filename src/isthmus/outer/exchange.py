"""What replicas exchange in an outer round, and the protocol that closes a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from isthmus.runlog.facts import Facts


@dataclass(frozen=True, slots=True)
class Contribution:
    """One replica's contribution to one outer round: its packed shards, by their index in `traffic.shards`.

    A process holds those it needs: the whole update, or its stage's part.
    """

    replica: str
    shards: Mapping[int, bytes]
    facts: Facts = field(default_factory=Facts)  # this process's measurements, for the run log


class Exchange(Protocol):
    """Takes this process's contributions and returns all that count, in the order of summation."""

    def closed(self, round_number: int) -> Sequence[Contribution] | None:
        """What counted in a round that was settled without us; None while it is open."""

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        """Deliver, wait until the round is settled, and return what counts in it."""
        ...
