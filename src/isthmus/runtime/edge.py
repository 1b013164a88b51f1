"""Detect the end of a round that a replica joined late, so that it starts the next with the others."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from isthmus.errors import RunError
from isthmus.protocol.ledger import Ledger
from isthmus.replica.control_group import ControlGroup, agree

LOOK_SECONDS = (0.5, 30.0)  # least and most time between looks, in the first round after a start
MOST_LOOKS = 60  # in a round as long as the previous one


class Edge(threading.Thread):
    """Checks whether a round was settled while this process trains it, without delaying inner steps."""

    def __init__(self, ledger: Ledger, round_number: int, usual_seconds: float = 0.0) -> None:
        super().__init__(daemon=True, name="edge")
        least, most = LOOK_SECONDS
        self.every = min(most, max(least, usual_seconds / MOST_LOOKS))
        self.ledger, self.round = ledger, round_number
        self.ended, self.passed = threading.Event(), threading.Event()

    def run(self) -> None:
        while not self.passed.is_set() and not self.ended.wait(self.every):
            self.look()

    def look(self) -> None:
        with suppress(RunError):  # a round cannot be settled while the store is down
            if self.ledger.settled_at(self.round) is not None:
                self.passed.set()


@contextmanager
def watched_edge(
    ledger: Ledger, round_number: int, control: ControlGroup, background: bool
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns, in all processes of a replica, whether the round was settled.

    All call it after each inner step. Without `background` the leader looks in the calling thread.
    """
    before, leads = ledger.manifest(round_number - 1), control.rank == 0
    edge = Edge(ledger, round_number, before.seconds if before else 0.0)

    def passed() -> bool:
        if leads and not background:
            edge.look()
        return agree(control, edge.passed.is_set())

    if leads and background:
        edge.start()
    try:
        yield passed
    finally:
        edge.ended.set()
