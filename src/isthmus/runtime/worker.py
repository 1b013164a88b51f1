"""The process that trains: forked by the supervisor, or started by others as `isthmus-worker`."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import Diverged, RunError, Unreachable
from isthmus.files import open_own
from isthmus.printing import guard_streams
from isthmus.runtime.build import Assignment, build_replica, compiles
from isthmus.runtime.failure import PASSING_STATUS, Failure, told_in_one_line
from isthmus.runtime.leaving import AGAIN_STATUS, Orders
from isthmus.runtime.process import (
    History,
    JoinConfig,
    Log,
    die_with_parent,
    last_incarnation,
    lock_file,
    logger,
    name_process,
)

if TYPE_CHECKING:
    import torch


def begin(config: str, history: str, environment: dict[str, str], pipe: Connection) -> None:
    """Run in a process that the supervisor has forked or spawned; it ends when the supervisor does."""
    die_with_parent(os.getppid())  # the server that forked us dies with the supervisor
    os.environ.update(environment)
    given = JoinConfig.from_json(config)
    if given.log_file:
        with open_own(Path(given.log_file), append=True) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    for number in (signal.SIGINT, signal.SIGTERM):  # the supervisor heeds them
        signal.signal(number, signal.SIG_IGN)
    guard_streams()
    orders = Orders(pipe)
    try:
        sys.exit(work(given, orders, History(**json.loads(history))))
    except Exception as error:
        failure = Failure.of(error)
        orders.failed(failure)  # first, since a neighbour that loses us ends too
        if not failure.status:  # the supervisor's last line
            _logger(given, Assignment.from_environment())(failure.text)
        sys.exit(PASSING_STATUS if failure.passes else failure.status or 1)


def _logger(config: JoinConfig, at: Assignment) -> Log:
    return logger(config.replica if at.size == 1 else f"{config.replica}/{at.rank}")


def work(config: JoinConfig, orders: Orders, history: History) -> int:
    """Run the worker; return the exit status."""
    began, at = time.time(), Assignment.from_environment()
    name_process(f"worker-{at.rank}/{at.size}")
    log = _logger(config, at)
    try:
        return run_worker(config, at, orders, history, log, began)
    except Diverged:
        from isthmus.runtime.checkpoint import put_aside

        put_aside(Path(config.work_dir), log)
        raise


def join(config: JoinConfig) -> int:
    """Run as one worker, which torchrun or the like starts and restarts; return the exit status."""
    from isthmus.runtime.versions import check_torch

    check_torch()
    guard_streams()
    at, orders = Assignment.from_environment(), Orders()
    with told_in_one_line(f"replica {config.replica}: "):
        from isthmus.runtime.preflight import Place

        place = Place.of_worker(config, at.rank, at.size, at.local_size)
        config, leads = place.config, at.local_rank == 0
        if leads:
            place.check()
        with lock_file(config.lock) if leads else nullcontext() as orders.lock:

            def leave(number: int, frame: object) -> None:
                if number == signal.SIGTERM and config.grace_seconds:
                    orders.parting.begin(config.grace_seconds)
                else:
                    orders.leave = True

            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, leave)
            restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            # Who asked an earlier job to leave did not ask this one.
            previous = last_incarnation(config.lock) if restarts else ""
            return work(config, orders, History(previous, restarts))


def run_worker(
    config: JoinConfig, at: Assignment, orders: Orders, history: History, log: Log, began: float
) -> int:
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
    from isthmus.runtime.status import StartUp
    from isthmus.runtime.trainer import Trainer
    from isthmus.store.objects import open_store

    start = StartUp(config.started, log, began)
    start.mark("imports")
    pick_threads(config.num_threads)
    try:
        store = open_store(config.url, create=False)
        ledger, _ = open_as(store, config.replica, config.key)
    except Unreachable as error:  # the supervisor found both: the store is down for now
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
        how = batches, device, precision, log, orders, history
        replica, control = build_replica(config, ledger, member, at, *how)
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
    request = LeaveRequest(orders, ledger, incarnation, log, at.rank == 0, history.incarnation)
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
            log, orders.waits, request, parting=lambda: control.size == 1 and request.parting.asked()
        ),
        parting=request.parting,
        deal=deal,
    )
    prints = at.rank == 0 or config.stage is not None
    lines = RoundLines(log, recipe.outer.rounds) if prints else None
    loss = None
    if config.scores is not False and corpus and held_out is not None and trainer.outer.has_model:
        loss = HeldOutLoss(recipe, member, ledger, corpus, trainer.anchor, stream_dtype, config.scores)
    WorkerRounds(trainer, request, history, start, lines, loss).run()
    return AGAIN_STATUS if request.parting.asked() and trainer.status.state != "finished" else 0


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
