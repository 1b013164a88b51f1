"""Trains the rows that have no line yet, several at once. Stop it at any time: the same command goes on."""

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from experiments.lines import LOSSES, Line, append, digest, identity, scored_on
from experiments.rows import Row
from isthmus.config import Recipe, dump_recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.files import remove_folder

CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Run:
    """A row with one seed."""

    row: Row
    recipe: Recipe

    @property
    def tokens(self) -> int:
        return self.recipe.outer.rounds * self.recipe.round_tokens

    def __str__(self) -> str:
        return f"{self.row.name} seed {self.recipe.seed}"


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker trains: picklable, so without a loaded recipe or corpus."""

    row: str
    scale: str
    recipe: str  # TOML
    text: str
    device: str
    commit: str
    file: Path
    state: Path | None = None  # the folder that keeps its state; None saves nothing


@dataclass
class Outcome:
    finished: int = 0
    faults: list[str] = field(default_factory=list)
    left: list[Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how runs are trained."""

    folder: Path
    device: str
    jobs: int
    commit: str
    seconds: float | None = None  # no run begins that may not end within them
    state: Path | None = None  # keeps the states of runs under way


def missing(rows: Sequence[Row], lines: Sequence[Line], corpus: str, fingerprint: str) -> list[Run]:
    """What has no line on this text: the first seed of every row before any second."""
    there = {identity(line) for line in lines}
    found = []
    for seed in range(max((len(row.seeds) for row in rows), default=0)):
        for row in rows:
            if seed in row.seeds:
                recipe = row.recipe(seed, corpus)
                key = (seed, digest(recipe), scored_on(fingerprint, row.text))
                if key not in there:
                    there.add(key)  # two rows may be one run
                    found.append(Run(row, recipe))
    return found


def seconds_each(run: Run, lines: Sequence[Line]) -> float:
    """How long a run takes, by the lines of its scale; 0 if none tells."""
    rates = [line["tokens_per_second"] for line in lines if line["scale"] == run.row.scale]
    return run.tokens / statistics.median(rates) if rates else 0.0


def sweep(runs: Sequence[Run], lines: Sequence[Line], setup: Setup) -> Outcome:
    """Train these runs. A finished one is a line in the folder before this knows of it."""
    outcome, waiting, lines = Outcome(), list(runs), list(lines)
    end = None if setup.seconds is None else time.monotonic() + setup.seconds
    under_way: dict[Future[Line], Run] = {}
    threads = str(max(1, (os.cpu_count() or 1) // setup.jobs))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, threads)
    spawn = multiprocessing.get_context("spawn")  # a fork would share CUDA
    with ProcessPoolExecutor(min(setup.jobs, max(1, len(waiting))), spawn) as pool:
        while waiting or under_way:
            while waiting and len(under_way) < setup.jobs:
                if end is not None and time.monotonic() + seconds_each(waiting[0], lines) >= end:
                    outcome.left += waiting
                    waiting = []
                    break
                run = waiting.pop(0)
                try:
                    under_way[pool.submit(work, _task(run, setup))] = run
                except BrokenProcessPool:
                    outcome.left += [run, *waiting]
                    waiting = []
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                run = under_way.pop(future)
                if error := future.exception():
                    words = "its worker ended" if isinstance(error, BrokenProcessPool) else str(error)
                    outcome.faults.append(f"{run}: {words.splitlines()[0]}")
                    print(outcome.faults[-1], file=sys.stderr, flush=True)
                    continue
                line = future.result()
                lines.append(line)
                outcome.finished += 1
                print(
                    f"[{outcome.finished}/{len(runs)}] {run}: {describe(line)}", file=sys.stderr, flush=True
                )
    return outcome


def _task(run: Run, setup: Setup) -> Task:
    row = run.row
    state = (
        setup.state / f"{row.scale}-{row.name}-{run.recipe.seed}-{digest(run.recipe)}"
        if setup.state
        else None
    )
    file = setup.folder / f"{row.file}.jsonl"
    recipe = dump_recipe(run.recipe)
    return Task(row.name, row.scale, recipe, row.text, setup.device, setup.commit, file, state)


def work(task: Task) -> Line:
    """In a worker: train, and append the line, so that no finished run is lost with the parent."""
    from experiments.trial import run_trial  # loads torch

    line = run_trial(task, parse_recipe(task.recipe))
    append(task.file, line)
    if task.state:
        remove_folder(task.state)
    return line


def describe(line: Line) -> str:
    if line["failed"]:
        return line["failed"]
    losses = ", ".join(f"{name.removeprefix('loss_')} {line[name]:.4f}" for name in LOSSES)
    return f"{losses}; {line['seconds']:.1f} s, {line['tokens_per_second'] / 1e6:.3g} Mtok/s"


def find_commit(given: str | None) -> str:
    """The commit of this code: as given, from ISTHMUS_COMMIT, or from git; "+changes" if files differ."""
    if known := given or os.environ.get("ISTHMUS_COMMIT"):
        return known
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            "every line names its commit, and git does not know it here; give --commit ID"
        ) from None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(CHECKOUT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
