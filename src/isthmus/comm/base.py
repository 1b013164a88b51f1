"""Two protocols: StageLink moves activations, Exchange closes an outer round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica brings to one outer round: its packed shards, in the order of `traffic.shards`."""

    replica: str
    shards: tuple[bytes, ...]


class StageLink(Protocol):
    """Carries compressed activations one way and their gradients back."""

    def carry(self, z: Tensor) -> Tensor: ...


class Exchange(Protocol):
    """Takes this process's contributions and returns all that count in the round, in the order they are
    summed."""

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]: ...
