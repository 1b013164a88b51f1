"""`isthmus simulate`: the whole fleet of a recipe on one device."""

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.arguments import add_recipe, add_run, check_start
from isthmus.errors import ConfigError
from isthmus.planner.devices import check_device
from isthmus.runlog import RunDir, finite, summary

if TYPE_CHECKING:
    from isthmus.simulator.run import Results

EPILOG = """examples:
  isthmus simulate demo
  isthmus simulate demo --set outer.keep=64 --set replicas.edge.compression=1/32
  isthmus simulate demo --run runs/h50 --set outer.inner_steps=50
  isthmus simulate --resume runs/h50            after a stop or a kill
  isthmus compare runs/demo runs/h50            then look at what changed
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "simulate",
        help="train the whole fleet of a recipe on this one device",
        description="Train every replica of a recipe on one device, full and pipelined, with byte-exact "
        "payloads and a virtual clock for the links. Writes a run directory with metrics.jsonl and "
        "report.html.",
        epilog=EPILOG,
    )
    add_recipe(parser)
    add_run(parser, "go on with this run from its last saved round")
    parser.add_argument(
        "--mode",
        default="auto",
        choices=("auto", "stacked", "turns"),
        help="all replicas at once, or one after another (default: by predicted memory)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="torch.compile the inner step (default: on CUDA)",
    )
    parser.set_defaults(run=simulate)


def simulate(args: argparse.Namespace) -> int:
    """Run or resume, then summarise the run and name its report."""
    check_start(args)
    own = args.set or args.run_dir or args.mode != "auto" or args.compile is not None
    if args.resume and own:
        raise ConfigError(
            "--resume goes on with the run as it was; --set, --run, --mode and --compile are for a new one"
        )
    check_device(args.device)
    if args.resume:
        from isthmus.simulator.run import resume

        results = resume(args.resume, device=args.device, quiet=args.quiet, log=args.log)
    else:
        from isthmus.api.runs import simulate as start

        options = {"device": args.device, "mode": args.mode, "compiled": args.compile, "quiet": args.quiet}
        results = start(args.recipe, args.run_dir, overrides=args.set, log=args.log, **options)
    return print_results(results, args.json)


def print_results(results: "Results", as_json: bool) -> int:
    """Print the end of a run: a summary, or its last row as JSON."""
    if as_json:
        last = finite(results.last.to_dict())
        print(json.dumps({"run": str(results.run_dir), "rounds": len(results.rows) - 1, "last": last}))
    else:
        print("\n".join(summary(results.run_dir)))
        print(f"Report: {Path(results.run_dir) / 'report.html'}")
        run = RunDir.open(results.run_dir)
        if run.about.get("status") == "finished":
            print("\n".join(next_steps(run)))
    return 0


def next_steps(run: RunDir) -> list[str]:
    """Return commands to try on a finished run, ready to copy into a shell."""
    path, to = shlex.quote(str(run.path)), shlex.quote(f"{run.path.name}-hf")
    return [
        f'Text from it: isthmus generate {path} "It was the"',
        f"To share it:  isthmus export {path} --to hf {to}",
        f"Its page:     isthmus watch {path}; for more rounds: isthmus extend {path} --rounds "
        f"{run.recipe.outer.rounds}",
    ]
