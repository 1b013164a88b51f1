"""`isthmus report`: a run in words, and its page as one file."""

import argparse
import json

from isthmus.cli.arguments import add_json

EPILOG = """examples:
  isthmus report runs/demo            rewrite runs/demo/report.html; also while the run goes on
  isthmus report runs/demo --json     totals, summary and plan against actual, for another program
  isthmus report s3://my-runs/first --to runs/first     a run that was joined: from its bucket alone
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report",
        help="say in words what a run did, and write its page",
        description="Say in words what a run did, and rewrite its report.html: the page of `isthmus watch` "
        "in one file, which needs no server and no network.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "run_dir", metavar="RUN", help="the folder of a run, or the bucket of a run with --to"
    )
    parser.add_argument("--to", metavar="DIR", help="of a bucket: the new run directory to write")
    add_json(parser)
    parser.set_defaults(run=report)


def report(args: argparse.Namespace) -> int:
    from isthmus.errors import ConfigError
    from isthmus.page.actual import compare
    from isthmus.page.report import write_report
    from isthmus.protocol.place import find_place
    from isthmus.runlog import RunDir, summary, totals

    bucket = find_place(args.run_dir).run is None
    if bucket != bool(args.to):
        raise ConfigError(
            f"{args.run_dir} is a bucket; give --to a new folder for its report"
            if bucket
            else f"{args.run_dir} is not the bucket of a run; leave --to out"
        )
    if bucket:
        from isthmus.protocol.access import open_ledger
        from isthmus.runtime.recorder import write_from_bucket

        write_from_bucket(open_ledger(args.run_dir), args.to)
    path = write_report(args.to or args.run_dir)
    run = RunDir.open(path.parent)
    if args.json:
        found = compare(run)
        facts = {"report": str(path), "summary": summary(run), "totals": totals(run.rows())}
        print(json.dumps(facts | {"plan_against_actual": found and found.to_dict()}, indent=2))
    else:
        print("\n".join(summary(run)))
        print(f"Report: {path}")
    return 0
