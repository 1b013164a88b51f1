"""The process that trains: `python -m isthmus.engine.worker JSON`, started and restarted by the elastic
agent."""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.errors import ConfigError, Diverged, RunError, RunStopped


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
    link_timeout_seconds: float = 60.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(argv: list[str]) -> int:
    config = WorkerConfig(**json.loads(argv[0]))
    die_with_parent()
    # The agent gives a process its place by these; nothing below reads them.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    master = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '0')}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's: it asks us to leave at the edge
    log = logger(config.replica, rank, size)
    Pulse(Path(config.work_dir) / f"alive-{rank}").start()
    try:
        return take_part(config, rank, size, master, log)
    except (ConfigError, RunStopped) as error:  # no restart would mend it: the launcher reads this and ends
        (Path(config.work_dir) / "fatal").write_text(f"{2 if isinstance(error, ConfigError) else 1} {error}")
        return 3
    except Diverged as error:
        log(f"{error}; its private state is put aside")
        for state in Path(config.work_dir).glob("*/state"):
            state.rename(state.with_name(f"state-diverged-{int(time.time())}"))
        return 1
    except RunError as error:
        log(str(error))
        return 1


def take_part(config: WorkerConfig, rank: int, size: int, master: str, log: Callable[[str], None]) -> int:
    """Build this process's part of the replica, take up its state, and run rounds to the end."""
    import torch

    from isthmus.comm.crew import agree
    from isthmus.comm.ledger import Ledger, read_run
    from isthmus.comm.store import open_store
    from isthmus.comm.trust import load_signer
    from isthmus.engine.distributed import Heart, RealFleet
    from isthmus.engine.loop import run_rounds
    from isthmus.engine.start import checked_corpus, pick_device, pick_precision

    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    store = open_store(config.url)
    run = read_run(store)
    recipe = run.recipe
    member = next(m for m in recipe.fleet() if m.name == config.replica)
    ledger = Ledger(store, run, load_signer(Path(config.key), config.replica))
    device = pick_device(config.device)
    precision = pick_precision(recipe, device)
    work_dir = Path(config.work_dir) / (f"stage-{rank}" if size > 1 else "whole")
    corpus = checked_corpus(recipe) if rank == 0 else None
    try:
        replica, crew = build_replica(
            config, member, recipe, corpus, rank, size, master, device, precision, run.run_id
        )
    except ConfigError as error:  # neighbours that are not there yet, a port still held: worth another start
        raise RunError(str(error)) from None
    incarnation = crew.share(os.urandom(8))[0].hex()
    fleet = RealFleet(recipe, member, replica, ledger, crew, device, work_dir, incarnation, log)
    heart = Heart(fleet, incarnation, recipe.bucket.heartbeat_seconds)
    leave_file = Path(config.work_dir) / "leave"
    leave_key = f"members/{member.name}/leave-{incarnation}"

    def leave() -> bool:
        wanted = rank == 0 and (leave_file.exists() or store.head(leave_key) is not None)
        if agree(crew, wanted):
            fleet.told.state = "leaving"
            return True
        return False

    if rank == 0:
        heart.start()
    try:
        fleet.told.state = "catching up"
        done = fleet.come_up()
        whole = run_rounds(
            fleet,
            fleet.exchange,
            range(done + 1, recipe.outer.rounds + 1),
            lambda h: None,
            lambda t, seconds: None,
            leave,
        )
        fleet.told.state = "finished" if whole else "left"
        fleet.told.extra = fleet.exchange.gathered_facts()
        log("all rounds are done" if whole else f"left after round {fleet.told.round}")
    finally:
        if rank == 0:
            heart.end()
    replica.close()
    return 0


def build_replica(config, member, recipe, corpus, rank, size, master, device, precision, run_id):
    """(replica, crew): the whole model here, or one stage of it."""
    from torch.distributed import PrefixStore

    from isthmus.comm.crew import SoloCrew, StageCrew
    from isthmus.comm.stages import connect, open_store
    from isthmus.data.tokens import Batches
    from isthmus.replica.full import FullReplica
    from isthmus.replica.pipelined import PipelinedReplica
    from isthmus.replica.stage import Stage

    inner, model = recipe.inner, recipe.model
    batches = None
    if corpus is not None:
        batches = Batches(corpus.train, recipe.seed, recipe.num_replicas, inner.batch, model.context)
    if member.config.kind == "full":
        return FullReplica(recipe, member, batches, device=device, precision=precision), SoloCrew()
    session = f"{run_id}/{member.name}/{master}"
    found, address = open_store(
        replica=member.name, stage=rank, master=master, session=session, trust_network=config.trust_network
    )
    before, after = connect(
        replica=member.name,
        stage=rank,
        num_stages=size,
        store=PrefixStore("links", found),
        address=address,
        device=device,
        timeout_seconds=config.link_timeout_seconds,
        trust_network=config.trust_network,
    )
    crew = StageCrew(member.name, rank, size, PrefixStore("crew", found))
    stage = Stage(recipe, member, rank, device=device, precision=precision)
    return PipelinedReplica(recipe, member, [stage], [(before, after)], batches), crew


class Pulse(threading.Thread):
    """Touches a file while this process runs, so that the launcher can tell a stopped one from a busy one."""

    def __init__(self, path: Path, every_seconds: float = 1.0) -> None:
        super().__init__(daemon=True, name="pulse")
        self.path, self.every = path, every_seconds

    def run(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.path.write_text(str(os.getpid()))
            time.sleep(self.every)


def die_with_parent() -> None:
    """No orphan survives its launcher: the kernel kills us when it goes (Linux)."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def logger(replica: str, rank: int, size: int) -> Callable[[str], None]:
    tag = replica if size == 1 else f"{replica}/{rank}"

    def log(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} [{tag}] {text}", file=sys.stderr, flush=True)

    return log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
