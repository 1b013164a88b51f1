"""Arguments that several commands take, in the same words. Standard library only."""

import argparse

RECIPE = "a recipe file (TOML), or the name of one that ships (isthmus new --list)"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """RECIPE, which may be left out, and --set."""
    parser.add_argument("recipe", nargs="?", help=RECIPE)
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; may be repeated"
    )


def add_run(parser: argparse.ArgumentParser, resume: str) -> None:
    """--run, --resume and --device of a command that starts a run or goes on with one."""
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
        choices=("wandb", "mlflow"),
        help="also send every round to W&B or MLflow, as their own settings say; may be repeated",
    )
