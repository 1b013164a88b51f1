"""`isthmus train`: the whole fleet of a recipe as real processes on this machine."""

import argparse
import sys

from isthmus.cli.arguments import add_recipe, add_run, check_start
from isthmus.config import load_recipe
from isthmus.errors import ConfigError
from isthmus.planner.devices import check_device
from isthmus.runlog import RunDir
from isthmus.runtime.failure import told_in_one_line

EPILOG = """examples:
  isthmus train demo
  isthmus train demo --set outer.rounds=40 --run runs/long
  isthmus status runs/long                      while it runs, from another terminal
  isthmus train --resume runs/long              after Ctrl-C, a kill or a reboot
Ctrl-C leaves at the end of the round, a second Ctrl-C stops now.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="run the whole fleet as real processes on this machine",
        description="Start every replica of a recipe as processes of its own, and every stage of a pipelined "
        "one too. They are joined only by gloo inside a replica and by a bucket (a folder, if the recipe "
        "names none) across replicas. A process that dies is started again. Writes the same run directory as "
        "`simulate`.",
        epilog=EPILOG,
    )
    add_recipe(parser)
    add_run(parser, "go on with this run, each replica from its own saved state")
    parser.set_defaults(run=train)


def train(args: argparse.Namespace) -> int:
    """Run or resume, then print a summary, and how to resume an interrupted run."""
    check_start(args)
    if args.resume and any(override.startswith("outer.rounds=") for override in args.set):
        raise ConfigError(
            f"--resume goes on with the run as it was; `isthmus extend {args.resume}` adds rounds"
        )
    if args.resume and (args.set or args.run_dir):
        raise ConfigError("--resume goes on with the run as it was; --set and --run are for a new one")
    from isthmus.data.corpus import check_here  # loads numpy

    check_device(args.device)
    recipe = args.recipe and load_recipe(args.recipe, args.set)
    if recipe:
        check_here(recipe.data.corpus)
    from isthmus.runtime.versions import check_torch

    check_torch()
    with told_in_one_line():
        from isthmus.runtime.workers import prepare

        prepare()  # it imports torch while we do
        from isthmus.cli.simulate import print_results
        from isthmus.runtime.train import how_to_go_on, resume
        from isthmus.runtime.train import train as start

    if recipe:
        results = start(recipe, args.run_dir, device=args.device, quiet=args.quiet, log=args.log)
    else:
        results = resume(args.resume, device=args.device, quiet=args.quiet, log=args.log)
    print_results(results, args.json)
    run = RunDir.open(results.run_dir)
    if run.about.get("status") == "interrupted":
        print(f"isthmus: {how_to_go_on(run)}", file=sys.stderr)
    return 0
