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
from isthmus.planner.rate import usable_cores
from isthmus.planner.room import check_disk, fleet_room
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.place import bucket_of
from isthmus.protocol.trust import load_signer
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
from isthmus.runtime.create import check_free, create
from isthmus.runtime.disk_watch import DiskWatch
from isthmus.runtime.fits import check_fits, device_memory
from isthmus.runtime.group import Group
from isthmus.runtime.heartbeat import WaitingNotes
from isthmus.runtime.preflight import check_device, check_trainable
from isthmus.runtime.process import JoinConfig, logger
from isthmus.runtime.recorder import Recorder, Scoring
from isthmus.runtime.resume import StartingHeartbeats, check_resumable, checked_ledger, keys_of, lock_run
from isthmus.runtime.scoring import scoring_devices
from isthmus.runtime.supervisor import Supervisor
from isthmus.runtime.workers import prepare
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
    **options: Any,
) -> Results:
    """Start the fleet, watch it, record its rounds; the run directory holds bucket, keys and logs.

    `on_round` and the loggers of `log` get every row once its losses are known. The stages of a replica in
    `apart` run as if each were on its own machine. `options` are further fields of every JoinConfig.
    """
    check_loggers(log)
    prepare()
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
    supervisor = fleet_of(run, device, apart, **options)

    def begin() -> Ledger:
        # All keys are on this machine, so fewer closers add no safety; any of them may go away.
        closers = [member.name for member in recipe.fleet()]
        made = create(recipe, bucket_of(run), keys_of(run), closers, first)
        return Ledger(open_store(bucket_of(run)), made)

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
    prepare()
    run = RunDir.open(run_dir)
    check_resumable(run)
    device = run.about.get("device_used", "auto") if device == "auto" else device
    used = pick_device(device)
    with lock_run(run):
        supervisor = fleet_of(run, device)
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


def fleet_of(run: RunDir, device: str, apart: Collection[str] = (), **options: Any) -> Supervisor:
    """All workers of the run, in groups. This process records the run and measures its held-out losses."""
    folder, fleet, groups = run.path.resolve(), run.recipe.fleet(), list[Group]()
    num_workers = sum(max(member.config.stages, member.config.processes) for member in fleet)
    options["num_threads"] = options.get("num_threads") or max(1, usable_cores() // num_workers)
    for member in fleet:
        for stage in range(member.config.stages) if member.name in apart else [None]:
            name = member.name if stage is None else f"{member.name}.{stage}"
            config = JoinConfig(
                url=bucket_of(run),
                replica=member.name,
                key=str(keys_of(run).resolve() / f"{member.name}.key"),
                work_dir=str(folder / "work" / name),
                log_file=str(folder / "logs" / f"{name}.log"),
                device=device,
                stage=stage,
                scores=False,
                **options,
            )
            groups.append(Group(config, member, logger(name, config.log_file)))
    return Supervisor(groups)


def _start(supervisor: Supervisor, run: RunDir, ledger: Ledger) -> None:
    """Check the device for each group, and start all workers."""
    (run.path / "logs").mkdir(exist_ok=True)
    for group in supervisor.groups:
        config, name = group.config, group.member.name
        if warning := check_device(config, run.recipe, group.member):
            group.log(warning)
        if config.leads:
            own = Ledger(ledger.store, ledger.run, load_signer(Path(config.key), name))
            group.notes = WaitingNotes(group.work, own.beat, run.recipe.bucket.heartbeat_seconds)
            group.notes.start()
    supervisor.start()


def _run(
    run: RunDir,
    corpus: Corpus,
    supervisor: Supervisor,
    begin: Callable[[], Ledger],
    device: torch.device,
    quiet: bool,
    after: AbstractContextManager[RoundHooks],
    pause: tuple[int, float] = (0, 0.0),
) -> Results:
    recipe, about, rows = run.recipe, run.about, run.rows()
    done, num_workers = rows[-1].round if rows else 0, sum(len(group.ranks) for group in supervisor.groups)
    if not quiet:
        announce(recipe, device, done, f" and the start of {num_workers} processes")
    with ending(run, how_to_go_on(run)) as end, _stopped(supervisor, run, end):
        end.resumable = False  # before the ledger exists
        ledger = begin()
        end.resumable = True
        torch.set_num_threads(1)  # the replicas need the cores more
        with after as hooks, View(recipe, done, recipe.outer.rounds, rows=rows, quiet=quiet) as view:
            view.hooks = hooks
            _start(supervisor, run, ledger)
            fleet = f"{recipe.num_replicas} replicas, {num_workers} processes"
            resumed = f", going on after round {pause[0] - 1}" if pause[0] else ""
            view.note(f"{run.path}: {fleet}, bucket {bucket_of(run)}{resumed}")
            for reason in about.get("auto", ()):
                view.note(reason)
            if note := held_out_note(recipe, corpus):
                view.note(note)
            where = scoring_devices(device, pick_precision(recipe, device))
            recorder = Recorder(ledger, corpus, run, view, pause, where)
            with Scoring(recorder) as scoring:
                interrupted = _record(recorder, supervisor, News(run, supervisor, view))
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
def _stopped(supervisor: Supervisor, run: RunDir, end: Ending) -> Iterator[None]:
    """Stop the fleet, however the run ends, and count its restarts."""
    before = run.about.get("restarts", 0)
    try:
        yield
    finally:
        supervisor.stop()
        with contextlib.suppress(OSError, ConfigError):
            run.tidy()
        end.facts["restarts"] = before + supervisor.restarts


def how_to_go_on(run: RunDir) -> str:
    return f"go on with: isthmus train --resume {shlex.quote(str(run.path))}"


class News:
    """Tells the view what happens to the replicas: their waits and restarts, and a disk that fills up."""

    def __init__(self, run: RunDir, supervisor: Supervisor, view: View) -> None:
        self.supervisor, self.view = supervisor, view
        self.waits: dict[str, str] = {}  # group -> what it last waited for
        self.restarts: dict[str, int] = {}  # group -> restarts told so far
        here = not run.recipe.bucket.url
        self.disk = DiskWatch(run.path, fleet_room(run.recipe, run.recipe.fleet(), here).round)

    def tell(self) -> None:
        for group in self.supervisor.groups:
            if group.waits and group.waits != self.waits.get(group.name):
                self.view.note(f"{group.name} waits: {group.waits}")
            self.waits[group.name] = group.waits
            found = group.history
            if found.restarts > self.restarts.get(group.name, 0):
                self.restarts[group.name] = found.restarts
                times = f" ({found.restarts} times so far)" if found.restarts > 1 else ""
                self.view.note(f"{group.name} was started again{times}: {found.error}")
        if words := self.disk.look():
            self.view.note(words)


def _record(recorder: Recorder, supervisor: Supervisor, news: News) -> bool:
    """Record rounds until the last one; True if Ctrl-C or a hook asked the fleet to leave earlier.

    The first Ctrl-C takes effect between two rounds, so that a half-applied round without a row is not lost.
    """
    asked = noted = False
    checked, view = time.monotonic(), news.view

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
            news.tell()
            checked = time.monotonic()
        if supervisor.error:
            raise supervisor.error
        return supervisor.all_left()

    in_main = threading.current_thread() is threading.main_thread()  # other threads get no signals
    before = signal.signal(signal.SIGINT, interrupted) if in_main else None
    try:
        recorder.record(stop, 0.5 if recorder.recipe.bucket.url else 0.1)  # poll a folder more often
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
    return asked
