"""Arguments that several commands share. Standard library only."""

import argparse

from isthmus.errors import ConfigError

RECIPE = "a recipe file (TOML), or the name of one that ships (isthmus new --list)"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the optional RECIPE, and --set."""
    parser.add_argument("recipe", nargs="?", help=RECIPE)
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; may be repeated"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")


def add_run(parser: argparse.ArgumentParser, resume: str) -> None:
    """Add the options of a command that starts or resumes a run."""
    parser.add_argument(
        "--run", dest="run_dir", metavar="DIR", help="the run directory (default: the first free runs/NAME)"
    )
    parser.add_argument("--resume", metavar="RUN", help=resume)
    add_device(parser)
    add_log(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress, only the summary")
    add_json(parser)


def add_log(parser: argparse.ArgumentParser) -> None:
    wandb = "also send every round to W&B, as its own settings say"
    parser.add_argument("--log", action="append", default=[], metavar="wandb", help=wandb)


def check_start(args: argparse.Namespace) -> None:
    """Check that RECIPE or --resume is given, and not both."""
    if bool(args.recipe) == bool(args.resume):
        raise ConfigError("give a recipe to start a run, or --resume RUN to go on with one")


def add_owner(parser: argparse.ArgumentParser) -> None:
    owner = "the owner's key (default: keys/RUN/run.owner.key, or that of the run directory)"
    parser.add_argument("--key", default="", metavar="FILE", help=owner)


def add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", metavar="DIR", help="the run's corpus, if not where its recipe says")


def add_batches(parser: argparse.ArgumentParser) -> None:
    words = "held-out batches (default: as the recipe; 0: all)"
    parser.add_argument("--batches", type=int, metavar="N", help=words)


def check_model_arguments(args: argparse.Namespace) -> None:
    """Check --batches, --device and --corpus before torch is loaded."""
    from isthmus.data.corpus import check_here
    from isthmus.planner.devices import check_device

    if (batches := getattr(args, "batches", None)) is not None and batches < 0:
        raise ConfigError(f"--batches is {batches}; it must be 0 (all) or more")
    check_device(args.device)
    if args.corpus:
        check_here(args.corpus)


def names_in(text: str) -> list[str]:
    """Split names that are separated by commas."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; a port is 0 to 65535, 0 for any free one")
