"""Look after the open round while a session's caller is elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from isthmus.errors import RunError
from isthmus.protocol.exchange import LedgerExchange
from isthmus.store import StoreError

LOOK_SECONDS = (0.5, 30.0)  # least and most time between two looks at the open round
MOST_LOOKS = 60  # in a round as long as the previous one


class RoundWatch(threading.Thread):
    """Looks whether the others settle the open round without us, and closes it if it is overdue. It stays
    away while a call of the session runs."""

    def __init__(self, exchange: LedgerExchange) -> None:
        super().__init__(daemon=True, name="watch")
        self.exchange, self.ledger = exchange, exchange.ledger
        self.round, self.passed = 0, False  # the watched round, if any, and whether it was settled
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.fault: Exception | None = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stay away during a call of the session, which raises what has gone wrong here."""
        with self.lock:
            fault, self.fault = self.fault, None
            if fault:
                raise fault
            yield

    def begin(self, round_number: int) -> None:
        """Watch a round; 0: none."""
        self.round, self.passed = round_number, False

    def run(self) -> None:
        while not self.ended.wait(self.pause()):
            self.look_after()

    def pause(self) -> float:
        """Seconds between two looks: more in rounds that are long."""
        before = self.ledger.known(self.round - 1) if self.round else None
        least, most = LOOK_SECONDS
        return min(most, max(least, before.seconds / MOST_LOOKS if before else 0.0))

    def look_after(self) -> None:
        """Look at the open round, and close it if it is overdue."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            self.look()
            self.exchange.close_overdue()
        except StoreError:
            pass  # the next look may succeed, and the next call of the session waits for the store
        except Exception as error:
            self.fault = error
        finally:
            self.lock.release()

    def look(self) -> None:
        if self.round and not self.passed:
            with suppress(RunError):  # a round cannot be settled while the store is down
                self.passed = self.ledger.settled_at(self.round) is not None
