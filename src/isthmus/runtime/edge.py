"""The end of a round that a replica has come late to: it stops there, and starts the next with the others."""

import threading
from contextlib import suppress

from isthmus.errors import RunError
from isthmus.protocol.ledger import Ledger

LOOK_SECONDS = 0.5  # between looks at the manifest, in the one round after a start


class Edge(threading.Thread):
    """Looks whether a round was settled while this process trains it. The inner steps do not wait for it."""

    def __init__(self, ledger: Ledger, round_number: int, every_seconds: float = LOOK_SECONDS) -> None:
        super().__init__(daemon=True, name="edge")
        self.ledger, self.round, self.every = ledger, round_number, every_seconds
        self.ended, self.passed = threading.Event(), threading.Event()

    def run(self) -> None:
        while not self.passed.is_set() and not self.ended.wait(self.every):
            self.look()

    def look(self) -> None:
        with suppress(RunError):  # a store that is away settles nothing
            if self.ledger.settled_at(self.round) is not None:
                self.passed.set()

    def end(self) -> None:
        self.ended.set()
