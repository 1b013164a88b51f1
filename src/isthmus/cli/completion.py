"""`isthmus completion`: what a shell offers when Tab is pressed, as a script made from the parser itself."""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

EPILOG = """examples:
  isthmus completion bash > ~/.local/share/bash-completion/completions/isthmus
  isthmus completion zsh > ~/.zfunc/_isthmus         a folder of $fpath, before compinit
  isthmus completion fish > ~/.config/fish/completions/isthmus.fish
Then open a new shell. After an upgrade of Isthmus, the same again.
"""

FILE, FOLDER, NOTHING, RECIPE, KEY = "file", "folder", "nothing", "recipe", "key"
METAVARS = {"DIR": FOLDER, "RUN": FOLDER, "RUN|URL": FOLDER, "FILE": FILE, "MACHINES": FILE, "PATH": FILE}
METAVARS |= {"INPUT": FILE, "KEY=VALUE": KEY}
DESTS = {"recipe": RECIPE, "url": FILE, "bucket": FILE}  # of a command that takes a URL, or a file or folder
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Value:
    """What may stand somewhere: one of the kinds above, or one of some words."""

    kind: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    names: tuple[str, ...]
    about: str
    value: Value | None  # None: it takes none


@dataclass(frozen=True)
class Command:
    """One command by its path, such as ("data", "prepare")."""

    path: tuple[str, ...]
    commands: dict[str, str]  # the commands below it, each with what it does
    options: tuple[Option, ...]
    values: tuple[Value, ...]  # the arguments that are no options, in order
    repeats: bool  # may the last of them come again?


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script for bash, zsh or fish that completes commands, options and recipes",
        description="Print a script that lets the shell complete commands, options, recipes that ship and "
        "keys of --set.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=completion)


def completion(args: argparse.Namespace) -> int:
    from isthmus.cli import completion_scripts
    from isthmus.cli.main import build_parser

    script: Callable[[list[Command]], str] = getattr(completion_scripts, args.shell)
    print(script(list(commands_of(build_parser()))), end="")
    return 0


def commands_of(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """The command itself, then all below it."""
    below: dict[str, argparse.ArgumentParser] = {}
    abouts: dict[str, str] = {}
    options, values, repeats = [], [], False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            abouts = {entry.dest: short(entry.help) for entry in action._choices_actions}
        elif action.option_strings:
            value = None if action.nargs == 0 else value_of(action, path)
            options.append(Option(tuple(action.option_strings), short(action.help), value))
        else:
            values.append(value_of(action, path))
            repeats = action.nargs in ("*", "+")
    yield Command(
        path, {name: abouts.get(name, "") for name in below}, tuple(options), tuple(values), repeats
    )
    for name, each in below.items():
        yield from commands_of(each, (*path, name))


def value_of(action: argparse.Action, path: tuple[str, ...]) -> Value:
    from isthmus.config import PRESETS
    from isthmus.config.shipped import shipped_names

    known = {("preset", "NAME"): tuple(PRESETS), ("device", None): DEVICES}
    if path == ("new",):
        known["like", "NAME"] = tuple(shipped_names())
    metavar = action.metavar if isinstance(action.metavar, str) else None
    if action.choices is not None:
        return Value("", tuple(str(choice) for choice in action.choices))
    if words := known.get((action.dest, metavar)):
        return Value("", words)
    kind = METAVARS.get(metavar or "") or DESTS.get(action.dest) or (FILE if action.type is Path else NOTHING)
    return Value(kind, {RECIPE: tuple(shipped_names()), KEY: tuple(keys())}.get(kind, ()))


def keys() -> Iterator[str]:
    """The keys that --set takes, but for those of a replica, whose names are the recipe's own."""
    from isthmus.config import Recipe

    for key, hint in typing.get_type_hints(Recipe).items():
        if dataclasses.is_dataclass(hint):
            own = dataclasses.fields(typing.cast(type, hint))
            yield from (f"{key}.{field.name}=" for field in own if not field.metadata.get("derived"))
        elif key != "replicas":
            yield f"{key}="


def short(about: str | None) -> str:
    """The first part of a help text, for one line of a menu."""
    if not about:
        return ""
    first = about.replace("%%", "%").split("; ")[0].split(" (")[0].split(": ")[0]
    return first if len(first) <= 60 else first[:57].rsplit(" ", 1)[0] + " …"
