"""The process that trains: forked by `runtime.workers`, or started by others as `isthmus-worker`."""

import os
import signal
import sys
import threading
import time
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError, Diverged, RunError, RunStopped, Unreachable
from isthmus.files import overwrite_own, replace_file
from isthmus.printing import guard_streams
from isthmus.runtime.build import Assignment, build_replica, compiles
from isthmus.runtime.failure import PASSING_STATUS, Failure, failure_note
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.parting import Parting
from isthmus.runtime.process import LauncherConfig, Log, die_with_parent, logger, name_process
from isthmus.runtime.start_up import StartUp
from isthmus.runtime.waiting import NOTE

if TYPE_CHECKING:
    import torch


def begin(config: str, environment: dict[str, str]) -> None:
    """Run in a process that the launcher has forked or spawned; it ends when the launcher does."""
    os.environ.update(environment)
    launcher = parent_process()
    assert launcher, "multiprocessing has started us"
    if sys.platform == "linux":
        die_with_parent(os.getppid())  # the server that forked us dies with the launcher
        if not launcher.is_alive():
            os._exit(1)
    else:
        threading.Thread(target=_end_with, args=(launcher,), daemon=True, name="parent").start()
    sys.exit(work(LauncherConfig.from_json(config)))


def _end_with(launcher: Any) -> None:
    launcher.join()
    os._exit(1)


def work(config: LauncherConfig, supervised: bool = True) -> int:
    """Run the worker; return the exit status. Without a launcher of ours, handle signals and the last line
    here."""
    began = time.time()
    guard_streams()
    at, folder = Assignment.from_environment(), Path(config.work_dir)

    def leave(number: int, frame: object) -> None:
        if number == signal.SIGTERM and config.grace_seconds:
            Parting(folder).begin(config.grace_seconds)
        else:
            overwrite_own(folder / "leave")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if supervised else leave)
    name_process(f"worker-{at.rank}/{at.size}")
    log = logger(config.replica if at.size == 1 else f"{config.replica}/{at.rank}")
    AliveFile(folder / f"alive-{at.rank}").start()
    try:
        return run_worker(config, at, log, began)
    except Exception as error:
        failure = Failure.of(error)
        if isinstance(error, ConfigError | RunStopped) and not failure.passes:
            # A restart would not help, not even a second one: the launcher reads this and ends.
            if not supervised:
                raise
            replace_file(folder / "fatal", f"{2 if isinstance(error, ConfigError) else 1} {error}")
            return 3
        failure.write(failure_note(folder, at.rank))  # first, since a neighbour that loses us ends too
        log(failure.text)
        if isinstance(error, Diverged):
            from isthmus.runtime.checkpoint import put_aside

            put_aside(folder, log)
        return PASSING_STATUS if failure.passes else 1


def run_worker(config: LauncherConfig, at: Assignment, log: Log, began: float) -> int:
    """Build this process's part of the replica and its trainer, and run rounds to the end."""
    import torch

    from isthmus.replica.picks import checked_corpus, pick_device, pick_precision, pick_threads

    device = pick_device(config.device)
    if device.type == "cuda":
        how = device, compiles(config, device)
        threading.Thread(target=warm_up, args=how, daemon=True, name="warm-up").start()

    from isthmus.data.tokens import Batches, num_windows
    from isthmus.protocol.access import find_member, open_as
    from isthmus.protocol.patience import Patience
    from isthmus.replica.base import precision_dtypes
    from isthmus.replica.full import FullReplica
    from isthmus.replica.leader import LeaderReplica, follow_leader
    from isthmus.runtime.held_out import HeldOutLoss
    from isthmus.runtime.leaving import LeaveRequest
    from isthmus.runtime.round_lines import RoundLines
    from isthmus.runtime.rounds import WorkerRounds
    from isthmus.runtime.trainer import Trainer
    from isthmus.store.objects import open_store

    start = StartUp(config.started, log, began)
    start.mark("imports")
    pick_threads(config.num_threads)
    try:
        store = open_store(config.url, create=False)
        ledger, _ = open_as(store, config.replica, config.key)
    except Unreachable as error:  # the launcher found both: the store is down for now
        raise RunError(str(error)) from None
    recipe, member = ledger.run.recipe, find_member(ledger.run, config.replica)
    whole = member.config.kind == "full"
    if whole and at.size > 1 and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", at.rank)
    precision, batches, corpus, held_out = pick_precision(recipe, device), None, None, None
    if whole or at.rank == 0:
        corpus = checked_corpus(recipe, config.corpus)
        batches = Batches.of(recipe, corpus.train)
        held_out = corpus.validation if num_windows(corpus.validation, recipe.model.context) else None
    try:
        replica, control = build_replica(config, ledger, member, at, batches, device, precision, log)
    except Unreachable as error:  # neighbours are not there yet, or a port is in use: worth another start
        raise RunError(str(error)) from None
    if whole and at.rank > 0 and not member.config.sharded:
        assert isinstance(replica, FullReplica)
        follow_leader(replica, control, batches)
        return 0
    part = f"shard-{at.rank}" if member.config.sharded else "whole" if whole else f"stage-{at.rank}"
    start.mark("build")
    work, stream_dtype = Path(config.work_dir), precision_dtypes(precision)[1]
    incarnation = control.share(os.urandom(8))[0].hex()
    request = LeaveRequest(work, ledger, incarnation, log, leader=at.rank == 0)
    deal = (
        replica.deal if isinstance(replica, LeaderReplica) else batches.deal if batches else lambda deal: None
    )
    trainer = Trainer(
        recipe,
        member,
        replica,
        ledger,
        control,
        device,
        work / part,
        incarnation,
        log,
        save_seconds=config.save_seconds,
        patience=Patience(
            log, work / NOTE, request, parting=lambda: control.size == 1 and request.parting.asked()
        ),
        parting=request.parting,
        deal=deal,
    )
    prints = at.rank == 0 or config.stage is not None
    lines = RoundLines(log, recipe.outer.rounds) if prints else None
    loss = None
    if config.scores is not False and corpus and held_out is not None and trainer.outer.has_model:
        loss = HeldOutLoss(recipe, member, ledger, corpus, trainer.anchor, stream_dtype, config.scores)
    WorkerRounds(trainer, request, work, start, lines, loss).run()
    return 0


def warm_up(device: "torch.device", compiled: bool) -> None:
    """Load what the first inner step would wait for. Most of a start is not Python, so a thread has time."""
    import torch

    try:
        torch.zeros(1, device=device)  # creates the context
    except RuntimeError:
        return  # the training thread meets the same fault and names the cure
    if compiled:
        import torch._dynamo
        import torch._inductor.compile_fx
