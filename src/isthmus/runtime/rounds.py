"""The rounds of one worker: from its state on disk to the end of the run, or until it leaves."""

import sys
from contextlib import suppress

import torch

from isthmus.errors import Diverged, RunError, RunStopped
from isthmus.outer.rounds import run_rounds
from isthmus.protocol.exchange import Standing
from isthmus.protocol.missing import LedPast
from isthmus.protocol.patience import LeftWaiting
from isthmus.replica.control_group import agree
from isthmus.runtime.after_round import AfterRound
from isthmus.runtime.heartbeat import HeartbeatThread
from isthmus.runtime.held_out import HeldOutLoss
from isthmus.runtime.leaving import LEAVE, PART, STAY, LeaveRequest, Parted, Settled
from isthmus.runtime.process import History
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.round_lines import RoundLines
from isthmus.runtime.status import StartUp
from isthmus.runtime.trainer import Trainer


class WorkerRounds:
    """Runs a trainer. `lines` and `loss` are set if this process logs rounds and measures losses."""

    def __init__(
        self,
        trainer: Trainer,
        request: LeaveRequest,
        history: History,
        start: StartUp,
        lines: RoundLines | None,
        loss: HeldOutLoss | None,
    ) -> None:
        self.trainer, self.request, self.start = trainer, request, start
        self.leads = trainer.control.rank == 0
        self.wanted = STAY
        self.settled = Settled(request.orders)
        self.after = AfterRound(trainer, self.settled, lines, loss)
        every = trainer.recipe.bucket.heartbeat_seconds
        self.heartbeats = HeartbeatThread(trainer, request.incarnation, every, history)
        trainer.exchange.tells_anchors = not sys.stderr.isatty()

    def run(self) -> None:
        """Return when the run is finished or this process has left it; raise a fault."""
        trainer = self.trainer
        if self.leads:
            self.heartbeats.start()
        try:
            self._run()
        except Parted as stop:
            self.wanted = PART
            self._left(str(stop))
        except LeftWaiting as stop:
            trainer.save_now()
            self._left(str(stop))
            return
        except Diverged:
            with suppress(Exception):  # a late write must not appear where the state was
                trainer.checkpoint.finish()
            raise
        except RunStopped:
            raise
        except RunError as error:  # the leader has left inside a round: so do the other stages
            if self.leads or not self.request.here():
                raise
            trainer.log(f"left: {error}")
            return
        finally:
            if self.leads:
                self._say_farewell()
        self._close()

    def _run(self) -> None:
        trainer = self.trainer
        trainer.status.state = "catching up"
        recovery = Recovery(trainer)
        done = recovery.resume()
        self.after.begin(done)
        self.start.mark("resume")
        to_the_end = self._rounds_after(done, recovery)
        trainer.finish()
        if to_the_end and extended(trainer):
            rounds = trainer.recipe.outer.rounds
            trainer.save_now()
            raise RunError(f"the run goes on after round {rounds}; starting again for that")
        if not to_the_end:
            trainer.save_now()
        trainer.status.state = "finished" if to_the_end else "left"
        trainer.status.farewell = trainer.exchange.gather_facts(trainer.pop_facts())
        trainer.log("all rounds are done" if to_the_end else f"left after round {trainer.status.round}")

    def _close(self) -> None:
        """Stop all processes of the replica. If a machine of theirs is not taken back, it starts again."""
        trainer = self.trainer
        if self.wanted == PART:  # end only after all have saved: a restart of one would end the others
            trainer.control.share(b"saved")
        trainer.replica.close()
        trainer.control.leave()
        if self.wanted == PART and not self.request.parting.asked():
            name = trainer.member.name
            raise RunError(
                f"replica {name}: the machine of another stage was taken back; waiting for its return"
            )

    def _rounds_after(self, done: int, recovery: Recovery) -> bool:
        """The outer-round loop; False if we left before the last round."""
        trainer = self.trainer
        while True:
            rounds = range(done + 1, trainer.recipe.outer.rounds + 1)
            try:
                return run_rounds(trainer, trainer.exchange, rounds, self._progress, self.after, self._leaves)
            except LedPast as gap:
                done = recovery.pass_over(gap)

    def _progress(self, h: int) -> None:
        """Called after each inner step."""
        if not self.start.told:
            if self.trainer.device.type == "cuda":
                torch.cuda.synchronize(self.trainer.device)
            self.start.tell()
            self.heartbeats.soon()
        if self.trainer.exchange.standing is not Standing.AGAIN:  # training again is not progress
            self.settled.step()

    def _leaves(self) -> bool:
        """Whether to leave. If any process was asked to leave or part, all do the same."""
        words = self.trainer.control.share(bytes([self.request.asked()]))
        self.wanted = next((word for word in (LEAVE, PART) if bytes([word]) in words), STAY)
        if self.wanted == STAY:
            return False
        self.trainer.status.state = "leaving"
        self.heartbeats.soon()
        return True

    def _left(self, why: str) -> None:
        self.trainer.status.state = "left"
        self.trainer.log(why)

    def _say_farewell(self) -> None:
        try:
            self.heartbeats.end()
        except RunError as error:  # must not hide why the run ended
            self.trainer.log(f"no farewell: {error}")


def extended(trainer: Trainer) -> bool:
    """Whether the run got more rounds since this process started. All processes take the leader's answer."""
    membership, leads = trainer.ledger.membership, trainer.control.rank == 0
    rounds = trainer.recipe.outer.rounds
    return agree(
        trainer.control, leads and trainer.patience(membership.look).run.recipe.outer.rounds > rounds
    )
