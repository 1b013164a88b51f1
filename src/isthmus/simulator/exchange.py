"""The exchange inside one process: payloads stay here and are counted as if they travelled."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from isthmus.config import Recipe
from isthmus.layout.traffic import shards_read
from isthmus.outer.exchange import Contribution

if TYPE_CHECKING:
    from isthmus.simulator.fleet import SimulatedFleet


class LocalExchange:
    """The exchange among replicas of one process. It counts each shard once up, and once down for each
    machine that reads it."""

    def __init__(self, recipe: Recipe) -> None:
        self.readers = {member.name: shards_read(recipe, member) for member in recipe.fleet()}
        self.sent = self._nothing()

    def _nothing(self) -> dict[str, dict[str, int]]:
        return {name: {"payload_up": 0, "payload_down": 0} for name in self.readers}

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        """What counts in a round: all that was given."""
        if len(own) > 1:
            for contribution in own:
                sizes = [len(shard) for shard in contribution.shards.values()]
                self.sent[contribution.replica]["payload_up"] += sum(sizes)
                for name, readers in self.readers.items():
                    mine = name == contribution.replica  # one of its machines already has it
                    self.sent[name]["payload_down"] += sum(
                        size * (count - mine) for size, count in zip(sizes, readers, strict=True)
                    )
        return own

    def pop_counts(self) -> dict[str, dict[str, int]]:
        """Bytes since the last call, by replica."""
        counts, self.sent = self.sent, self._nothing()
        return counts


class ExchangingFleet:
    """A simulated fleet with its exchange, as the outer-round loop drives it."""

    def __init__(self, fleet: "SimulatedFleet", exchange: LocalExchange) -> None:
        self.fleet, self.exchange = fleet, exchange
        self.own: Sequence[Contribution] = ()

    def begin(self, round_number: int) -> bool:
        return True

    def train_round(self, round_number: int, progress: Callable[[int], None]) -> None:
        self.own = self.fleet.train_round(round_number - 1, progress)

    def settle(self, round_number: int) -> int:
        self.fleet.apply(round_number, self.exchange.close(round_number, self.own))
        return round_number
