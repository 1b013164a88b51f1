"""Progress of a run on stderr: a view that redraws on a terminal, one line per round elsewhere."""

import contextlib
import os
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


def open_view(
    recipe: Recipe,
    rounds_done: int,
    total_rounds: int,
    stream: TextIO | None = None,
    rows: Iterable[Row] = (),
    quiet: bool = False,
) -> "View":
    """Return a view for `with`. `rows` are a resumed run's finished rounds."""
    out: TextIO = sys.stderr if stream is None else stream
    progress = Progress(recipe, rounds_done, total_rounds, rows)
    if quiet:
        return View(progress, out)
    if is_interactive(out):
        with contextlib.suppress(ImportError):
            from isthmus.runlog.terminal import TerminalView

            return TerminalView(progress, out)
    return PlainView(progress, out)


def is_interactive(stream: TextIO) -> bool:
    """Return whether this is a terminal that can move its cursor, and not a CI log."""
    if not stream.isatty() or os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return os.environ.get("TERM", "") not in ("dumb", "unknown", "") or os.name == "nt"


class Progress:
    """The figures of both views: the last row, sums over all rows, and the time left."""

    def __init__(self, recipe: Recipe, rounds_done: int, total_rounds: int, rows: Iterable[Row] = ()) -> None:
        self.recipe = recipe
        self.rounds_done = rounds_done
        self.total_rounds = total_rounds
        self.losses = list(LOSSES)
        if not any(replica.kind == "pipelined" for replica in recipe.replicas):
            self.losses = ["loss_full"]  # all three are equal
        self.last: Row | None = None
        self.measured: dict[str, deque[float]] = {field: deque(maxlen=2) for field in self.losses}
        self.sums = totals(())
        for row in rows:
            self._count(row)
        self.step, self.num_steps = 0, recipe.outer.inner_steps
        self.inner_losses: float | Sequence[float] | None = None
        self.awaited: set[int] = set()  # rounds whose losses are still being measured
        self.began = self.round_began = time.monotonic()
        self.recent: deque[float] = deque(maxlen=8)  # of the last rounds, including evaluation

    def inner(self, step: int, num_steps: int, losses: float | Sequence[float] | None) -> None:
        self.step, self.num_steps, self.inner_losses = step, num_steps, losses

    def add(self, row: Row, awaited: bool = False) -> None:
        now = time.monotonic()
        if row.round > 0:
            self.recent.append(now - self.round_began)
        self.rounds_done, self.round_began, self.step = row.round, now, 0
        if awaited:
            self.awaited.add(row.round)
        self._count(row)

    def fill_in(self, row: Row) -> None:
        """Fill in the losses of an earlier row."""
        self.awaited.discard(row.round)
        self._measure(row)

    def _count(self, row: Row) -> None:
        """Add a row to the sums. Rows are not kept, so round 3,000 costs no more than the first."""
        self.last = row
        self._measure(row)
        new = totals([row])
        self.sums["seconds"] += new["seconds"]
        if new["fleet_seconds"] is not None:
            self.sums["fleet_seconds"] = (self.sums["fleet_seconds"] or 0.0) + new["fleet_seconds"]
        for kind in ("link_bytes", "dense_bytes"):
            for link in new[kind]:
                self.sums[kind][link] += new[kind][link]

    def _measure(self, row: Row) -> None:
        for field, known in self.measured.items():
            if row[field] is not None:
                known.append(row[field])

    def eta_seconds(self) -> float | None:
        """Return the time left at the pace of the last rounds; in the first round, at that of its steps."""
        into = time.monotonic() - self.round_began
        if self.recent:
            one = sum(self.recent) / len(self.recent)
        elif self.step:
            one = into * self.num_steps / self.step
        else:
            return None
        return max(0.0, one * (self.total_rounds - self.rounds_done) - into)

    def train_loss(self) -> float | None:
        """Return the current inner step's loss if known, else the mean of the last round."""
        if self.step and self.inner_losses is not None:
            if isinstance(self.inner_losses, int | float):
                return float(self.inner_losses)
            values = [float(loss) for loss in self.inner_losses]
            return sum(values) / len(values) if values else None
        return self.last.loss_train if self.last else None

    def loss_and_change(self, field: str) -> tuple[float | None, float | None]:
        """Return the last measured loss, and its change since the one before."""
        known = self.measured[field]
        return (known[-1] if known else None, known[1] - known[0] if len(known) == 2 else None)


class View:
    """The interface for a run's reports; this class shows nothing. A view never stops a run."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self.progress = progress
        self.stream = stream
        self.hooks = RoundHooks()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def inner(self, step: int, num_steps: int, losses: float | Sequence[float] | None = None) -> None:
        """Report `step` of `num_steps` inner steps in this round; `losses` are numbers, not tensors."""
        self.progress.inner(step, num_steps, losses)

    def round(self, row: Row, awaited: bool = False) -> None:
        """Report a finished outer round (row 0: the evaluation before the first). `awaited`: its losses come
        later, by `losses`."""
        self.progress.add(row, awaited)
        self.hooks.add(row, awaited)

    def losses(self, row: Row) -> None:
        """Report the losses of an earlier round; None if there will be none."""
        self.progress.fill_in(row)
        self.hooks.fill_in(row)

    def note(self, text: str) -> None:
        """Show a message on its own line, such as a replica that left."""


class PlainView(View):
    """One aligned line per round, for logs and pipes. A line waits for losses until the next round ends."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        super().__init__(progress, stream)
        self.held: Row | None = None  # its line is not printed yet
        self.said = time.monotonic()  # time of the last print
        self.lock = threading.RLock()  # rounds and their losses come from two threads

    def __exit__(self, *exception: Any) -> None:
        self._print_held()

    def inner(self, step: int, num_steps: int, losses: float | Sequence[float] | None = None) -> None:
        """In long rounds, print an occasional line with the time per step, even before the first loss."""
        super().inner(step, num_steps, losses)
        left = self.progress.eta_seconds()
        if left is None or time.monotonic() - self.said < QUIET_SECONDS:
            return
        train = None if losses is None else self.progress.train_loss()
        loss = "" if train is None else f"  train {_loss(train)}"
        at = f"round {self.progress.rounds_done + 1}/{self.progress.total_rounds}"
        self._write(f"{at}, inner step {step} of {num_steps}{loss}  ETA {clock(left)}")

    def round(self, row: Row, awaited: bool = False) -> None:
        with self.lock:
            self._print_held()
            super().round(row, awaited)
            self.held = row
            if not awaited:
                self._print_held()

    def losses(self, row: Row) -> None:
        with self.lock:
            super().losses(row)
            if self.held is not None and self.held.round == row.round:
                self.held = row
                self._print_held()
            elif row.loss_full is not None:
                self._write(f"round {row.round}: {self._losses_alone(row)}")

    def _losses_alone(self, row: Row) -> str:
        if len(self.progress.losses) == 1:
            return f"loss {row.loss_full:.2f}"
        fields = ("loss_full", "loss_pipelined", "loss_mixed")
        return "losses " + ", ".join(f"{LOSSES[f]} {row[f]:.2f}" for f in fields if row[f] is not None)

    def _print_held(self) -> None:
        with self.lock:
            held, self.held = self.held, None
            if held is not None:
                self._write(self._line(held))

    def note(self, text: str) -> None:
        self._write(text)

    def _line(self, row: Row) -> str:
        progress = self.progress
        digits = len(str(progress.total_rounds))
        losses = " ".join(f"{LOSSES[field]} {_loss(row[field])}" for field in progress.losses)
        if len(progress.losses) == 1:
            losses = _loss(row[progress.losses[0]])
        parts = [f"round {row.round:>{digits}}/{progress.total_rounds}", f"loss {losses}"]
        if row.round == 0:
            return "  ".join([*parts, "before training"])
        parts += [f"train {_loss(row.loss_train)}", f"{rate(row.tokens_per_second or 0):>11}"]
        left = progress.eta_seconds()
        parts.append(f"ETA {clock(left) if left is not None else '?':<6}")
        sent, dense = (sum(progress.sums[kind].values()) for kind in ("link_bytes", "dense_bytes"))
        if sent:
            parts.append(f"sent {size(sent)}" + (f" (dense {size(dense)})" if dense else ""))
        return "  ".join(parts).rstrip()

    def _write(self, text: str) -> None:
        self.said = time.monotonic()
        # A closed pipe or a lost terminal ends the progress lines, not the run.
        with contextlib.suppress(OSError, ValueError), self.lock:
            print(visible(text), file=self.stream, flush=True)


def _loss(value: float | None) -> str:
    return f"{value:5.2f}" if value is not None else "    -"
