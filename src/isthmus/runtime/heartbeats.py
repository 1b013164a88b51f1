"""A replica's heartbeats: its first process reports its state every few seconds."""

import os
import threading
from pathlib import Path

from isthmus.layout.requests import beat_seconds
from isthmus.protocol.heartbeat import CATCHING_UP, Heartbeat, own_host
from isthmus.runlog import finite
from isthmus.runtime.crashes import Crashes
from isthmus.runtime.trainer import Trainer


class HeartbeatThread(threading.Thread):
    """Writes a replica's heartbeats to the bucket, in its first process."""

    def __init__(
        self, trainer: Trainer, incarnation: str, every_seconds: float, work: Path | None = None
    ) -> None:
        """`work` is where this machine's launcher notes why it restarts workers."""
        super().__init__(daemon=True, name="heartbeat")
        self.work = work or trainer.checkpoint.folder
        self.trainer, self.incarnation, self.least = trainer, incarnation, every_seconds
        self.ended, self.news, self.num_beats = threading.Event(), threading.Event(), 0
        self.host = own_host()

    @property
    def every(self) -> float:
        """Seconds until the next heartbeat; longer in long rounds."""
        return beat_seconds(self.least, self.trainer.exchange.rounds.seconds)

    def beat(self) -> None:
        status, member = self.trainer.status, self.trainer.member
        self.num_beats += 1
        self.trainer.ledger.beat(
            Heartbeat(
                incarnation=self.incarnation,
                beat=self.num_beats,
                kind=member.config.kind,
                stages=member.config.stages,
                state=CATCHING_UP if self.trainer.exchange.missing.since else status.state,
                round=status.round,
                holds=self.trainer.exchange.held,
                inner_step=status.inner_step,
                loss=finite(status.loss),
                tokens_per_second=status.tokens_per_second,
                awaiting=self.trainer.patience.awaiting
                or self.trainer.exchange.missing.awaiting
                or self.trainer.exchange.awaiting,
                waited_seconds=self.trainer.patience.waited_seconds
                or self.trainer.exchange.missing.waited_seconds,
                farewell=status.farewell,
                pid=os.getpid(),
                host=self.host,
                every_seconds=self.every,
                vitals=Crashes.read(self.work).vitals(self.work, self.trainer.checkpoint.needs),
            )
        )

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self.beat()
            except Exception as error:  # the next one may succeed; the run itself detects what is wrong
                self.trainer.log(f"no heartbeat: {str(error).splitlines()[0]}")
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
