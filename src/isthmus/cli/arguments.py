"""Arguments that several commands share. Standard library only."""

import argparse

RECIPE = "a recipe file (TOML), or the name of one that ships (isthmus new --list)"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the optional RECIPE, and --set."""
    parser.add_argument("recipe", nargs="?", help=RECIPE)
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; may be repeated"
    )


def add_run(parser: argparse.ArgumentParser, resume: str) -> None:
    """Add --run, --resume and --device of a command that starts or resumes a run."""
    parser.add_argument(
        "--run", dest="run_dir", metavar="DIR", help="the run directory (default: the first free runs/NAME)"
    )
    parser.add_argument("--resume", metavar="RUN", help=resume)
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add_log(parser)


def add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="wandb",
        help="also send every round to W&B, as its own settings say",
    )
