"""`isthmus join` and `isthmus leave`: this machine's part of a fleet."""

import argparse
from pathlib import Path

from isthmus.errors import ConfigError

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
        "time: it restores its own state, or reads the newest anchor in the bucket, and contributes from the "
        "next round on.",
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
        help="a stage that is silent for so long counts as lost (60)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="kill a worker that makes no progress for so long (30)",
    )
    parser.add_argument(
        "--trust-network",
        action="store_true",
        help="let stages talk over a public address; gloo neither encrypts nor authenticates",
    )
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
    from isthmus.runtime.launcher import launch
    from isthmus.runtime.process import LauncherConfig

    return launch(
        LauncherConfig(
            url=args.url,
            replica=args.replica,
            key=args.key or "",
            work_dir=args.work or "",
            device=args.device,
            num_threads=args.threads,
            compiled=args.compile,
            stage=args.stage,
            master=args.master or "",
            wait_seconds=args.wait,
            link_timeout_seconds=args.link_timeout,
            stall_seconds=args.stall_timeout,
            trust_network=args.trust_network,
        )
    )


def leave(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import check_key, find_member, open_ledger

    ledger = open_ledger(args.url)
    find_member(ledger.run, args.replica)
    key = Path(args.key or Path("keys") / ledger.run.recipe.name / f"{args.replica}.key")
    check_key(ledger.run, args.replica, key)
    found = ledger.heartbeat(args.replica)
    if found is None or found[0].gone:
        raise ConfigError(f"replica {args.replica} is not in the run now")
    heartbeat, _ = found
    ledger.store.put(f"members/{args.replica}/leave-{heartbeat.incarnation}", b"leave")
    print(f"{args.replica} will leave at the end of round {heartbeat.round + 1}.")
    return 0
