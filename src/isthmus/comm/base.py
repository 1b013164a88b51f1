"""Two protocols: StageLink moves activations, Exchange closes an outer round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica brings to one outer round: its packed shards, by their place in `traffic.shards`.

    A process holds those it needs: the whole update, or what concerns its stage.
    """

    replica: str
    shards: Mapping[int, bytes]


class StageLink(Protocol):
    """Carries compressed activations one way and their gradients back."""

    def carry(self, z: Tensor) -> Tensor: ...


class Exchange(Protocol):
    """Takes this process's contributions and returns all that count, in the order in which they are
    summed."""

    def closed(self, round_number: int) -> Sequence[Contribution] | None:
        """What counted in a round that was settled without us; None while it is open."""

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        """Deliver, wait until the round is settled, and return what counts in it."""
