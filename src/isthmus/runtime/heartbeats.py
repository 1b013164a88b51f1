"""A replica's heartbeats: its first process reports its state every few seconds."""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from isthmus.layout.requests import beat_seconds
from isthmus.protocol.heartbeat import CATCHING_UP, Heartbeat, Vitals, own_host
from isthmus.runlog import finite

if TYPE_CHECKING:
    from isthmus.runtime.session import Session


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
