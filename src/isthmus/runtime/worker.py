"""The process that trains: `python -m isthmus.runtime.worker JSON`, started and restarted by the elastic
agent."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError, Diverged, RunError, RunStopped
from isthmus.runtime.liveness import AliveFile

CONTROL_TIMEOUT_FACTOR = (
    30  # link time-outs: between inner steps a stage may be uploading, so it is waited for longer
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is told; the agent adds its place among the stages."""

    url: str
    replica: str
    key: str
    work_dir: str
    device: str = "auto"
    num_threads: int = 0
    trust_network: bool = False
    compiled: bool = False  # a full replica's forward and backward
    link_timeout_seconds: float = 60.0
    launcher: int = 0  # its process id

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(argv: list[str]) -> int:
    config = WorkerConfig(**json.loads(argv[0]))
    die_with_parent(config.launcher)
    # The agent gives a process its place by these; nothing below reads them.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    master = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '0')}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's: it asks us to leave at the edge
    log = logger(config.replica, rank, size)
    AliveFile(Path(config.work_dir) / f"alive-{rank}").start()
    work = Path(config.work_dir)
    try:
        return take_part(config, rank, size, master, log)
    except (ConfigError, RunStopped) as error:  # no restart would mend it: the launcher reads this and ends
        part = work / f"fatal-{rank}.part"
        part.write_text(f"{2 if isinstance(error, ConfigError) else 1} {error}")
        part.rename(work / "fatal")
        return 3
    except Diverged as error:
        log(f"{error}; its private state is put aside")
        for state in work.glob("*/state"):
            with suppress(OSError):  # another stage was faster
                state.rename(state.with_name(f"state-diverged-{time.time_ns()}"))
        return 1
    except RunError as error:
        log(str(error))
        return 1
    except Exception as error:  # a full disk, no memory on the device: one line, and another try in a while
        log(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")
        traceback.print_exc(limit=-3)
        time.sleep(5)
        return 1


def take_part(config: WorkerConfig, rank: int, size: int, master: str, log: Callable[[str], None]) -> int:
    """Build this process's part of the replica, take up its state, and run rounds to the end."""
    import torch

    from isthmus.outer.rounds import run_rounds
    from isthmus.protocol.ledger import Ledger, read_run
    from isthmus.protocol.trust import load_signer
    from isthmus.replica.control_group import any_true
    from isthmus.replica.leader import follow_leader
    from isthmus.runtime.trainer import HeartbeatThread, RealFleet
    from isthmus.simulator.run import checked_corpus, pick_device, pick_precision
    from isthmus.store.objects import open_store

    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    try:
        store = open_store(config.url, create=False)
        run = read_run(store)
    except ConfigError as error:  # the launcher found both: the store is away for now
        raise RunError(str(error)) from None
    recipe = run.recipe
    member = next(m for m in recipe.fleet() if m.name == config.replica)
    ledger = Ledger(store, run, load_signer(Path(config.key), config.replica))
    device = pick_device(config.device)
    precision = pick_precision(recipe, device)
    work_dir = Path(config.work_dir) / ("whole" if member.config.kind == "full" else f"stage-{rank}")
    whole = member.config.kind == "full"
    corpus = checked_corpus(recipe) if rank == 0 or whole else None
    if whole and size > 1 and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank)
    try:
        replica, control = build_replica(
            config, member, recipe, corpus, rank, size, master, device, precision, run.run_id
        )
    except ConfigError as error:  # neighbours that are not there yet, a port still held: worth another start
        raise RunError(str(error)) from None
    if whole and rank > 0:
        follow_leader(replica, control)
        return 0
    incarnation = control.share(os.urandom(8))[0].hex()
    fleet = RealFleet(recipe, member, replica, ledger, control, device, work_dir, incarnation, log)
    heart = HeartbeatThread(fleet, incarnation, recipe.bucket.heartbeat_seconds)
    wish = LeaveWish(Path(config.work_dir), store, member.name, incarnation, lead=rank == 0)

    def leave() -> bool:
        if any_true(control, wish.there()):
            fleet.told.state = "leaving"
            return True
        return False

    if rank == 0:
        heart.start()
    try:
        fleet.told.state = "catching up"
        done = fleet.come_up()
        to_the_end = run_rounds(
            fleet,
            fleet.exchange,
            range(done + 1, recipe.outer.rounds + 1),
            lambda h: None,
            lambda t, seconds: None,
            leave,
        )
        fleet.told.state = "finished" if to_the_end else "left"
        fleet.told.extra = fleet.exchange.gathered_facts()
        log("all rounds are done" if to_the_end else f"left after round {fleet.told.round}")
    finally:
        if rank == 0:
            try:
                heart.end()
            except RunError as error:  # must not hide why the run ended
                log(f"no farewell: {error}")
    replica.close()
    control.part()
    return 0


class LeaveWish:
    """Does somebody want this replica to leave: a file beside its state, or an object in the bucket.

    The object names an incarnation, so that it asks nobody who comes later; a worker that was started again
    after the wish still finds it under the name of the one before.
    """

    def __init__(self, work: Path, store: Any, replica: str, incarnation: str, lead: bool) -> None:
        self.file, self.store, self.lead = work / "leave", store, lead
        self.prefix, self.incarnation = f"members/{replica}/leave-", incarnation
        if lead:
            note = work / "incarnation"
            with suppress(OSError):
                self._look(note.read_text())
            note.write_text(incarnation)

    def _look(self, incarnation: str) -> None:
        if incarnation.isalnum() and self.store.head(self.prefix + incarnation) is not None:
            self.file.touch()

    def there(self) -> bool:
        if self.lead and not self.file.exists():
            self._look(self.incarnation)
        return self.file.exists()


def build_replica(config, member, recipe, corpus, rank, size, master, device, precision, run_id):
    """(replica, crew): the whole model here, or one stage of it."""
    from torch.distributed import PrefixStore

    from isthmus.data.tokens import Batches
    from isthmus.replica.control_group import SingleProcess, StageControlGroup
    from isthmus.replica.full import FullReplica, share_batches
    from isthmus.replica.leader import LeaderReplica
    from isthmus.replica.pipelined import PipelinedReplica
    from isthmus.replica.process_groups import connect, open_store
    from isthmus.replica.stage import Stage

    inner, model = recipe.inner, recipe.model
    batches = None
    if corpus is not None:
        batches = Batches(corpus.train, recipe.seed, recipe.num_replicas, inner.batch, model.context)
    full = {
        "device": device, "precision": precision, "rank": rank, "num_processes": size,
        "compiled": config.compiled,
    }  # fmt: skip
    if member.config.kind == "full" and size == 1:
        return FullReplica(recipe, member, batches, **full), SingleProcess()
    session = f"{run_id}/{member.name}/{master}"
    found, address = open_store(
        replica=member.name, stage=rank, master=master, session=session, trust_network=config.trust_network
    )
    control = StageControlGroup(
        member.name,
        rank,
        size,
        PrefixStore("control", found),
        CONTROL_TIMEOUT_FACTOR * config.link_timeout_seconds,
    )
    if member.config.kind == "full":
        share_batches(PrefixStore("batches", found), rank, size, device)
        replica = FullReplica(recipe, member, batches, **full)
        return (LeaderReplica(replica, control), SingleProcess()) if rank == 0 else (replica, control)
    before, after = connect(
        replica=member.name,
        stage=rank,
        num_stages=size,
        store=PrefixStore("links", found),
        address=address,
        device=device,
        timeout_seconds=config.link_timeout_seconds,
        trust_network=config.trust_network,
        backend=member.config.backend,
    )
    stage = Stage(recipe, member, rank, device=device, precision=precision)
    return PipelinedReplica(recipe, member, [stage], [(before, after)], batches), control


def die_with_parent(parent: int = 0) -> None:
    """No orphan survives its launcher: the kernel kills us when it goes (Linux).

    `parent` is who started us: it may have died before the kernel was asked.
    """
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if parent and os.getppid() != parent:
        os._exit(1)


def logger(replica: str, rank: int, size: int) -> Callable[[str], None]:
    tag = replica if size == 1 else f"{replica}/{rank}"

    def log(text: str) -> None:
        # In one write: several processes share the file.
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} [{tag}] {text}\n")
        sys.stderr.flush()

    return log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
