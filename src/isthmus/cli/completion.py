"""`isthmus completion`: shell completion for Tab, by a script that shtab generates."""

import argparse
from collections.abc import Iterator
from typing import Any

from isthmus.errors import ConfigError

EPILOG = """examples:
  isthmus completion bash > ~/.local/share/bash-completion/completions/isthmus
  isthmus completion zsh > ~/.zfunc/_isthmus         a folder of $fpath, before compinit
  isthmus completion fish > ~/.config/fish/completions/isthmus.fish
Then open a new shell. Write the file again after an upgrade of Isthmus.
"""
FOLDERS = ("DIR", "RUN", "RUN|URL")
FILES = ("FILE", "MACHINES", "PATH", "INPUT")


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script for bash, zsh or fish that completes commands, options and recipes",
        description="Print a script that lets the shell complete commands, options, files and the names of "
        "recipes that ship.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=completion)


def completion(args: argparse.Namespace) -> int:
    from isthmus.cli.main import build_parser
    from isthmus.config import PRESETS
    from isthmus.config.shipped import shipped_names

    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs shtab: pip install shtab") from None
    parser = build_parser()
    for action in actions_of(parser):
        if action.choices is None and action.dest == "preset":
            action.choices = tuple(PRESETS)
        elif action.choices is None and action.dest == "recipe":
            action.choices = shipped_names()
        elif action.metavar in FOLDERS:
            setattr(action, "complete", shtab.DIRECTORY)  # noqa: B010 - an attribute that only shtab reads
        elif action.metavar in FILES or action.dest == "url":
            setattr(action, "complete", shtab.FILE)  # noqa: B010
    print(shtab.complete(parser, args.shell))
    return 0


def actions_of(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Yield every option and argument of a command, then those of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions_of(below)
        else:
            yield action
