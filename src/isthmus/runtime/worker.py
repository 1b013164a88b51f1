"""The process that trains: `python -m isthmus.runtime.worker JSON`, started and restarted by the elastic
agent."""

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError, Diverged, RunError, RunStopped, Unreachable
from isthmus.files import replace_file
from isthmus.printing import guard_streams
from isthmus.runtime.build import Assignment, build_replica, compiles
from isthmus.runtime.failure import PASSING_STATUS, Failure, failure_note
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.process import LauncherConfig, Log, die_with_parent, logger
from isthmus.runtime.recent import keep, recent_file
from isthmus.runtime.start_up import StartUp
from isthmus.runtime.waiting import NOTE

if TYPE_CHECKING:
    import torch


def main(argv: list[str]) -> int:
    guard_streams()
    config = LauncherConfig.from_json(argv[0])
    die_with_parent(config.parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # the launcher handles both, and asks us to leave
        signal.signal(number, signal.SIG_IGN)
    at, work = Assignment.from_environment(), Path(config.work_dir)
    kept = partial(keep, recent_file(work, str(at.rank)))
    log = logger(config.replica if at.size == 1 else f"{config.replica}/{at.rank}", kept)
    AliveFile(work / f"alive-{at.rank}").start()
    try:
        return run_worker(config, at, log)
    except Exception as error:
        failure = Failure.of(error)
        if isinstance(error, ConfigError | RunStopped) and not failure.passes:
            # No restart would help, not even a second one: the launcher reads this and ends.
            replace_file(work / "fatal", f"{2 if isinstance(error, ConfigError) else 1} {error}")
            return 3
        failure.write(failure_note(work, at.rank))  # first: a neighbour that loses us ends too
        log(failure.text)
        if isinstance(error, Diverged):
            from isthmus.runtime.private_state import put_aside

            put_aside(work, log)
        return PASSING_STATUS if failure.passes else 1


def run_worker(config: LauncherConfig, at: Assignment, log: Log) -> int:
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
    from isthmus.runtime.admission import Admission
    from isthmus.runtime.held_out import HeldOutLoss
    from isthmus.runtime.leaving import LeaveRequest
    from isthmus.runtime.round_lines import RoundLines
    from isthmus.runtime.rounds import WorkerRounds
    from isthmus.runtime.trainer import Trainer
    from isthmus.store.objects import open_store

    start = StartUp(config.started, log)
    start.mark("imports")
    pick_threads(config.num_threads)
    try:
        store = open_store(config.url, create=False)
        ledger, key = open_as(store, config.replica, config.key)
    except Unreachable as error:  # the launcher found both: the store is away for now
        raise RunError(str(error)) from None
    run, recipe, member = ledger.run, ledger.run.recipe, find_member(ledger.run, config.replica)
    whole = member.config.kind == "full"
    if whole and at.size > 1 and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", at.rank)
    precision, batches, corpus, held_out = pick_precision(recipe, device), None, None, None
    if whole or at.rank == 0:
        corpus = checked_corpus(recipe, config.corpus)
        batches = Batches.of(recipe, corpus.train)
        held_out = corpus.validation if num_windows(corpus.validation, recipe.model.context) else None
    try:
        replica, control = build_replica(config, run, member, at, batches, device, precision)
    except Unreachable as error:  # neighbours that are not there yet, a port in use: worth another start
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
        admission=Admission(ledger, log, key, deal, control),
        held_out=held_out,
        stream_dtype=stream_dtype,
    )
    prints = at.rank == 0 or config.stage is not None
    lines = RoundLines(log, recipe.outer.rounds) if prints else None
    loss = None
    if config.scores is not False and corpus and held_out is not None and trainer.outer.has_model:
        loss = HeldOutLoss(recipe, member, ledger, corpus, trainer.anchor, stream_dtype, config.scores)
    WorkerRounds(trainer, request, work, start, lines, loss).run()
    return 0


def warm_up(device: "torch.device", compiled: bool) -> None:
    """What the first inner step would wait for. Most of a start is not Python: a thread has time for it."""
    import torch

    try:
        torch.zeros(1, device=device)  # makes the context
    except RuntimeError:
        return  # the training thread meets the same fault, and its line names the cure
    if compiled:
        import torch._dynamo
        import torch._inductor.compile_fx


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
