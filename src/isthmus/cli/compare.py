"""`isthmus compare`: several runs in one table and one picture."""

import argparse
import json
import sys
from pathlib import Path

from isthmus.cli.arguments import add_json

EPILOG = """examples:
  isthmus compare runs/demo runs/h50
  isthmus compare runs/keep-* --plot keep.svg --metric loss_full
  isthmus compare runs/demo s3://my-runs/first      a fleet elsewhere, by its bucket
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="set runs side by side: what differs, what came of it",
        description="Print a table of runs with the settings that differ, and plot one loss against tokens.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN|URL", help="the folder of a run, such as runs/demo, or a bucket"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="where the plot goes, .png or .svg (default: compare.png)"
    )
    parser.add_argument(
        "--metric", help="what is plotted (default: loss_mixed, or the first that a run has measured)"
    )
    add_json(parser)
    parser.set_defaults(run=compare)


def compare(args: argparse.Namespace) -> int:
    from isthmus.page import plot
    from isthmus.page.compare import (
        check_metric,
        differences,
        measured_metric,
        preamble,
        read_runs,
        table,
    )

    if args.metric:
        check_metric(args.metric)
    path = args.plot or (None if args.json else Path("compare.png"))
    if path:
        plot.check_plot_path(path)
    entries = read_runs(args.runs)
    metric = args.metric or measured_metric(entries)
    found = differences([entry.recipe for entry in entries])
    without = plot.draw(entries, found, metric, path) if path else []
    if args.json:
        runs = [
            {
                "run": entry.where,
                "settings": {key: values[i] for key, values in found.items()},
                **entry.results,
            }
            for i, entry in enumerate(entries)
        ]
        print(
            json.dumps({"differ": list(found), "runs": runs, "plot": str(path) if path else None}, indent=2)
        )
        return 0
    print("\n".join(preamble(entries, found)))
    print()
    print(table(entries, found))
    print(f"\nPlot of {metric}: {path}")
    if without:
        print(f"isthmus: not in the plot, {metric} was not measured: {', '.join(without)}", file=sys.stderr)
    return 0
