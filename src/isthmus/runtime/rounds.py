"""The rounds of one worker: from its state on disk to the end of the run, or until it leaves."""

import sys
from contextlib import suppress

import torch

from isthmus.errors import Diverged, RunError, RunStopped
from isthmus.outer.rounds import run_rounds
from isthmus.protocol.exchange import Standing
from isthmus.protocol.heartbeat import Vitals
from isthmus.protocol.patience import LeftWaiting
from isthmus.replica.control_group import agree
from isthmus.runtime.after_round import AfterRound
from isthmus.runtime.heartbeat import vitals
from isthmus.runtime.held_out import HeldOutLoss
from isthmus.runtime.leaving import PART, STAY, LeaveRequest, Parted, Settled
from isthmus.runtime.process import History
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
        self.session, self.history = trainer.session, history
        self.session.heart.vitals = self._vitals
        self.session.edge.tells_anchors = not sys.stderr.isatty()

    def run(self) -> None:
        """Return when the run is finished or this process has left it; raise a fault."""
        trainer = self.trainer
        self.session.start()
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
        done = trainer.resume()
        self.after.begin(done)
        self.start.mark("resume")
        rounds = range(done + 1, trainer.recipe.outer.rounds + 1)
        to_the_end = run_rounds(trainer, rounds, self._progress, self.after, self._leaves)
        trainer.finish()
        if to_the_end and extended(trainer):
            rounds = trainer.recipe.outer.rounds
            trainer.save_now()
            raise RunError(f"the run goes on after round {rounds}; starting again for that")
        if not to_the_end:
            trainer.save_now()
        trainer.status.state = "finished" if to_the_end else "left"
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

    def _progress(self, h: int) -> None:
        """Called after each inner step."""
        if not self.start.told:
            if self.trainer.device.type == "cuda":
                torch.cuda.synchronize(self.trainer.device)
            self.start.tell()
            self.session.heart.soon()
        if self.session.exchange.standing is not Standing.AGAIN:  # training again is not progress
            self.settled.step()

    def _leaves(self) -> bool:
        """Whether to leave. If any process was asked to leave or part, all do the same."""
        self.wanted = self.session.wish
        if self.wanted == STAY:
            return False
        self.trainer.status.state = "leaving"
        self.session.heart.soon()
        return True

    def _vitals(self) -> Vitals:
        return vitals(self.history, self.trainer.checkpoint.folder, self.trainer.checkpoint.needs)

    def _left(self, why: str) -> None:
        self.trainer.status.state = "left"
        self.trainer.log(why)

    def _say_farewell(self) -> None:
        try:
            self.session.leave()
        except RunError as error:  # must not hide why the run ended
            self.trainer.log(f"no farewell: {error}")


def extended(trainer: Trainer) -> bool:
    """Whether the run got more rounds since this process started. All processes take the leader's answer."""
    ledger, rounds = trainer.ledger, trainer.recipe.outer.rounds
    leads = trainer.control.rank == 0
    return agree(trainer.control, leads and trainer.patience(ledger.look).run.recipe.outer.rounds > rounds)
