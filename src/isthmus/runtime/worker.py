"""The process that trains: `python -m isthmus.runtime.worker JSON`, started and restarted by the elastic
agent."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError, Diverged, RunError, RunStopped, Unreachable
from isthmus.files import overwrite_own, replace_file
from isthmus.printing import guard_streams
from isthmus.protocol.trust import Refused
from isthmus.reading import read_note
from isthmus.runtime.failure import PASSING_STATUS, Failure, Settled, failure_note
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.parting import Parted, Parting
from isthmus.runtime.process import LauncherConfig, Log, die_with_parent, logger
from isthmus.runtime.recent import keep, recent_file
from isthmus.runtime.waiting import NOTE
from isthmus.store.retry import StoreError

if TYPE_CHECKING:
    import torch

    from isthmus.config import Member
    from isthmus.data.tokens import Batches
    from isthmus.protocol.ledger import Ledger, RunInfo
    from isthmus.replica.base import Replica
    from isthmus.replica.control_group import ControlGroup
    from isthmus.runtime.trainer import Trainer

BEGAN = time.time()  # before the long imports

# Of a link's time-out: between inner steps a stage may be uploading, so the others wait longer for it.
CONTROL_TIMEOUT_FACTOR = 30

STAY, LEAVE, PART = 0, 1, 2  # what a process is asked: PART is to come back


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the elastic agent assigns to a worker, by environment variables; nothing else reads them."""

    rank: int
    size: int
    master: str

    @classmethod
    def from_environment(cls) -> "Assignment":
        get = os.environ.get
        master = f"{get('MASTER_ADDR', '127.0.0.1')}:{get('MASTER_PORT', '0')}"
        return cls(int(get("RANK", "0")), int(get("WORLD_SIZE", "1")), master)


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


def compiles(config: LauncherConfig, device: "torch.device") -> bool:
    """Is this process's part of the model compiled? On a GPU, unless told otherwise."""
    from isthmus import gpu

    return gpu.usable(device) if config.compiled is None else config.compiled


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


class LeaveRequest:
    """Has somebody asked this replica to leave: by a file beside its state, or by an object in the bucket?

    The object names an incarnation, so it does not ask a later one, and is signed with the replica's key. A
    worker that was restarted after the request still finds it under the incarnation before.
    """

    def __init__(self, work: Path, ledger: "Ledger", incarnation: str, log: Log, leader: bool) -> None:
        self.file, self.ledger, self.leader, self.log = work / "leave", ledger, leader, log
        self.incarnation, self.ignored = incarnation, ""
        self.parting = Parting(work)
        if leader:
            note = work / "incarnation"
            self._look(read_note(note) or "")
            overwrite_own(note, incarnation)

    def _look(self, incarnation: str) -> None:
        if not incarnation.isalnum() or len(incarnation) > 64:
            return
        try:
            if self.ledger.asked_to_leave(incarnation):
                overwrite_own(self.file)
        except StoreError:
            pass  # whoever needs the bucket finds out; the next round asks again
        except Refused as reason:
            if self.ignored != incarnation:
                self.ignored = incarnation
                self.log(f"somebody asks this replica to leave, but {reason}; going on")

    def asked(self) -> int:
        """STAY, LEAVE or PART."""
        if self.parting.asked():
            return PART
        if self.leader and not self.file.exists():
            self._look(self.incarnation)
        return LEAVE if self.file.exists() else STAY

    def pending(self) -> bool:
        return self.asked() != STAY

    def here(self) -> bool:
        """As far as this machine knows."""
        return self.file.exists() or self.parting.asked()


def build_replica(
    config: LauncherConfig,
    run: "RunInfo",
    member: "Member",
    at: Assignment,
    batches: "Batches | None",
    device: "torch.device",
    precision: str,
) -> tuple["Replica", "ControlGroup"]:
    """This process's part of the replica (the whole model, or one stage or shard of it) and its control
    group.

    Stage 0 and every process of a full replica have `batches`.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - it is public

    from isthmus.protocol.trust import load_signer
    from isthmus.replica.control_group import SingleProcess, StageControlGroup
    from isthmus.replica.full import FullReplica, share_batches
    from isthmus.replica.leader import LeaderReplica
    from isthmus.replica.pipelined import PipelinedReplica
    from isthmus.replica.process_groups import connect, open_store, own_address
    from isthmus.replica.stage import Stage
    from isthmus.runtime.handshake import Credentials
    from isthmus.runtime.link_proof import prove_link

    recipe, whole = run.recipe.trained_by(member), member.config.kind == "full"
    compiled = compiles(config, device)
    if whole and device.type == "cuda":
        from isthmus.runtime.fits import cut_to_fit, device_memory

        member = cut_to_fit(recipe, member, device_memory(device)[0])

    def full_replica(process_group: Any = None) -> FullReplica:
        assert batches is not None
        return FullReplica(
            recipe,
            member,
            batches,
            device=device,
            precision=precision,
            process_group=process_group,
            compiled=compiled,
        )

    if whole and at.size == 1:
        return full_replica(), SingleProcess()
    store, address = open_store(
        replica=member.name, stage=at.rank, master=at.master, session=f"{run.run_id}/{member.name}"
    )
    timeout_seconds = CONTROL_TIMEOUT_FACTOR * config.link_timeout_seconds
    control = StageControlGroup(member.name, at.rank, at.size, PrefixStore("control", store), timeout_seconds)
    if member.config.sharded:
        from isthmus.replica.sharded import ShardedReplica, shard_mesh  # FSDP takes a second to import

        assert batches is not None
        mesh = shard_mesh(PrefixStore("shards", store), at.rank, at.size, device)
        how = {"device": device, "precision": precision, "compiled": compiled}
        return ShardedReplica(recipe, member, batches, mesh, **how), control
    if whole:
        replica = full_replica(share_batches(PrefixStore("batches", store), at.rank, at.size, device))
        return (
            (LeaderReplica(replica, control, batches), SingleProcess())
            if at.rank == 0
            else (replica, control)
        )
    if config.master:
        address = own_address(config.master, at.rank)
    credentials = Credentials(run.run_id, load_signer(Path(config.key), member.name), Path(config.key))
    common: dict[str, Any] = {
        "stage": at.rank,
        "num_stages": at.size,
        "store": PrefixStore("links", store),
        "address": address,
        "device": device,
        "timeout_seconds": config.link_timeout_seconds,
    }
    if config.secured:
        from isthmus.runtime.stage_links import connect_as_told

        before, after = connect_as_told(config, credentials, **common)
    else:
        before, after = connect(
            replica=member.name,
            backend=member.config.backend,
            prove=lambda link: prove_link(link, credentials),
            **common,
        )
    stage = Stage(recipe, member, at.rank, device=device, precision=precision, compiled=compiled)
    return PipelinedReplica(recipe, member, [stage], [(before, after)], batches), control


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
