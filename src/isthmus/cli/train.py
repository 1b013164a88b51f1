"""`isthmus train`: the whole fleet of a recipe as real processes on this machine."""

import argparse

from isthmus.config import load_recipe

EPILOG = """examples:
  isthmus train recipes/demo.toml
  isthmus train recipes/demo.toml --set outer.rounds=40 --run runs/long
  isthmus status runs/long/bucket               while it runs, from another terminal
Ctrl-C leaves at the end of the round.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="run the whole fleet as real processes on this machine",
        description="Start every replica of a recipe as processes of its own, every stage of a pipelined one "
        "too, joined only by gloo inside a replica and by a bucket (a folder, if the recipe names none) "
        "across them. What dies is started again. Writes the same run directory as `simulate`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="a recipe file (TOML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    parser.add_argument("--run", dest="run_dir", metavar="DIR", help="the run directory (default: runs/NAME)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    parser.add_argument(
        "--json", action="store_true", help="print the last row as JSON instead of the summary"
    )
    parser.set_defaults(run=train)


def train(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.set)
    from isthmus.cli.simulate import tell
    from isthmus.engine.train import train as start

    return tell(start(recipe, args.run_dir, device=args.device, quiet=args.quiet), args.json)
