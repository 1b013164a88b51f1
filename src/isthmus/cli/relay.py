"""`isthmus relay`: connect stages that cannot reach each other."""

import argparse
import sys
from contextlib import suppress

from isthmus.cli.arguments import check_port

PORT = 29520  # as in runtime.relay
EPILOG = """examples:
  isthmus relay                                 on every address of this machine, TCP port 29520
  isthmus relay --host 192.0.2.10 --port 443
and on the machines of a replica whose stages are behind NAT or a firewall:
  isthmus join s3://my-runs/first --replica edge --stage 0 --relay 192.0.2.10:29520
  isthmus join s3://my-runs/first --replica edge --stage 1 --relay 192.0.2.10:29520

Any machine that both stages reach will do. It needs one open TCP port and twice the traffic of the links that
it carries; no key, no bucket, no GPU. It pairs connections that one replica's key has signed for, and passes
on what they encrypt for each other: it can neither read nor change it, only cut it off. It serves anybody,
within bounds on connections, memory and time for each address. Ctrl-C ends it: stages that meet here wait
until it, or another one at the same address, is back.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "relay",
        help="a meeting point for stages that cannot reach each other",
        description="Carry the links between stages that are behind NAT or a firewall: both connect to this "
        "machine, which forwards ciphertext from one to the other and knows nothing of what it says.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--host", default="", metavar="ADDRESS", help="listen there only (default: everywhere)"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free one")
    parser.set_defaults(run=relay)


def relay(args: argparse.Namespace) -> int:
    from isthmus.runtime.relay import MOST_FILES, Relay

    check_port(args.port)

    def log(text: str) -> None:
        print(f"isthmus: {text}", file=sys.stderr, flush=True)

    server = Relay(args.host, args.port, log, files=allowed_files(MOST_FILES))
    print(f"relay at {args.host or '*'}:{server.port}", flush=True)
    print(f"stages join with --relay ADDRESS:{server.port}; Ctrl-C ends it", file=sys.stderr, flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        carried = f"{server.carried / 1e6:,.1f} MB carried"
        print(f"isthmus: {carried}", file=sys.stderr)
    return 0


def allowed_files(most: int) -> int:
    """Raise this process's limit of open files towards `most`, and return it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else soft
