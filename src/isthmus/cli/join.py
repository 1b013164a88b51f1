"""`isthmus join` and `isthmus leave`: this machine's part of a fleet."""

import argparse
from dataclasses import fields
from typing import Any

from isthmus.errors import ConfigError

EPILOG = """examples:
  isthmus join edge-7.isthmus.toml          the file of `isthmus init` or `invite`: docs/first-evening.md
  isthmus join s3://my-runs/first --replica rack-0
  isthmus join s3://my-runs/first --replica edge-0          all stages of edge-0 on this machine
  isthmus join s3://my-runs/first --replica edge-0 --stage 1   one stage; the others find it by the bucket
  isthmus join s3://my-runs/first --replica edge-0 --stage 1 --relay 192.0.2.10:29520
Ctrl-C leaves at the end of the round, a second Ctrl-C leaves now. After a crash, type the same command again.
A lost neighbour or store is waited for. Exit status 0: finished or left; 1: a fault that waiting does not
mend, which the last line names with its cure; 2: wrong input, or no answer from what it names; 75: left for
now (--grace), start it again.
"""


LEAVE_EXAMPLES = """examples:
  isthmus leave edge-0.isthmus.toml                     by its file; `isthmus join` with it comes back
  isthmus leave s3://my-runs/first --replica edge-0     by its name, with its key
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "join",
        help="run this machine's part of a fleet",
        description="Take part in a run as one replica, or as one stage of it, until it ends. Start it any "
        "time: it restores its own state, or reads the newest anchor in the bucket, and contributes from the "
        "next round on.",
        epilog=EPILOG,
    )
    add = parser.add_argument  # dest names a field of JoinConfig
    add("url", help="the file that the run's owner sent you; or the bucket: s3://bucket/prefix, or a folder")
    add("--replica", default="", metavar="NAME", help="which replica this machine is (part of)")
    add("--key", default="", metavar="FILE", help="the replica's private key (default: keys/RUN/NAME.key)")
    add("--stage", type=int, help="this machine's stage, where stages are on several machines")
    reached = (
        "where other machines reach this stage, for example through a router that forwards a port (default: "
        "this machine's own addresses); none: they cannot"
    )
    add("--advertise", default="", metavar="HOST:PORT", help=reached)
    relays = "where `isthmus relay` runs, for stages that cannot reach each other; on all of a replica's"
    add("--relay", default="", metavar="HOST:PORT", help=relays)
    add("--work", dest="work_dir", default="", metavar="DIR", help="private state (default: work/RUN/NAME)")
    texts = "the run's text on this machine, or its URL, if not where the recipe says"
    add("--corpus", default="", metavar="DIR", help=texts)
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    threads = "CPU threads of each process (default: torch's)"
    add("--threads", dest="num_threads", type=int, default=0, metavar="THREADS", help=threads)
    compiles = "torch.compile, layer by layer: a longer first step, shorter others (default: on a GPU)"
    add("--compile", dest="compiled", action=argparse.BooleanOptionalAction, help=compiles)
    seconds: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    lost = "a stage that is silent for so long counts as lost (60)"
    add("--link-timeout", dest="link_timeout_seconds", default=60.0, help=lost, **seconds)
    stalled = "kill a worker that makes no progress for so long (30)"
    add("--stall-timeout", dest="stall_seconds", default=30.0, help=stalled, **seconds)
    saves = "save a checkpoint at most so long after the last, sooner where writing is quick (60)"
    add("--save-every", dest="save_seconds", default=60.0, help=saves, **seconds)
    grace = (
        "SIGTERM means that this machine is taken back in so long: save and leave within it, in the middle "
        "of a round if need be, and end with status 75 (default 0: SIGTERM is as Ctrl-C)"
    )
    add("--grace", dest="grace_seconds", default=0.0, help=grace, **seconds)
    scores = "measure the held-out loss on this machine; or never (default: as data.eval_by says)"
    add("--score", dest="scores", action=argparse.BooleanOptionalAction, help=scores)
    trusts = "between machines use gloo or NCCL, in the clear, in place of TLS; on all stages of a replica"
    add("--trust-network", action="store_true", help=trusts)
    add("--as-worker", action="store_true", help=argparse.SUPPRESS)  # of `isthmus-worker`
    parser.set_defaults(run=join)

    leave_parser = commands.add_parser(
        "leave",
        help="ask a replica to leave a run at the end of its round",
        description="Ask a replica, wherever it runs, to leave at the end of its round. Needs its key.",
        epilog=LEAVE_EXAMPLES,
    )
    add = leave_parser.add_argument
    add("url", help="the replica's file, NAME.isthmus.toml; or the run's bucket")
    add("--replica", default="", metavar="NAME", help="the replica, if not by its file")
    add("--key", default="", metavar="FILE", help="its private key (default: keys/RUN/NAME.key)")
    leave_parser.set_defaults(run=leave)


def join(args: argparse.Namespace) -> int:
    from isthmus.runtime import supervisor, worker
    from isthmus.runtime.process import JoinConfig

    if not args.replica:
        raise ConfigError("give the file that the run's owner sent you, or --replica NAME with its key")
    names = {field.name for field in fields(JoinConfig)}
    config = JoinConfig(**{name: value for name, value in vars(args).items() if name in names})
    return worker.join(config) if args.as_worker else supervisor.join(config)


def leave(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_as, open_ledger

    if not args.replica:
        raise ConfigError("which replica? give --replica NAME, or its file in place of the URL")
    ledger, _ = open_as(open_ledger(args.url).store, args.replica, args.key)
    found = ledger.heartbeat(args.replica)
    if found is None or found[0].gone:
        raise ConfigError(f"replica {args.replica} is not in the run now")
    heartbeat, _ = found
    ledger.ask_to_leave(heartbeat.incarnation)
    print(f"{args.replica} will leave at the end of the round that it is in.")
    return 0
