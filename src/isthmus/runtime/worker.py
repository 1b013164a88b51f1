"""The process that trains: `python -m isthmus.runtime.worker JSON`, started and restarted by the elastic
agent."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError, Diverged, RunError, RunStopped, Unreachable
from isthmus.files import replace_file
from isthmus.printing import guard_streams
from isthmus.runtime.build import Assignment, build_replica, compiles
from isthmus.runtime.failure import PASSING_STATUS, Failure, Settled, failure_note
from isthmus.runtime.leaving import LEAVE, PART, STAY, LeaveRequest
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.parting import Parted
from isthmus.runtime.process import LauncherConfig, Log, die_with_parent, logger
from isthmus.runtime.recent import keep, recent_file
from isthmus.runtime.waiting import NOTE

if TYPE_CHECKING:
    import torch

    from isthmus.runtime.trainer import Trainer

BEGAN = time.time()  # before the long imports


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
    """Build this process's part of the replica, restore its state, and run rounds to the end."""
    import torch

    from isthmus.simulator.picks import checked_corpus, pick_device, pick_precision, pick_threads

    device = pick_device(config.device)
    if device.type == "cuda":
        how = device, compiles(config, device)
        threading.Thread(target=warm_up, args=how, daemon=True, name="warm-up").start()

    from isthmus.data.tokens import Batches, num_windows
    from isthmus.outer.rounds import run_rounds
    from isthmus.protocol.access import find_member, open_as
    from isthmus.protocol.patience import LeftWaiting, Patience
    from isthmus.protocol.rescue import LedPast
    from isthmus.replica.base import precision_dtypes
    from isthmus.replica.full import FullReplica
    from isthmus.replica.leader import LeaderReplica, follow_leader
    from isthmus.runtime.after_round import AfterRound
    from isthmus.runtime.heartbeats import HeartbeatThread
    from isthmus.runtime.held_out import HeldOutLoss
    from isthmus.runtime.place import Place
    from isthmus.runtime.recovery import Recovery
    from isthmus.runtime.round_lines import RoundLines
    from isthmus.runtime.stopping import save_delivered, save_edge
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
    work_dir = Path(config.work_dir) / part
    incarnation = control.share(os.urandom(8))[0].hex()
    request = LeaveRequest(Path(config.work_dir), ledger, incarnation, log, leader=at.rank == 0)
    deal = (
        replica.deal if isinstance(replica, LeaderReplica) else batches.deal if batches else lambda deal: None
    )
    wanted = STAY
    trainer = Trainer(
        recipe,
        member,
        replica,
        ledger,
        control,
        device,
        work_dir,
        incarnation,
        log,
        save_seconds=config.save_seconds,
        patience=Patience(
            log,
            Path(config.work_dir) / NOTE,
            request,
            parting=lambda: control.size == 1 and request.parting.asked(),
        ),
        parting=request.parting,
        place=Place(ledger, log, key, deal, control),
        held_out=held_out,
        stream_dtype=precision_dtypes(precision)[1],
    )
    trainer.exchange.tells_anchors = not sys.stderr.isatty()
    told_here = at.rank == 0 or config.stage is not None
    lines = RoundLines(log, recipe.outer.rounds) if told_here else None
    loss = None
    if (
        config.scores is not False
        and corpus
        and held_out is not None
        and len(trainer.reads) == len(ledger.shards)
    ):
        dtype = precision_dtypes(precision)[1]
        loss = HeldOutLoss(recipe, member, ledger, corpus, trainer.anchor, dtype, config.scores)
    heartbeats = HeartbeatThread(trainer, incarnation, recipe.bucket.heartbeat_seconds, Path(config.work_dir))

    def leave() -> bool:
        """One process may have been asked to leave, and one to part: all do the same."""
        nonlocal wanted
        words = control.share(bytes([request.asked()]))
        wanted = next((word for word in (LEAVE, PART) if bytes([word]) in words), STAY)
        if wanted == STAY:
            return False
        trainer.status.state = "leaving"
        heartbeats.soon()
        return True

    if at.rank == 0:
        heartbeats.start()
    try:
        trainer.status.state = "catching up"
        recovery = Recovery(trainer)
        done = recovery.resume()
        settled = Settled(Path(config.work_dir), at.rank)
        after = AfterRound(trainer, settled, lines, loss)
        after.begin(done)
        start.mark("resume")
        trainer.place.admitted = lambda: start.mark("admission")

        def progress(h: int) -> None:
            if not start.told:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                start.tell()
                heartbeats.soon()
            settled.step(h)

        to_the_end: bool | None = None
        while to_the_end is None:
            rounds = range(done + 1, recipe.outer.rounds + 1)
            try:
                to_the_end = run_rounds(trainer, trainer.exchange, rounds, progress, after, leave)
            except LedPast as gap:
                done = recovery.pass_over(gap)
        trainer.finish()
        if to_the_end and extended(trainer):
            raise RunError(f"the run goes on after round {recipe.outer.rounds}; starting again for that")
        if to_the_end:
            request.parting.unneeded()
        else:
            save_edge(trainer)
        trainer.status.state = "finished" if to_the_end else "left"
        trainer.status.farewell = trainer.exchange.gather_facts(trainer.pop_facts())
        if ledger.membership.expected:
            log(f"replica {member.name} was not admitted before the run ended")
        log("all rounds are done" if to_the_end else f"left after round {trainer.status.round}")
        if wanted == PART and not request.parting.asked():
            raise RunError(
                f"replica {member.name}: the machine of another stage was taken back; waiting for its return"
            )
    except Parted as stop:
        trainer.status.state = "left"
        log(str(stop))
        replica.close()
        return 0
    except LeftWaiting as error:
        save_delivered(trainer)
        trainer.status.state = "left"
        log(str(error))
        return 0
    except Diverged:
        with suppress(Exception):  # what is still written must not appear where the state was
            trainer.state.finish()
        raise
    except RunStopped:
        raise
    except RunError as error:  # the leader has left in the middle of a round: so do the other stages
        if at.rank == 0 or not request.here():
            raise
        log(f"left: {error}")
        return 0
    finally:
        if at.rank == 0:
            try:
                heartbeats.end()
            except RunError as error:  # must not hide why the run ended
                log(f"no farewell: {error}")
    replica.close()
    control.leave()
    return 0


def extended(trainer: "Trainer") -> bool:
    """Has the run got more rounds since this process was started? All processes take the leader's answer."""
    from isthmus.replica.control_group import agree

    membership, leads = trainer.ledger.membership, trainer.control.rank == 0
    rounds = trainer.recipe.outer.rounds
    return agree(
        trainer.control, leads and trainer.patience(membership.look).run.recipe.outer.rounds > rounds
    )


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


class StartUp:
    """How long it took from `join` to the first inner step, and what took it."""

    def __init__(self, started: float, log: Log) -> None:
        self.started, self.log, self.told = started, log, False
        self.last, self.parts = BEGAN, {"launcher": BEGAN - started}

    def mark(self, name: str) -> None:
        """What ends now."""
        now = time.time()
        self.parts[name], self.last = now - self.last, now

    def tell(self) -> None:
        self.mark("first step")
        self.told = True
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        self.log(f"first inner step after {self.last - self.started:.1f} s ({parts})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
