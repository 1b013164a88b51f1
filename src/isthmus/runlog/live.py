"""Progress of a run on stderr: one aligned line per round."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Self, TextIO

from isthmus.config import Recipe
from isthmus.printing import visible
from isthmus.runlog.hooks import RoundHooks
from isthmus.runlog.row import Row
from isthmus.runlog.run_dir import totals
from isthmus.runlog.words import clock, rate, size

QUIET_SECONDS = 30.0  # how long a log may be silent
LOSSES = {"loss_mixed": "mixed", "loss_full": "full", "loss_pipelined": "pipelined"}


class View:
    """A run's progress and its hooks. A line waits for its losses until the next round ends.

    A view never stops a run.
    """

    def __init__(
        self,
        recipe: Recipe,
        rounds_done: int,
        total_rounds: int,
        stream: TextIO | None = None,
        rows: Iterable[Row] = (),
        quiet: bool = False,
    ) -> None:
        """`rows`: a resumed run's finished rounds, whose bytes count. `quiet`: print nothing."""
        self.rounds_done, self.total_rounds = rounds_done, total_rounds
        self.stream: TextIO = sys.stderr if stream is None else stream
        self.quiet = quiet
        self.hooks = RoundHooks()
        pipelined = any(replica.kind == "pipelined" for replica in recipe.replicas)
        self.fields = list(LOSSES) if pipelined else ["loss_full"]  # without stages all three are equal
        self.sent = self.dense = 0  # bytes of all rounds
        for row in rows:
            self._count(row)
        self.held: Row | None = None  # its line is not printed yet
        self.lock = threading.RLock()  # rounds and their losses come from two threads
        self.began_round = self.printed = time.monotonic()
        self.recent: deque[float] = deque(maxlen=8)  # seconds of the last rounds, including evaluation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._print_held()

    def inner(self, step: int, num_steps: int, losses: float | Sequence[float] | None = None) -> None:
        """Report `step` of `num_steps` inner steps; `losses` are numbers, not tensors. Long rounds print an
        occasional line."""
        left = self.eta_seconds(step / num_steps)
        if left is None or time.monotonic() - self.printed < QUIET_SECONDS:
            return
        known = [losses] if isinstance(losses, int | float) else losses
        train = f"  train {_loss(sum(known) / len(known))}" if known else ""
        at = f"round {self.rounds_done + 1}/{self.total_rounds}"
        self.note(f"{at}, inner step {step} of {num_steps}{train}  ETA {clock(left)}")

    def round(self, row: Row, awaited: bool = False) -> None:
        """Report a finished outer round (row 0: the evaluation before the first). `awaited`: its losses come
        later, by `losses`."""
        with self.lock:
            self._print_held()
            now = time.monotonic()
            if row.round > 0:
                self.recent.append(now - self.began_round)
            self.rounds_done, self.began_round = row.round, now
            self._count(row)
            self.hooks.add(row, awaited)
            self.held = row
            if not awaited:
                self._print_held()

    def losses(self, row: Row) -> None:
        """Report the losses of an earlier round; None if there will be none."""
        with self.lock:
            self.hooks.fill_in(row)
            if self.held is not None and self.held.round == row.round:
                self.held = row
                self._print_held()
            elif row.loss_full is not None:
                parts = [f"{LOSSES[f]} {row[f]:.2f}" for f in self.fields if row[f] is not None]
                self.note(f"round {row.round}: held-out loss {', '.join(parts)}")

    def note(self, text: str) -> None:
        """Print a message on its own line, such as a replica that left."""
        self.printed = time.monotonic()
        if self.quiet:
            return
        # A closed pipe or a lost terminal ends the progress lines, not the run.
        with contextlib.suppress(OSError, ValueError), self.lock:
            print(visible(text), file=self.stream, flush=True)

    def eta_seconds(self, share: float = 0.0) -> float | None:
        """Return the time left at the pace of the last rounds; in the first round, at that of its steps,
        `share` of which are done."""
        into = time.monotonic() - self.began_round
        if not self.recent and not share:
            return None
        one = sum(self.recent) / len(self.recent) if self.recent else into / share
        return max(0.0, one * (self.total_rounds - self.rounds_done) - into)

    def _count(self, row: Row) -> None:
        new = totals([row])
        self.sent += sum(new["link_bytes"].values())
        self.dense += sum(new["dense_bytes"].values())

    def _print_held(self) -> None:
        with self.lock:
            held, self.held = self.held, None
            if held is not None:
                self.note(self._line(held))

    def _line(self, row: Row) -> str:
        losses = " ".join(f"{LOSSES[field]} {_loss(row[field])}" for field in self.fields)
        if len(self.fields) == 1:
            losses = _loss(row.loss_full)
        parts = [f"round {row.round:>{len(str(self.total_rounds))}}/{self.total_rounds}", f"loss {losses}"]
        if row.round == 0:
            return "  ".join([*parts, "before training"])
        left = self.eta_seconds()
        parts += [f"train {_loss(row.loss_train)}", f"{rate(row.tokens_per_second or 0):>11}"]
        parts.append(f"ETA {clock(left) if left is not None else '?':<6}")
        if self.sent:
            parts.append(f"sent {size(self.sent)}" + (f" (dense {size(self.dense)})" if self.dense else ""))
        return "  ".join(parts).rstrip()


def _loss(value: float | None) -> str:
    return f"{value:5.2f}" if value is not None else "    -"
