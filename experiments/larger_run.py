"""Trains the larger run and writes its line: the simulator without run directory or saved state.

Saving the state of eight replicas would take longer than a round, so a run that is cut off cannot continue.
A file beside the results keeps its measurements, at most a minute old.
"""

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from experiments.larger import FILE, ROW
from experiments.lines import LOSSES, Line, append
from experiments.trial import origin
from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.errors import ConfigError, RunError
from isthmus.files import replace_file
from isthmus.replica.meter import peak_bytes
from isthmus.runlog import Row
from isthmus.runlog.live import open_view
from isthmus.runlog.row import Figures
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.rounds import simulate_rounds
from isthmus.simulator.run import pick_plan, pick_precision

PART_SECONDS = 60.0  # a device that is taken away costs at most this much of the curve


class Measured:
    """The rows of a run under way, and the line that they give so far."""

    def __init__(self, part: Path, line_of: Callable[[Sequence[Row], Sequence[float]], Line]) -> None:
        self.part, self.line_of = part, line_of
        self.rows: list[Row] = []
        self.times: list[float] = []  # when each row came: a round is all that lies between two of them
        self.written = time.monotonic()

    def append(self, row: Row) -> None:
        self.rows.append(row)
        self.times.append(time.perf_counter())
        if time.monotonic() - self.written >= PART_SECONDS:
            with contextlib.suppress(OSError):  # a full disk may have room again when the run ends
                self.write()

    def line(self) -> Line:
        return self.line_of(self.rows, self.times)

    def write(self) -> None:
        replace_file(self.part, json.dumps(self.line(), allow_nan=False) + "\n")
        self.written = time.monotonic()


def run_larger(
    scale: str, recipe: Recipe, corpus: Corpus, device: torch.device, commit: str, folder: Path
) -> Line:
    """Train, score after every round, append one line to `folder`, and return it."""
    precision, compiled = pick_precision(recipe, device), device.type == "cuda"
    plan = pick_plan(recipe, device, precision, compiled)
    if compiled:
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()

    def line_of(rows: Sequence[Row], times: Sequence[float]) -> Line:
        seconds, found = time.perf_counter() - started, summed_up(recipe, rows, times)
        return origin(ROW, scale, recipe, corpus, device, precision, commit) | {
            "seconds": round(seconds, 3),
            "sustained_tokens_per_second": round(found["tokens"] / seconds),
            "held": plan.describe(recipe.num_replicas),
            "predicted_bytes": plan.predicted_bytes,
            "peak_bytes": peak_bytes(device),
            **found,
        }

    measured = Measured(folder / f"{FILE}.part", line_of)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        measured.write()  # a folder that cannot be written to must show before the first step
    except OSError as error:
        raise ConfigError(
            f"cannot write {measured.part}: {error.strerror}; give --results another folder"
        ) from None
    try:
        fleet = SimulatedFleet(recipe, corpus, device, precision, plan, compiled)
        with open_view(recipe, 0, recipe.outer.rounds) as view:
            view.note(f"{recipe.name}: {plan.describe(recipe.num_replicas)} on {device}, {precision}")
            simulate_rounds(recipe, fleet, LocalExchange(recipe), measured, view)
        line = measured.line()
        if None in [line[name] for name in LOSSES]:
            raise RunError(f"a held-out loss is not a number after round {recipe.outer.rounds}")
        append(folder / FILE, line)
    except BaseException as error:  # also Ctrl-C: the measurements are kept
        with contextlib.suppress(OSError):
            measured.write()
        if reason := _fault(error, plan.predicted_bytes):
            raise RunError(f"{reason}; what was measured before is in {measured.part}") from error
        raise
    measured.part.unlink(missing_ok=True)
    return line


def _fault(error: BaseException, predicted_bytes: int) -> str | None:
    """The error as one line, if a line is enough."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device has too little memory; {predicted_bytes / 2**30:.1f} GiB were predicted"
    if isinstance(error, OSError):
        return f"{error.filename or 'the line'}: {error.strerror}"
    return str(error) if isinstance(error, RunError) else None


def summed_up(recipe: Recipe, rows: Sequence[Row], times: Sequence[float]) -> dict[str, Any]:
    """Rate, losses and bytes of the rounds so far; row 0 is the untrained model."""
    trained = [row for row in rows if row.round]
    seconds = [after - before for before, after in pairwise(times)]
    usual = statistics.median(seconds[1:] or seconds or [math.inf])  # the first round compiles
    last = rows[-1] if rows else dict.fromkeys(LOSSES)
    return {
        "tokens": len(trained) * recipe.round_tokens,
        "tokens_per_second": round(recipe.round_tokens / usual),
        **{name: _number(last[name]) for name in LOSSES},
        "failed": None,
        "round_bytes": _bytes_of_one(trained[-1].measured) if trained else {},
        "curve": [[row.round, *(_number(row[name]) for name in LOSSES)] for row in rows],
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
