"""`isthmus report`: draw a run's page again and tell the run in words."""

import argparse
import json

EPILOG = """examples:
  isthmus report runs/demo            rewrite runs/demo/report.html; also while the run goes on
  isthmus report runs/demo --json     totals, summary and plan against actual, for another program
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report",
        help="tell a run in words and draw its page",
        description="Say in words what a run did, and rewrite its report.html.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN", help="the folder of a run, such as runs/demo")
    parser.add_argument(
        "--json", action="store_true", help="print totals, summary and plan against actual as JSON"
    )
    parser.set_defaults(run=report)


def report(args: argparse.Namespace) -> int:
    from isthmus.dashboard.actual import compare
    from isthmus.dashboard.report import write_report
    from isthmus.runlog import RunDir, summary, totals

    path = write_report(args.run_dir)
    run = RunDir.open(args.run_dir)
    if args.json:
        found = compare(run)
        facts = {"report": str(path), "summary": summary(run), "totals": totals(run.rows())}
        print(json.dumps(facts | {"plan_against_actual": found and found.to_dict()}, indent=2))
    else:
        print("\n".join(summary(run)))
        print(f"Report: {path}")
    return 0
