"""`isthmus logs`: the last lines of a replica's log, wherever it runs."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError
from isthmus.printing import visible

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger

FOLLOW_SECONDS = 3.0
MOST_SHOWN_STAGES = 64


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "logs",
        help="the last lines of a replica's log, from the bucket",
        description="Print the last lines that a replica, or one stage of it, has logged. They come through "
        "the bucket, signed, some seconds after they were written: at most 60 of each stage, without keys, "
        "tokens and credentials. The whole log is on the replica's own machine.",
        epilog="examples:\n  isthmus logs s3://my-runs/first --replica edge-0\n"
        "  isthmus logs s3://my-runs/first --replica edge-0 --stage 1 --follow\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    parser.add_argument("--replica", default="", metavar="NAME", help="the replica (that of its file)")
    parser.add_argument("--stage", type=int, metavar="N", help="one stage of it (default: all)")
    parser.add_argument("--follow", action="store_true", help="go on with new lines, until Ctrl-C")
    parser.set_defaults(run=logs)


def logs(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import find_member, open_ledger

    if not args.replica:
        raise ConfigError(f"whose lines? isthmus logs {args.url} --replica NAME")
    ledger = open_ledger(args.url)
    member = find_member(ledger.run, args.replica)
    num_stages = max(member.config.stages, member.config.processes)
    if args.stage is not None and not 0 <= args.stage < num_stages:
        raise ConfigError(
            f"replica {args.replica} has the stages 0 to {num_stages - 1}; there is no stage {args.stage}"
        )
    stages = range(min(num_stages, MOST_SHOWN_STAGES)) if args.stage is None else [args.stage]
    told: dict[int, tuple[str, ...]] = {}
    try:
        if not show_new(ledger, args.replica, stages, told):
            which = f", stage {args.stage}" if args.stage is not None else ""
            print(f"isthmus: no line of replica {args.replica}{which} is in the bucket yet", file=sys.stderr)
        while args.follow:
            time.sleep(FOLLOW_SECONDS)
            show_new(ledger, args.replica, stages, told)
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return 0


def show_new(
    ledger: "Ledger", replica: str, stages: "range | list[int]", told: dict[int, tuple[str, ...]]
) -> bool:
    """Print what each stage has said since; has any stage said anything at all?"""
    from isthmus.protocol.log_lines import new_lines, read_log
    from isthmus.store.retry import StoreError

    for stage in stages:
        try:
            found = read_log(ledger, replica, stage)
        except StoreError as error:
            if not told:
                raise
            print(f"isthmus: {visible(error)}; still trying", file=sys.stderr)
            return True
        if found:
            for line in new_lines(told.get(stage, ()), found[0].lines):
                print(visible(line), flush=True)
            told[stage] = found[0].lines
    return bool(told)
