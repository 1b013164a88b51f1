"""A worker's tasks after each round: record it, measure the held-out loss if assigned, log it."""

import time
from collections.abc import Callable

from isthmus.errors import RunError
from isthmus.runlog.facts import HeldOut
from isthmus.runlog.held_out import HeldOutLosses
from isthmus.runtime.held_out import HeldOutLoss
from isthmus.runtime.leaving import Settled
from isthmus.runtime.round_lines import RoundLines
from isthmus.runtime.trainer import Trainer


class AfterRound:
    """Called by the outer-round loop; `lines` and `loss` are set if this process logs and measures."""

    def __init__(
        self,
        trainer: Trainer,
        settled: Settled,
        lines: RoundLines | None,
        loss: HeldOutLoss | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trainer, self.settled, self.lines, self.loss, self.clock = trainer, settled, lines, loss, clock

    def begin(self, done: int) -> None:
        """Before the first round, measure theta^(0), where the curve starts."""
        if done == 0:
            self.measure(0)

    def __call__(self, round_number: int, seconds: float) -> None:
        trained = self.settled.trained
        self.settled.round()
        began = self.clock()
        self.measure(round_number)
        if self.lines:
            self._tell(round_number, trained, self.clock() - began)

    def measure(self, round_number: int) -> None:
        """Measure the held-out loss. A failure ends the measurements, not the replica."""
        if self.loss is None:
            return
        try:
            if found := self.trainer.patience(lambda: self._measured(round_number)):
                self.trainer.measured.held_out = found
        except RunError:
            raise
        except RuntimeError as error:  # most likely out of memory
            words = (str(error).splitlines() or [type(error).__name__])[0]
            self.trainer.log(f"no more held-out losses are measured here: {words}")
            self.loss = None

    def _measured(self, round_number: int) -> HeldOut | None:
        assert self.loss is not None, "asked only where there is one"
        return self.loss.after(round_number)

    def _tell(self, round_number: int, trained: bool, scoring_seconds: float) -> None:
        assert self.lines is not None, "told only where there are lines"
        status, told = self.trainer.status, HeldOutLosses()
        if manifest := self.trainer.ledger.manifest(round_number):
            told.add(manifest)
        newest = [told.last[0]] if told.last else []
        newest += [self.trainer.measured.held_out] if self.trainer.measured.held_out else []
        self.lines.num_rounds = self.trainer.ledger.run.recipe.outer.rounds  # `extend`
        self.lines.round(
            round_number,
            compute_seconds=status.seconds if trained else None,
            scoring_seconds=scoring_seconds,
            loss=status.loss,
            tokens_per_second=status.tokens_per_second,
            facts=self.trainer.facts,
            held_out=max(newest, key=lambda said: said.round, default=None),
        )
