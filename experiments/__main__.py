"""`python -m experiments`: run the rows of rows.toml, and draw what docs/ shows."""

import argparse
import sys
from pathlib import Path

from experiments import lines as results
from experiments.rows import pick, scales
from isthmus.errors import ConfigError, RunError

ROOT = Path(__file__).resolve().parents[1]
EPILOG = """examples:
  python -m experiments sweep --dry-run                         what has no line yet, and its tokens
  python -m experiments sweep wire --scale 12m --corpus corpus12m/ --device cuda --jobs 12 --minutes 9
  python -m experiments sweep --scale 178m --corpus corpus178m/ --state state/   goes on after a cut
  python -m experiments page                                    docs/results.md and its figures
  python -m experiments prices                        what `isthmus plan` says of compression
  python -m experiments figure utilisation --to utilisation.svg   figure 2 of the paper; wallclock is 3
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("sweep", help="train the rows that have no line in results/")
    run.add_argument("names", nargs="*", metavar="ROW", help="rows, or files of results/; default: all")
    run.add_argument("--scale", help=f"only this one of {', '.join(scales())}")
    run.add_argument("--corpus", metavar="DIR", help="a folder made by `isthmus data prepare`")
    run.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes (default 1)")
    run.add_argument("--minutes", type=float, metavar="T", help="begin no run that may not end within T")
    run.add_argument(
        "--state", type=Path, metavar="DIR", help="save runs under way here, and go on from them"
    )
    run.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR")
    run.add_argument("--commit", metavar="ID", help="of this code, if git does not know it")
    run.add_argument("--dry-run", action="store_true", help="list what is missing")
    run.set_defaults(run=sweep)
    page = commands.add_parser("page", help="execute the notebook: docs/results.md and its figures")
    page.set_defaults(run=draw_page)
    prices = commands.add_parser("prices", help="write planner/loss_prices.toml from results/")
    prices.set_defaults(run=write_prices)
    figure = commands.add_parser("figure", help="figures 2 and 3 of the paper")
    figure.add_argument("name", choices=("utilisation", "wallclock"))
    figure.add_argument("--to", type=Path, metavar="FILE", required=True, help=".png or .svg")
    figure.set_defaults(run=draw_figure)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except ConfigError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 1


def sweep(args: argparse.Namespace) -> int:
    wanted = pick(args.names, args.scale)
    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}; it must be at least 1")
    lines = results.read(args.results)
    if args.dry_run and not args.corpus:
        return list_missing(wanted, lines)
    if not args.corpus:
        raise ConfigError("--corpus is missing; give a folder made by `isthmus data prepare`")
    if len({row.scale for row in wanted}) > 1:
        raise ConfigError("these rows are of several scales, which have texts of their own; give --scale")
    if wanted[0].scale == "toy" and args.results.resolve() == ROOT / "results":
        raise ConfigError('--scale toy is a trial; give --results another folder than "results"')
    from experiments import sweep as runner
    from isthmus.data.corpus import open_corpus

    fingerprint = open_corpus(args.corpus).sha256[:12]
    runs = runner.missing(wanted, lines, args.corpus, fingerprint)
    if args.dry_run:
        for each in runs:
            print(f"{each!s:60} {each.tokens / 1e6:8.1f} Mtok")
        return 0
    seconds = None if args.minutes is None else 60 * args.minutes
    setup = runner.Setup(
        args.results, args.device, args.jobs, runner.find_commit(args.commit), seconds, args.state
    )
    outcome = runner.sweep(runs, lines, setup)
    print(f"{outcome.finished} runs finished, {len(outcome.left)} left, lines in {args.results}/")
    if outcome.left:
        print("the same command goes on with those that are left", file=sys.stderr)
    return 1 if outcome.faults else 0


def list_missing(wanted: list, lines: list) -> int:
    """What has no line on the text that rows.toml names for its scale."""
    from experiments.sweep import missing

    total, tokens = 0, 0
    for scale in dict.fromkeys(row.scale for row in wanted):
        fingerprint = scales()[scale]["corpus"].split()[-1]
        for run in missing([row for row in wanted if row.scale == scale], lines, "corpus", fingerprint):
            print(f"{scale:8} {run!s:60} {run.tokens / 1e6:8.1f} Mtok")
            total, tokens = total + 1, tokens + run.tokens
    print(f"{total} runs are missing, {tokens / 1e6:,.0f} Mtok")
    return 0


def draw_page(args: argparse.Namespace) -> int:
    from experiments.page import write_page

    for path in write_page(ROOT):
        print(path)
    return 0


def write_prices(args: argparse.Namespace) -> int:
    from experiments.prices import write

    print(write(results.read(ROOT / "results")))
    return 0


def draw_figure(args: argparse.Namespace) -> int:
    from experiments.paper_figures import draw

    draw(args.name, args.to)
    print(args.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
