"""What a replica says in the bucket: while its worker runs, by the worker; otherwise by its supervisor."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.disk import free_bytes
from isthmus.errors import RunError
from isthmus.layout.requests import beat_seconds
from isthmus.printing import visible
from isthmus.protocol.heartbeat import (
    CATCHING_UP,
    MOST_MISSING,
    WAITING,
    Heartbeat,
    Vitals,
    own_host,
)
from isthmus.runlog import finite
from isthmus.runlog.facts import MAX_WORD
from isthmus.runtime.process import History

if TYPE_CHECKING:
    from isthmus.runtime.session import Session


def vitals(history: History, work: Path, needed: int | None) -> Vitals:
    """The state of a replica's machine; `needed` is the size of the next save."""
    return Vitals(
        restarts=history.restarts,
        last_error=history.error,
        last_error_seconds=max(0.0, time.time() - history.error_unix) if history.error else None,
        disk_free_bytes=free_bytes(work),
        disk_needed_bytes=needed,
    )


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


class WaitingNotes(threading.Thread):
    """Says in the bucket that no worker runs and what its supervisor waits for, until a worker speaks.

    The note is a separate object next to the heartbeat, so it prolongs no wait for this replica. It names the
    incarnation that has ended and is written at once: closers stop waiting for that one.
    """

    def __init__(
        self,
        work: Path,
        say: Callable[[Heartbeat], None],
        every_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(daemon=True, name="waiting")
        self.work, self.say, self.every, self.clock = work, say, every_seconds, clock
        self.history, self.what, self.missing = History(), "", list[int]()
        self.since, self.next_start = 0.0, 0.0
        self.lock, self.news, self.said = threading.Lock(), threading.Event(), threading.Event()
        self.said.set()

    def wait_for(
        self, what: str, history: History, missing: Sequence[int] = (), seconds: float = 0.0
    ) -> None:
        """`missing`: the absent stages; those of this machine are present and wait. The next start is in so
        many `seconds`."""
        with self.lock:
            now = self.clock()
            if not self.what or history.incarnation != self.history.incarnation:
                self.since = now
            self.what, self.history, self.missing = visible(what), history, list(missing[:MOST_MISSING])
            self.next_start = now + seconds
            self.said.clear()
        self.news.set()

    def over(self) -> None:
        with self.lock:
            self.what = ""
            self.said.set()

    def flush(self, timeout_seconds: float) -> None:
        """Before this process ends, give the bucket time to receive the last note."""
        if self.is_alive():
            self.said.wait(timeout_seconds)

    def text(self) -> str:
        seconds = self.next_start - self.clock()
        ending = f"; next start in {seconds:.0f} s" if seconds > 0 else ""
        return self.what[: MAX_WORD - len(ending)] + ending

    def run(self) -> None:
        while True:
            self.news.wait(self.every)
            self.news.clear()
            self.tell()
            if not self.news.is_set():
                self.said.set()

    def tell(self) -> None:
        """Write the note once more, unless the wait is over."""
        with self.lock:
            if not self.what:
                return
            heartbeat = Heartbeat(
                incarnation=self.history.incarnation,
                state=WAITING,
                awaiting=self.text(),
                waited_seconds=self.clock() - self.since,
                pid=os.getpid(),
                missing=tuple(self.missing),
                vitals=vitals(self.history, self.work, None),
            )
        with contextlib.suppress(RunError, OSError):  # the store itself may be down
            self.say(heartbeat)
