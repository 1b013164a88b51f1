"""The outer-round loop, written once for the simulator and the real fleet."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from isthmus.outer.exchange import Contribution, Exchange


class Fleet(Protocol):
    """The object that the loop drives: a whole simulated fleet, or this process's replica of a real fleet."""

    def train_round(self, round_index: int, progress: Callable[[int], None]) -> Sequence[Contribution]: ...

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> None: ...


def run_rounds(
    fleet: Fleet,
    exchange: Exchange,
    rounds: range,
    progress: Callable[[int], None],
    after: Callable[[int, float], None],
    leave: Callable[[], bool] = lambda: False,
) -> bool:
    """Run outer rounds: train, exchange, apply, and `after(round, seconds of training)`.

    A round that was settled without us is applied but not trained. Return False if `leave` ended it between
    two rounds.
    """
    for round_number in rounds:
        if leave():
            return False
        started, trained = time.perf_counter(), 0.0
        counted = exchange.closed(round_number)
        if counted is None:
            own = fleet.train_round(round_number - 1, progress)
            trained = time.perf_counter() - started
            counted = exchange.close(round_number, own)
        fleet.apply(round_number, counted)
        after(round_number, trained)
    return True
