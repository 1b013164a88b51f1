"""`isthmus watch`: the web page of a run, while it goes on and after."""

import argparse
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from isthmus.cli.arguments import add_log, check_port

EPILOG = """examples:
  isthmus watch runs/demo                  the page of a run directory; Ctrl-C ends it
  isthmus watch s3://my-runs/first         of a bucket, from anywhere that may read it
  isthmus watch runs/demo --port 8080      on a port of your choice
  isthmus watch runs/demo --tensorboard tb also writes event files for TensorBoard
  isthmus watch s3://my-runs/first --log wandb     also sends the rounds to W&B; of a bucket, too

The page needs a browser and nothing else: no network, no account. /metrics is for Prometheus, /state is the
same as JSON. To look from another machine, better than --host: ssh -L 8017:127.0.0.1:8017 MACHINE
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "watch",
        help="a web page of a run, while it goes on and after",
        description="Serve the page of a run on this machine: fleet, losses, rounds, bytes, plan against "
        "actual. It reads the run directory or the bucket, and writes to neither.",
        epilog=EPILOG,
    )
    parser.add_argument("target", metavar="RUN|URL", help="the folder of a run, or a bucket")
    parser.add_argument("--port", type=int, default=8017, help="default 8017; 0: any free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, this machine only"
    )
    parser.add_argument("--tensorboard", metavar="DIR", help="also write TensorBoard event files there")
    add_log(parser)
    parser.set_defaults(run=watch)


def watch(args: argparse.Namespace) -> int:
    from isthmus.page.loggers import LoggedRows, check_loggers
    from isthmus.page.server import Server, Watcher
    from isthmus.page.source import open_source
    from isthmus.page.tensorboard import EventWriter

    check_port(args.port)
    check_loggers(args.log)
    watcher = Watcher(open_source(args.target))
    with Server(args.host, args.port, watcher) as server, ExitStack() as ends:
        if args.tensorboard:
            started = str(watcher.raw.about.get("started") or "")
            watcher.follow(EventWriter(Path(args.tensorboard), started))
        if args.log:
            watcher.follow(ends.enter_context(closing(LoggedRows(args.target, watcher.raw.recipe))))
        watcher.start()
        if not server.local:
            print(
                f"isthmus: anybody who reaches {args.host} can read this page; it has no password",
                file=sys.stderr,
            )
        print(server.url, flush=True)
        print(f"watching {args.target}; Ctrl-C ends it", file=sys.stderr, flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("isthmus: stopped watching", file=sys.stderr)
    return 0
