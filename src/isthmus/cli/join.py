"""`isthmus join` and `isthmus leave`: this machine's part of a fleet."""

import argparse
import os
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from isthmus.config import Member

EPILOG = """examples:
  isthmus join s3://my-runs/first --replica rack-0
  isthmus join s3://my-runs/first --replica edge-0          all stages of edge-0 on this machine
  isthmus join s3://my-runs/first --replica edge-0 --stage 1 --master 10.0.0.2:29500
Ctrl-C leaves at the end of the round, a second Ctrl-C leaves now. After a crash, type the same command again.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "join",
        help="run this machine's part of a fleet",
        description="Take part in a run as one replica, or as one stage of it, until it ends. Start it any "
        "time: it takes up its own state, or the newest anchor in the bucket, and contributes from the next "
        "round on.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the run's bucket: s3://bucket/prefix, or a folder")
    parser.add_argument(
        "--replica", required=True, metavar="NAME", help="which replica this machine is (part of)"
    )
    parser.add_argument(
        "--key", metavar="FILE", help="the replica's private key (default: keys/RUN/NAME.key)"
    )
    parser.add_argument(
        "--stage", type=int, help="this machine's stage, where stages are on several machines"
    )
    parser.add_argument("--master", metavar="HOST:PORT", help="where stage 0 listens for the others")
    parser.add_argument(
        "--work", metavar="DIR", help="private state of this replica (default: work/RUN/NAME)"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of each process (default: torch's)"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile for a full replica: the first step takes longer, the others less",
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="how long to look for the master (60)"
    )
    parser.add_argument(
        "--link-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="after so long a silent stage counts as lost (60)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after so long a worker that does not stir is killed (30)",
    )
    parser.add_argument(
        "--trust-network",
        action="store_true",
        help="let stages talk over a public address; gloo neither encrypts nor authenticates",
    )
    # By `isthmus train`: its process id.
    parser.add_argument("--supervised", type=int, default=0, metavar="PID", help=argparse.SUPPRESS)
    parser.set_defaults(run=join)

    leave_parser = commands.add_parser(
        "leave",
        help="ask a replica to leave a run at the end of its round",
        description="Ask a replica, wherever it runs, to leave at the end of its round. Needs its key.",
    )
    leave_parser.add_argument("url", help="the run's bucket: s3://bucket/prefix, or a folder")
    leave_parser.add_argument("--replica", required=True, metavar="NAME", help="who is to leave")
    leave_parser.add_argument(
        "--key", metavar="FILE", help="the replica's private key (default: keys/RUN/NAME.key)"
    )
    leave_parser.set_defaults(run=leave)


def join(args: argparse.Namespace) -> int:
    # c10d would print C++ stack traces whenever a neighbour goes away; our own line says who it was.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from isthmus.runtime.liveness import AliveFile, launcher_alive_file
    from isthmus.runtime.worker import WorkerConfig, die_with_parent, logger

    if args.supervised:  # before the long imports: also while it starts, a launcher can be stopped
        die_with_parent(args.supervised)
        AliveFile(Path(args.work) / launcher_alive_file(args.stage)).start()
    from isthmus.protocol.access import check_key, find_member
    from isthmus.protocol.ledger import Ledger, read_run
    from isthmus.replica.process_groups import check_private
    from isthmus.runtime.create import check_corpus, check_not_taken, check_start, check_trainable
    from isthmus.runtime.launcher import run_replica
    from isthmus.simulator.run import pick_device
    from isthmus.store.objects import open_store
    from isthmus.store.retry import StoreError

    store = open_store(args.url, create=False)
    run = read_run(store)
    check_trainable(run.recipe)
    check_start(Ledger(store, run))
    member = find_member(run, args.replica)
    key = Path(args.key or Path("keys") / run.recipe.name / f"{args.replica}.key")
    check_key(run, args.replica, key)
    device = pick_device(args.device)
    if member.config.backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            f'replica {member.name} has backend "nccl", which needs a CUDA device on every stage'
        )
    if args.compile:
        check_compiles(member, device)
    stages = member.config.stages
    if args.stage is not None and not 0 <= args.stage < stages:
        raise ConfigError(
            f"replica {member.name} has the stages 0 to {stages - 1}; there is no stage {args.stage}"
        )
    if args.stage is None and args.master:
        raise ConfigError("--master is for stages on several machines; give --stage too, or drop it")
    if args.stage is not None and not args.master:
        raise ConfigError(
            "--stage needs --master HOST:PORT: the address of stage 0, for example 10.0.0.2:29500"
        )
    host, port = "127.0.0.1", 0
    if args.stage is not None:
        host, port = address(args.master)
        host = check_private(host, args.trust_network)
    work = Path(args.work or Path("work") / run.recipe.name / member.name).resolve()
    if args.stage in (None, 0):
        check_corpus(run)
        if not args.supervised:
            check_not_taken(Ledger(store, run), args.replica, work)
    else:
        find_master(host, port, args.wait, member.name)
    try:
        store.probe(f"members/{member.name}/probe")  # may this machine's credentials write at all?
    except StoreError as error:
        raise ConfigError(str(error)) from None
    config = WorkerConfig(
        url=args.url,
        replica=member.name,
        key=str(key.resolve()),
        work_dir=str(work),
        device=args.device,
        num_threads=args.threads,
        trust_network=args.trust_network,
        compiled=args.compile,
        link_timeout_seconds=args.link_timeout,
    )

    log = logger(member.name, 0, 1)
    log(f'joining "{run.recipe.name}" as {member.config.kind} replica of {stages} stage{"s" * (stages > 1)}')
    return run_replica(
        config,
        num_stages=stages if stages > 1 else member.config.processes,
        stage=args.stage,
        host=host,
        port=port,
        log=log,
        stall_seconds=args.stall_timeout,
        supervised=bool(args.supervised),
    )


def check_compiles(member: "Member", device: "torch.device") -> None:
    """Before anything is started: a worker that cannot compile would fail at its first step, again and
    again."""
    from isthmus import gpu

    if member.config.kind != "full":
        raise ConfigError(f"replica {member.name} is {member.config.kind}; --compile is for full replicas")
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError("--compile needs a C++ compiler on a CPU; install g++, or leave --compile out")
    if device.type == "cuda" and not gpu.usable(device):
        raise ConfigError("--compile needs Triton on a GPU; install triton, or leave --compile out")


def leave(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import check_key, find_member, open_ledger

    ledger = open_ledger(args.url)
    find_member(ledger.run, args.replica)
    key = Path(args.key or Path("keys") / ledger.run.recipe.name / f"{args.replica}.key")
    check_key(ledger.run, args.replica, key)
    beat = ledger.heartbeat(args.replica)
    if beat is None or beat[0].get("state") in ("left", "finished"):
        raise ConfigError(f"replica {args.replica} is not in the run now")
    ledger.store.put(f"members/{args.replica}/leave-{beat[0]['incarnation']}", b"leave")
    print(f"{args.replica} will leave at the end of round {beat[0].get('round', 0) + 1}.")
    return 0


def address(master: str) -> tuple[str, int]:
    host, colon, port = master.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f'--master is "{master}"; write HOST:PORT, for example 10.0.0.2:29500')
    return host.strip("[]"), int(port)


def find_master(host: str, port: int, timeout_seconds: float, replica: str) -> None:
    """A later stage looks for stage 0 before it starts anything."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"replica {replica}: no stage 0 at {host}:{port} within {timeout_seconds:g} s "
                    f"({error.strerror or 'no answer'}); start it there, or correct --master"
                ) from None
            time.sleep(0.5)
