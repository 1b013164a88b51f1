"""The rounds of one worker: from its state on disk to the end of the run, or until it leaves."""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median

import torch

from isthmus.errors import Diverged, RunError, RunStopped
from isthmus.outer.rounds import run_rounds
from isthmus.protocol.exchange import Standing
from isthmus.protocol.heartbeat import Vitals
from isthmus.protocol.patience import LeftWaiting
from isthmus.replica.control_group import agree
from isthmus.runlog.facts import Facts, HeldOut
from isthmus.runlog.held_out import HeldOutLosses
from isthmus.runlog.words import clock as short
from isthmus.runlog.words import rate, size
from isthmus.runtime.heartbeat import vitals
from isthmus.runtime.held_out import HeldOutLoss
from isthmus.runtime.leaving import PART, STAY, LeaveRequest, Parted, Settled
from isthmus.runtime.process import History, Log
from isthmus.runtime.status import StartUp
from isthmus.runtime.trainer import Trainer

REPLAYED_SECONDS = 5.0  # between two lines about rounds replayed from the bucket


class RoundLines:
    """Logs every round's end."""

    def __init__(self, log: Log, num_rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.log, self.num_rounds, self.clock = log, num_rounds, clock
        self.began = clock()  # start of the current round
        self.recent: deque[float] = deque(maxlen=8)  # durations of the last trained rounds
        self.next_replayed = 0.0
        self.said = -1  # the round of the last logged held-out loss

    def round(
        self,
        number: int,
        *,
        compute_seconds: float | None,
        scoring_seconds: float = 0.0,
        loss: float | None,
        tokens_per_second: float | None,
        facts: Facts | None,
        held_out: HeldOut | None,
    ) -> None:
        """`compute_seconds` is None for a round that was settled without us and only applied."""
        now = self.clock()
        seconds, self.began = now - self.began, now
        digits = len(str(self.num_rounds))
        parts = [f"round {number:>{digits}}/{self.num_rounds}"]
        if compute_seconds is None:
            if now >= self.next_replayed:
                self.next_replayed = now + REPLAYED_SECONDS
                self.log("  ".join([*parts, "read from the bucket, not trained here"]))
            return
        if facts or not self.recent:  # a cut-off round says little about the usual duration
            self.recent.append(seconds)
        parts.append(f"loss {loss:.3f}" if loss is not None else "loss -")
        if held_out and held_out.round > self.said:
            self.said = held_out.round
            when = f" (round {held_out.round})" if held_out.round != number else ""
            parts.append(f"held-out {held_out.mixed:.3f}{when}")
        if tokens_per_second:
            parts.append(rate(tokens_per_second))
        if facts:
            up, down = facts.bytes.get("payload_up", 0), facts.bytes.get("payload_down", 0)
            parts.append(f"up {size(up)}, down {size(down)}")
        exchange = max(0.0, seconds - compute_seconds - scoring_seconds)
        scoring = f", {scoring_seconds:.1f} scoring" if scoring_seconds >= 0.05 else ""
        parts.append(f"{seconds:.1f} s ({compute_seconds:.1f} compute, {exchange:.1f} exchange{scoring})")
        left = (self.num_rounds - number) * median(self.recent)  # the median, since one long wait is unusual
        parts.append(f"ETA {short(left)}" if number < self.num_rounds else "the last one")
        self.log("  ".join(parts))


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
        self.lines, self.loss = lines, loss
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
        if done == 0:  # theta^(0), where the curve starts
            self._measure(0)
        self.start.mark("resume")
        rounds = range(done + 1, trainer.recipe.outer.rounds + 1)
        to_the_end = run_rounds(trainer, rounds, self._progress, self._after, self._leaves)
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

    def _after(self, round_number: int, seconds: float) -> None:
        """Called after each round: measure the held-out loss if it is ours to measure, and log a line."""
        trained = self.settled.trained
        self.settled.round()
        began = time.monotonic()
        self._measure(round_number)
        if self.lines:
            self._tell(self.lines, round_number, trained, time.monotonic() - began)

    def _measure(self, round_number: int) -> None:
        """Measure the held-out loss. A failure ends the measurements, not the replica."""
        if self.loss is None:
            return
        try:
            if found := self.trainer.patience(partial(self.loss.after, round_number)):
                self.trainer.measured.held_out = found
        except RunError:
            raise
        except RuntimeError as error:  # most likely out of memory
            words = (str(error).splitlines() or [type(error).__name__])[0]
            self.trainer.log(f"no more held-out losses are measured here: {words}")
            self.loss = None

    def _tell(self, lines: RoundLines, round_number: int, trained: bool, scoring_seconds: float) -> None:
        status, told = self.trainer.status, HeldOutLosses()
        ledger, measured = self.trainer.ledger, self.trainer.measured.held_out
        if manifest := ledger.manifest(round_number):
            told.add(manifest)
        newest = [loss for loss in (told.last[0] if told.last else None, measured) if loss]
        lines.num_rounds = ledger.run.recipe.outer.rounds  # `extend`
        lines.round(
            round_number,
            compute_seconds=status.seconds if trained else None,
            scoring_seconds=scoring_seconds,
            loss=status.loss,
            tokens_per_second=status.tokens_per_second,
            facts=self.trainer.facts,
            held_out=max(newest, key=lambda loss: loss.round, default=None),
        )

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
