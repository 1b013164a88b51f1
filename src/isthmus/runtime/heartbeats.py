"""A replica's heartbeats: its first process says every few seconds how it stands."""

import os
import threading
from pathlib import Path

from isthmus.layout.requests import beat_seconds
from isthmus.protocol.heartbeat import Heartbeat, own_host
from isthmus.runlog import finite
from isthmus.runtime.crashes import Crashes
from isthmus.runtime.same_key import SameKey
from isthmus.runtime.trainer import Trainer


class HeartbeatThread(threading.Thread):
    """Heartbeats of a replica, in the bucket; its first process sends them."""

    def __init__(
        self, trainer: Trainer, incarnation: str, every_seconds: float, work: Path | None = None
    ) -> None:
        """`work` is where this machine's launcher notes why it starts workers again."""
        super().__init__(daemon=True, name="heartbeat")
        self.work = work or trainer.state.folder
        self.trainer, self.incarnation, self.least = trainer, incarnation, every_seconds
        self.ended, self.news, self.num_beats = threading.Event(), threading.Event(), 0
        self.host, self.same_key = own_host(), SameKey(trainer.ledger, incarnation, trainer.log)

    @property
    def every(self) -> float:
        """Seconds until the next one: in long rounds they are few."""
        return beat_seconds(self.least, self.trainer.exchange.rounds.seconds)

    def beat(self) -> None:
        status, member = self.trainer.status, self.trainer.member
        if self.num_beats:
            self.same_key.look(status.round)
        self.num_beats += 1
        self.trainer.ledger.beat(
            Heartbeat(
                incarnation=self.incarnation,
                beat=self.num_beats,
                kind=member.config.kind,
                stages=member.config.stages,
                state=status.state,
                round=status.round,
                inner_step=status.inner_step,
                loss=finite(status.loss),
                tokens_per_second=status.tokens_per_second,
                awaiting=self.trainer.patience.awaiting or self.trainer.exchange.awaiting,
                waited_seconds=self.trainer.patience.waited_seconds
                or self.trainer.exchange.rescue.waited_seconds,
                farewell=status.farewell,
                pid=os.getpid(),
                host=self.host,
                also_on=self.same_key.also_on,
                every_seconds=self.every,
                vitals=Crashes.read(self.work).vitals(self.work, self.trainer.state.needs),
            )
        )

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self.beat()
            except Exception as error:  # the next one may get through; the run itself finds out what is wrong
                self.trainer.log(f"no heartbeat: {str(error).splitlines()[0]}")
            self.news.wait(self.every)
            self.news.clear()

    def soon(self) -> None:
        """The state has changed in a way that the others wait for."""
        self.news.set()

    def end(self) -> None:
        self.ended.set()
        self.news.set()
        self.join(timeout=10)
        self.beat()
