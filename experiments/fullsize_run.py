"""Trains one row of `reproduce 178m` and writes its line: the simulator without report.

A file beside the results keeps the measurements of a row under way, at most a minute old. With a folder for
its state, a row that was cut off goes on from there.
"""

import contextlib
import gc
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.fullsize import FILE, NAME
from experiments.fullsize_state import Kept, KeptSaver
from experiments.lines import LOSSES, Line, append
from experiments.trial import origin
from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.errors import ConfigError, RunError
from isthmus.files import replace_file
from isthmus.planner.memory import SimulatorPlan
from isthmus.replica.meter import peak_bytes
from isthmus.runlog import Row
from isthmus.runlog.live import open_view
from isthmus.runlog.row import Figures
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.rounds import simulate_rounds
from isthmus.simulator.run import pick_plan, pick_precision

PART_SECONDS = 60.0  # a device that is taken away costs at most this much of the curve


@dataclass(frozen=True)
class Task:
    """One row: what is trained, and on what."""

    row: str
    scale: str
    recipe: Recipe
    corpus: Corpus
    device: torch.device
    commit: str

    @property
    def precision(self) -> str:
        return pick_precision(self.recipe, self.device)

    @property
    def compiled(self) -> bool:
        return self.device.type == "cuda"


class Measured:
    """The rows of a run under way, and the line that they give so far."""

    def __init__(self, task: Task, plan: SimulatorPlan, folder: Path, kept: Kept | None) -> None:
        self.task, self.plan, self.kept = task, plan, kept
        self.part = folder / f"{NAME}-{task.row}.part"
        self.rows: list[Row] = list(kept.rows) if kept else []
        self.written = time.monotonic()

    def append(self, row: Row) -> None:
        self.rows.append(row)
        if self.kept:
            self.kept.append(row)
        if time.monotonic() - self.written >= PART_SECONDS:
            with contextlib.suppress(OSError):  # a full disk may have room again when the run ends
                self.write()

    def line(self) -> Line:
        task, plan = self.task, self.plan
        name = origin(
            task.row, task.scale, task.recipe, task.corpus, task.device, task.precision, task.commit
        )
        return name | {
            "held": plan.describe(task.recipe.num_replicas),
            "predicted_bytes": plan.predicted_bytes,
            "peak_bytes": peak_bytes(task.device),
            **summed_up(task.recipe, self.rows),
        }

    def write(self) -> None:
        replace_file(self.part, json.dumps(self.line(), allow_nan=False) + "\n")
        self.written = time.monotonic()


def run_row(task: Task, folder: Path, state: Path | None, deadline: float | None) -> Line | None:
    """Train, score, append one line to `folder`, and return it. With a folder for its state, a row goes on
    from what is there, and stops at the edge of a round before `deadline`: None."""
    if task.compiled:
        torch.cuda.reset_peak_memory_stats(task.device)
    try:
        return _train(task, folder, state, deadline)
    finally:
        if task.compiled:  # the next row needs the memory
            gc.collect()
            torch.cuda.empty_cache()


def _train(task: Task, folder: Path, state: Path | None, deadline: float | None) -> Line | None:
    plan = pick_plan(task.recipe, task.device, task.precision, task.compiled)
    kept = Kept.open(state, task.row, task.recipe, task.corpus.sha256[:12], plan) if state else None
    plan = kept.plan if kept else plan
    measured = Measured(task, plan, folder, kept)
    _try_to_write(measured, folder)
    try:
        if not _rounds(task, plan, measured, kept, deadline):
            return None
        line = measured.line()
        if None in [line[name] for name in LOSSES]:
            raise RunError(f"a held-out loss is not a number after round {task.recipe.outer.rounds}")
        append(folder / FILE, line)
    except BaseException as error:  # also Ctrl-C: the measurements are kept
        with contextlib.suppress(OSError):
            measured.write()
        if reason := _fault(error, plan.predicted_bytes):
            raise RunError(f"{reason}; what was measured before is in {measured.part}") from error
        raise
    measured.part.unlink(missing_ok=True)
    if kept:
        kept.remove()
    return line


def _try_to_write(measured: Measured, folder: Path) -> None:
    """A folder that cannot be written to must show before the first step."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        measured.write()
    except OSError as error:
        raise ConfigError(
            f"cannot write {measured.part}: {error.strerror}; give --results another folder"
        ) from None


def _rounds(
    task: Task, plan: SimulatorPlan, measured: Measured, kept: Kept | None, deadline: float | None
) -> bool:
    """Train what is left of the run; False when it stopped for lack of time, with its state saved."""
    recipe, saver = task.recipe, None
    fleet = SimulatedFleet(recipe, task.corpus, task.device, task.precision, plan, task.compiled)
    done = kept.done if kept else 0
    if kept:
        kept.restore(fleet)
        saver = KeptSaver(kept, fleet, deadline)
    with open_view(recipe, done, recipe.outer.rounds, rows=measured.rows) as view:
        view.note(f"{recipe.name}: {plan.describe(recipe.num_replicas)} on {task.device}, {task.precision}")
        leave = saver.leave if saver else lambda: False
        exchange = LocalExchange(recipe)
        whole = simulate_rounds(recipe, fleet, exchange, measured, view, done, saver, leave)
    if saver and not whole:
        saver.write(measured.rows[-1].round)
        measured.write()
    return whole


def _fault(error: BaseException, predicted_bytes: int) -> str | None:
    """The error as one line, if a line is enough."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device has too little memory; {predicted_bytes / 2**30:.1f} GiB were predicted"
    if isinstance(error, OSError):
        return f"{error.filename or 'the line'}: {error.strerror}"
    return str(error) if isinstance(error, RunError) else None


def summed_up(recipe: Recipe, rows: Sequence[Row]) -> dict[str, Any]:
    """Rate, losses and bytes of the rounds so far; row 0 is the untrained model."""
    trained = [row for row in rows if row.round]
    scored = [row for row in rows if recipe.is_scored(row.round)]
    times = [row.seconds or 0.0 for row in trained]
    usual = statistics.median(times[1:] or times or [math.inf])  # the first round compiles
    seconds = sum(row.seconds or 0.0 for row in rows)
    last = rows[-1] if rows else dict.fromkeys(LOSSES)
    return {
        "tokens": len(trained) * recipe.round_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(recipe.round_tokens / usual) if usual else 0,
        "sustained_tokens_per_second": round(len(trained) * recipe.round_tokens / seconds) if seconds else 0,
        **{name: _number(last[name]) for name in LOSSES},
        "failed": None,
        "round_bytes": _bytes_of_one(trained[-1].measured) if trained else {},
        "curve": [[row.round, *(_number(row[name]) for name in LOSSES)] for row in scored],
        "train": [[row.round, _number(row.loss_train)] for row in trained],
    }


def _bytes_of_one(measured: Mapping[str, Figures]) -> dict[str, dict[str, int]]:
    """What one replica of each [[replicas]] table moved in a round, by purpose."""
    return {
        name: {purpose: total // facts["replicas"] for purpose, total in facts["bytes"].items()}
        for name, facts in measured.items()
    }


def _number(loss: float | None) -> float | None:
    return round(loss, 6) if loss is not None and math.isfinite(loss) else None
