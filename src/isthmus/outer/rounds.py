"""The outer-round loop, written once for the simulator and the real fleet."""

import time
from collections.abc import Callable
from typing import Protocol


class Fleet(Protocol):
    """What the loop drives: a whole simulated fleet, or this process's replica of a real fleet."""

    def begin(self, round_number: int) -> bool:
        """Whether to train a round; it may be settled without us."""
        ...

    def train_round(self, round_number: int, progress: Callable[[int], None]) -> None:
        """H inner steps, then our update goes out."""

    def settle(self, round_number: int) -> int:
        """Wait until the round is settled, and apply what counts. Return the round whose anchor we hold then:
        it is a later one if only an anchor in the bucket led on."""
        ...


def run_rounds(
    fleet: Fleet,
    rounds: range,
    progress: Callable[[int], None],
    after: Callable[[int, float], None],
    leave: Callable[[], bool] = lambda: False,
) -> bool:
    """Run outer rounds: train, exchange, apply, and `after(round, seconds of training)`.

    Return False if `leave` ended it between two rounds.
    """
    round_number = rounds.start
    while round_number in rounds:
        trains, trained = fleet.begin(round_number), 0.0
        if leave():
            return False
        if trains:
            started = time.perf_counter()
            fleet.train_round(round_number, progress)
            trained = time.perf_counter() - started
        settled = fleet.settle(round_number)
        if settled == round_number:
            after(round_number, trained)
        round_number = settled + 1
    return True
