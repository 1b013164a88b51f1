"""`isthmus train`: every replica of a recipe as real processes on this machine, recorded from the bucket."""

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from isthmus.config import Recipe
from isthmus.data.corpus import Corpus, open_corpus
from isthmus.data.fingerprint import check_text
from isthmus.errors import ConfigError, RunError
from isthmus.model import checkpoint
from isthmus.model.initial import checked_first
from isthmus.page.ending import Ending, ending
from isthmus.page.loggers import check_loggers, following
from isthmus.planner.auto import resolve
from isthmus.planner.room import check_disk, fleet_room
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.place import bucket_of
from isthmus.replica.ahead import announce
from isthmus.replica.picks import (
    as_picked,
    checked_corpus,
    held_out_note,
    pick_device,
    pick_precision,
    with_pin,
)
from isthmus.runlog import REAL, About, RunDir, next_run_dir
from isthmus.runlog.hooks import OnRound, RoundHooks
from isthmus.runlog.live import View
from isthmus.runlog.results import Results
from isthmus.runtime.checks import check_trainable
from isthmus.runtime.create import check_free, create
from isthmus.runtime.fits import check_fits, device_memory
from isthmus.runtime.process import LauncherConfig
from isthmus.runtime.recorder import Recorder, Scoring
from isthmus.runtime.resume import StartingHeartbeats, check_resumable, checked_ledger, keys_of, lock_run
from isthmus.runtime.scoring import scoring_devices
from isthmus.runtime.supervisor import LocalSupervisor
from isthmus.simulator.run import about_run
from isthmus.store.objects import open_store


def train(
    recipe: Recipe,
    run_dir: str | Path | None = None,
    *,
    device: str = "auto",
    quiet: bool = False,
    on_round: OnRound | None = None,
    log: Sequence[str] = (),
    apart: Collection[str] = (),
    **launcher: Any,
) -> Results:
    """Start the fleet, watch it, record its rounds; the run directory holds bucket, keys and logs.

    `on_round` and the loggers of `log` get every row once its losses are known. `apart` as in
    LocalSupervisor; `launcher` are further fields of every LauncherConfig.
    """
    check_loggers(log)
    recipe, picks = resolve(recipe)
    check_trainable(recipe)
    used = pick_device(device)
    if used.type == "cuda":
        counted = as_picked(recipe, used)
        if warning := check_fits(counted, recipe.fleet(), *device_memory(used)):
            print(f"isthmus: {warning}", file=sys.stderr)
    corpus = checked_corpus(recipe)
    check_text(corpus, recipe.data.corpus)
    recipe = with_pin(recipe, corpus)
    first = checked_first(recipe, corpus)
    about = about_run(recipe, picks, corpus, first, used, pick_precision(recipe, used)) | About(
        mode=REAL,
        device_used=str(used),  # for a resume: another device could mean another precision
    )
    path = Path(run_dir or next_run_dir("runs", recipe.name))
    if warning := check_disk(path, fleet_room(recipe, recipe.fleet(), not recipe.bucket.url), "this run"):
        print(f"isthmus: {warning}", file=sys.stderr)
    if recipe.bucket.url:
        check_free(recipe.bucket.url)
    run = RunDir.create(path, recipe, about)
    supervisor = _supervisor(run, device, apart, **launcher)

    def begin() -> Ledger:
        # All keys are on this machine, so fewer closers add no safety; any of them may go away.
        closers = [member.name for member in recipe.fleet()]
        made = create(recipe, supervisor.url, keys_of(run), closers, first)
        return Ledger(open_store(supervisor.url), made)

    with lock_run(run):
        return _run(run, corpus, supervisor, begin, used, quiet, following(run, on_round, log))


def resume(
    run_dir: str | Path,
    *,
    device: str = "auto",
    quiet: bool = False,
    on_round: OnRound | None = None,
    log: Sequence[str] = (),
) -> Results:
    """Resume a run that was stopped or killed: every replica from its own state and the bucket."""
    check_loggers(log)
    run = RunDir.open(run_dir)
    check_resumable(run)
    device = run.about.get("device_used", "auto") if device == "auto" else device
    used = pick_device(device)
    with lock_run(run):
        supervisor = _supervisor(run, device)
        room = fleet_room(run.recipe, run.recipe.fleet(), not run.recipe.bucket.url)
        check_disk(run.path, room, "to go on", begun=True)
        ledger = checked_ledger(run, supervisor)
        last = ledger.last_round()
        settled_at = ledger.settled_at(last)
        assert settled_at is not None, "a settled round has a manifest"
        pause = last + 1, ledger.store.now() - settled_at
        with StartingHeartbeats(ledger, supervisor, keys_of(run)):
            run.truncate(last)
            run.update_about(status="running", error=None)
            corpus = open_corpus(run.recipe.data.corpus)
            after = following(run, on_round, log)
            return _run(run, corpus, supervisor, lambda: ledger, used, quiet, after, pause)


def _supervisor(run: RunDir, device: str, apart: Collection[str] = (), **launcher: Any) -> LocalSupervisor:
    # This process records the run and measures its held-out losses.
    common = LauncherConfig(url=bucket_of(run), replica="", device=device, scores=False, **launcher)
    return LocalSupervisor(run.recipe, run.path.resolve(), common, apart)


def _run(
    run: RunDir,
    corpus: Corpus,
    supervisor: LocalSupervisor,
    begin: Callable[[], Ledger],
    device: torch.device,
    quiet: bool,
    after: AbstractContextManager[RoundHooks],
    pause: tuple[int, float] = (0, 0.0),
) -> Results:
    recipe, about, rows = run.recipe, run.about, run.rows()
    done = rows[-1].round if rows else 0
    if not quiet:
        announce(recipe, device, done, f" and the start of {supervisor.num_workers} processes")
    with ending(run, how_to_go_on(run)) as end, _stopped(supervisor, run, end):
        end.resumable = False  # before the ledger exists
        ledger = begin()
        end.resumable = True
        torch.set_num_threads(1)  # the replicas need the cores more
        with after as hooks, View(recipe, done, recipe.outer.rounds, rows=rows, quiet=quiet) as view:
            view.hooks = hooks
            supervisor.start_all()
            fleet = f"{recipe.num_replicas} replicas, {supervisor.num_workers} processes"
            resumed = f", going on after round {pause[0] - 1}" if pause[0] else ""
            view.note(f"{run.path}: {fleet}, bucket {supervisor.url}{resumed}")
            for reason in about.get("auto", ()):
                view.note(reason)
            if note := held_out_note(recipe, corpus):
                view.note(note)
            where = scoring_devices(device, pick_precision(recipe, device))
            recorder = Recorder(ledger, corpus, run, view, pause, where)
            with Scoring(recorder) as scoring:
                interrupted = _record(recorder, supervisor, view)
                recorder.add_farewells(supervisor.all_ended)
                if not interrupted:
                    supervisor.finish()
                scoring.finish()
            hooks.deliver()
        if recorder.has_last_anchor():
            checkpoint.save_tensors(run.model_path, recorder.replay.anchor)
        if problem := recorder.problem():
            raise RunError(f"{problem}; {how_to_go_on(run)}")
        # `isthmus leave` may have ended all replicas before the last round.
        end.status = "finished" if recorder.last.round == recipe.outer.rounds else "interrupted"
    hooks.raise_error()
    return Results(run.path, run.rows())


@contextlib.contextmanager
def _stopped(supervisor: LocalSupervisor, run: RunDir, end: Ending) -> Iterator[None]:
    """Stop the fleet, however the run ends, and count its restarts."""
    before = run.about.get("restarts", 0)
    try:
        yield
    finally:
        supervisor.stop(5.0)
        with contextlib.suppress(OSError, ConfigError):
            run.tidy()
        end.facts["restarts"] = before + supervisor.restarts


def how_to_go_on(run: RunDir) -> str:
    return f"go on with: isthmus train --resume {shlex.quote(str(run.path))}"


def _record(recorder: Recorder, supervisor: LocalSupervisor, view: View) -> bool:
    """Record rounds until the last one; True if Ctrl-C or a hook asked the fleet to leave earlier.

    The first Ctrl-C takes effect between two rounds, so that a half-applied round without a row is not lost.
    """
    asked = noted = False
    checked = time.monotonic()

    def interrupted(signum: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        supervisor.leave()

    def stop() -> bool:
        nonlocal asked, checked, noted
        if view.hooks.deliver() and not asked:
            asked = True
            supervisor.leave()
        if asked and not noted:
            noted = True
            view.note("leaving at the end of this round; Ctrl-C again stops now")
        if time.monotonic() - checked > 1:
            supervisor.restart_dead()
            for name, text in supervisor.news():
                view.note(f"{name} waits: {text}")
            for text in supervisor.crash_news():
                view.note(text)
            checked = time.monotonic()
        return supervisor.all_left()

    in_main = threading.current_thread() is threading.main_thread()  # other threads get no signals
    before = signal.signal(signal.SIGINT, interrupted) if in_main else None
    try:
        recorder.record(stop, 0.5 if "://" in supervisor.url else 0.1)  # poll a folder more often
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
    return asked
