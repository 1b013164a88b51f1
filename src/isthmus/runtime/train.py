"""`isthmus train`: every replica of a recipe as real processes on this machine, followed from the bucket."""

import contextlib
import datetime
import shlex
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from isthmus import __version__
from isthmus.config import Recipe
from isthmus.data.corpus import Corpus, open_corpus
from isthmus.errors import ConfigError
from isthmus.model import checkpoint
from isthmus.model.initial import checked_first, start_digest
from isthmus.page.report import write_report
from isthmus.planner.auto import resolve
from isthmus.protocol.access import bucket_of
from isthmus.protocol.ledger import Ledger
from isthmus.runlog import RunDir, next_run_dir
from isthmus.runlog.live import View, open_view
from isthmus.runtime.create import check_trainable, create
from isthmus.runtime.launcher import STALL_SECONDS
from isthmus.runtime.recorder import Recorder
from isthmus.runtime.resume import StartingHeartbeats, check_resumable, checked_ledger, hold_run, keys_of
from isthmus.runtime.supervisor import LocalSupervisor
from isthmus.simulator.run import REAL, Results, checked_corpus, pick_device, pick_precision
from isthmus.store.objects import open_store


def train(
    recipe: Recipe,
    run_dir: str | Path | None = None,
    *,
    device: str = "auto",
    quiet: bool = False,
    join_options: Sequence[str] = (),
    apart: Collection[str] = (),
    stall_seconds: float = STALL_SECONDS,
) -> Results:
    """Start the fleet, tend it, write down its rounds; the run directory holds bucket, keys and logs.

    `join_options` go to every `isthmus join`; `apart` and `stall_seconds` as in `LocalSupervisor`.
    """
    recipe, picks = resolve(recipe)
    check_trainable(recipe)
    where = pick_device(device)
    corpus = checked_corpus(recipe)
    first = checked_first(recipe, corpus)
    about = {
        "isthmus": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "device_used": str(where),  # for a resume: another one could mean another precision
        "precision": pick_precision(recipe, where),
        "mode": REAL,
        "parameters": recipe.model.num_parameters,
        "auto": [pick.reason for pick in picks],
        "corpus": recipe.data.corpus,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "start_sha256": start_digest(first) if first else "",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "status": "running",
    }
    run = RunDir.create(run_dir or next_run_dir("runs", recipe.name), recipe, about)
    machines = _machines(run, device, join_options, apart, stall_seconds)

    def begin() -> Ledger:
        return Ledger(open_store(machines.url), create(recipe, machines.url, keys_of(run), first=first))

    with hold_run(run):
        return _run(run, corpus, machines, begin, quiet)


def resume(
    run_dir: str | Path,
    *,
    device: str = "auto",
    quiet: bool = False,
) -> Results:
    """Go on with a run that was stopped or killed: every replica from its own state and the bucket."""
    run = RunDir.open(run_dir)
    check_resumable(run)
    device = run.about.get("device_used", "auto") if device == "auto" else device
    pick_device(device)
    with hold_run(run):
        machines = _machines(run, device)
        ledger = checked_ledger(run, machines)
        last = ledger.last_round()
        away = last + 1, ledger.store.now() - ledger.settled_at(last)
        with StartingHeartbeats(ledger, machines, keys_of(run)):
            run.truncate(last)
            run.update_about(status="running", error=None)
            return _run(run, open_corpus(run.recipe.data.corpus), machines, lambda: ledger, quiet, away)


def _machines(
    run: RunDir,
    device: str,
    join_options: Sequence[str] = (),
    apart: Collection[str] = (),
    stall_seconds: float = STALL_SECONDS,
) -> LocalSupervisor:
    return LocalSupervisor(
        run.recipe,
        bucket_of(run),
        run.path.resolve(),
        ["--device", device, *join_options],
        apart=apart,
        stall_seconds=stall_seconds,
    )


def _run(
    run: RunDir,
    corpus: Corpus,
    machines: LocalSupervisor,
    begin: Callable[[], Ledger],
    quiet: bool,
    away: tuple[int, float] = (0, 0.0),
) -> Results:
    recipe, about, rows = run.recipe, run.about, run.rows()
    done = rows[-1]["round"] if rows else 0
    status, error, ledger = "failed", None, None
    try:
        ledger = begin()
        torch.set_num_threads(1)  # the replicas need the cores more
        machines.start_all()
        with open_view(recipe, done, recipe.outer.rounds, rows=rows, quiet=quiet) as view:
            workers = sum(max(m.config.stages, m.config.processes) for m in recipe.fleet())
            fleet = f"{recipe.num_replicas} replicas, {workers} processes, bucket {machines.url}"
            view.note(f"{run.path}: {fleet}" + (f", going on after round {away[0] - 1}" if away[0] else ""))
            for reason in about.get("auto", ()):
                view.note(reason)
            recorder = Recorder(ledger, corpus, run, view, away)
            asked = _follow(recorder, machines, view)
            recorder.farewell(machines.all_ended)
        if not asked:
            machines.finish()
        # Asked to leave from elsewhere, all of them may be gone before the last round.
        status = "finished" if recorder.replay.round == recipe.outer.rounds else "interrupted"
        checkpoint.save_tensors(run.model_path, recorder.replay.anchor)
    except KeyboardInterrupt:
        status = "interrupted"
        raise KeyboardInterrupt(f"interrupted; {how_to_go_on(run)}" if ledger else "interrupted") from None
    except BaseException as fault:
        error = f"{type(fault).__name__}: {fault}".splitlines()[0]
        raise
    finally:
        machines.stop(5.0)
        restarts = about.get("restarts", 0) + machines.restarts
        run.update_about(status=status, error=error, restarts=restarts)
        with contextlib.suppress(OSError, ConfigError):
            write_report(run.path)
    return Results(run.path, run.rows())


def how_to_go_on(run: RunDir) -> str:
    return f"go on with: isthmus train --resume {shlex.quote(str(run.path))}"


def _follow(recorder: Recorder, machines: LocalSupervisor, view: View) -> bool:
    """Until the last round; True when Ctrl-C asked the fleet to leave before it.

    The first Ctrl-C is heard between two rounds: one that is half applied and not yet a row must not be lost.
    """
    asked = told = False
    tended = time.monotonic()

    def interrupted(signum: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        machines.leave()

    def stop() -> bool:
        nonlocal tended, told
        if asked and not told:
            told = True
            view.note("leaving at the end of this round; Ctrl-C again stops now")
        if time.monotonic() - tended > 1:
            machines.tend()
            tended = time.monotonic()
        return machines.all_left()

    here = threading.current_thread() is threading.main_thread()  # elsewhere no signal comes
    before = signal.signal(signal.SIGINT, interrupted) if here else None
    try:
        recorder.follow(stop)
    finally:
        if here:
            signal.signal(signal.SIGINT, before)
    return asked
