"""The threads of a session's leader: it reports its state every few seconds, and looks after the open round
while the caller is elsewhere."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from isthmus.errors import RunError
from isthmus.layout.requests import beat_seconds
from isthmus.protocol.exchange import LedgerExchange
from isthmus.protocol.heartbeat import CATCHING_UP, Heartbeat, Vitals, own_host
from isthmus.runlog import finite
from isthmus.store import StoreError

if TYPE_CHECKING:
    from isthmus.runtime.session import Session

LOOK_SECONDS = (0.5, 30.0)  # least and most time between two looks at the open round
MOST_LOOKS = 60  # in a round as long as the previous one


class HeartbeatThread(threading.Thread):
    """Writes a session's heartbeats to the bucket. `vitals` describes the machine behind it."""

    def __init__(self, session: "Session", vitals: Callable[[], Vitals] = Vitals) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self.session, self.ledger, self.vitals = session, session.ledger, vitals
        recipe = self.ledger.run.recipe
        self.least = recipe.bucket.heartbeat_seconds
        self.config = next(m.config for m in recipe.fleet() if m.name == session.replica)
        self.ended, self.news, self.num_beats = threading.Event(), threading.Event(), 0
        self.host = own_host()

    @property
    def every(self) -> float:
        """Seconds until the next heartbeat; longer in long rounds."""
        return beat_seconds(self.least, self.session.usual_seconds)

    def beat(self) -> None:
        session, status = self.session, self.session.status
        catching_up, awaiting, waited_seconds = session.waiting()
        self.num_beats += 1
        self.ledger.beat(
            Heartbeat(
                incarnation=session.incarnation,
                beat=self.num_beats,
                kind=self.config.kind,
                stages=self.config.stages,
                state=CATCHING_UP if catching_up else status.state,
                round=status.round,
                holds=session.round - 1,
                inner_step=status.inner_step,
                loss=finite(status.loss),
                tokens_per_second=status.tokens_per_second,
                awaiting=awaiting,
                waited_seconds=waited_seconds,
                farewell=status.farewell,
                pid=os.getpid(),
                host=self.host,
                every_seconds=self.every,
                vitals=self.vitals(),
            )
        )

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self.beat()
            except Exception as error:  # the next one may succeed; the run itself detects what is wrong
                self.session.log(f"no heartbeat: {str(error).splitlines()[0]}")
            self.news.wait(self.every)
            self.news.clear()

    def soon(self) -> None:
        """Send a heartbeat soon: the others wait for this change of state."""
        self.news.set()

    def end(self) -> None:
        self.ended.set()
        self.news.set()
        self.join(timeout=10)
        self.beat()


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
