"""`isthmus new`: write your own recipe from a shipped one, with comments on what people change first."""

import argparse
import json
import re
import shlex
import textwrap
from pathlib import Path

from isthmus.cli.arguments import add_json
from isthmus.config import Recipe, parse_recipe, toml_line
from isthmus.config.shipped import first_sentence, shipped_names, shipped_text
from isthmus.errors import ConfigError
from isthmus.files import write_new

EPILOG = """examples:
  isthmus new --list                            the recipes that ship, one line each
  isthmus new mine.toml                         the demo's, to change
  isthmus new mine.toml --like 178m-recommended
"""

HEAD = """\
# {name}: the recipe "{like}" as `isthmus new` copied it. Change it here, or for one run by --set KEY=VALUE.
#   isthmus plan {file}        time, bytes and memory on its fleet, without running it
#   isthmus simulate {file}    the whole fleet on this device
#   isthmus train {file}       the same fleet as real processes on this machine
# A key that is not stated has its default; docs/reference.md has every key. An unknown one is refused.
#
"""

# The keys that people change first, and what to know about each.
FIRST = {
    "model.preset": "The size: nano (1.1 M parameters), 10m, 20m, 178m, 512m or 1b. Keys beside it, such as "
    "layers, override it.",
    "data.corpus": 'The text: "builtin:sample", or a folder that `isthmus data prepare TEXTS --to corpus/ '
    "--vocab N` has made, or its URL in a bucket (`isthmus data push`). Its vocabulary is at most the "
    "model's: 1,024 for nano, 8,192 for 10m and 20m, 32,000 for the others.",
    "inner.batch": "Sequences per replica and inner step. Memory grows with it: halve it where `isthmus "
    "plan` asks for more than there is.",
    "inner.lr": "The peak learning rate; a larger model wants a smaller one.",
    "outer.inner_steps": "H: steps that each replica takes alone before all of them agree. More of them: "
    "fewer bytes, and staler updates.",
    "outer.rounds": "How long: rounds x inner_steps x batch x context tokens for each replica. `isthmus "
    "extend` adds rounds later.",
}
FLEET = (
    'The fleet: one table for each kind of replica, `count` times. A "full" one holds the whole model on one '
    'machine; a "pipelined" one cuts it into `stages` machines, which send `compression` of its dimensions '
    "over their `link`. `isthmus doctor` measures link and tflops; `isthmus plan --suggest` makes these "
    "tables from a list of machines."
)


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "new",
        help="write a recipe of your own, from one that ships with the package",
        description="Write a recipe to change: one of those that ship, with the keys that people change "
        "first explained. Nothing is overwritten.",
        epilog=EPILOG,
    )
    parser.add_argument("file", nargs="?", type=Path, help="the new file, such as mine.toml")
    parser.add_argument("--like", metavar="NAME", help="the recipe to begin with (default: demo)")
    parser.add_argument("--list", action="store_true", help="the recipes that ship, one line each")
    add_json(parser)
    parser.set_defaults(run=new)


def new(args: argparse.Namespace) -> int:
    if args.list == bool(args.file) or (args.list and args.like):
        raise ConfigError("give a file to write, `isthmus new mine.toml [--like NAME]`, or --list alone")
    return list_shipped(args.json) if args.list else write(args.file, args.like or "demo", args.json)


def list_shipped(as_json: bool) -> int:
    found = {name: first_sentence(shipped_text(name)) for name in shipped_names()}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {sentence}" for name, sentence in found.items()))
    return 0


def write(file: Path, like: str, as_json: bool) -> int:
    if file.suffix != ".toml":
        raise ConfigError(f"{file}: a recipe's name ends in .toml, as in {file.stem or 'mine'}.toml")
    text = commented(like, file)
    try:
        write_new(file, text)
    except FileExistsError:
        raise ConfigError(f"{file} exists, and is left as it is; give another name") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; give another place") from None
    if as_json:
        print(json.dumps({"recipe": str(file), "like": like}))
    else:
        print(f"Recipe: {file}, like {like}. What people change first is explained in it.")
        print(f"Next: isthmus plan {shlex.quote(str(file))}, then simulate or train")
    return 0


def commented(like: str, file: Path) -> str:
    """Return the recipe `like`, named after its new file, with every key of `FIRST` written out."""
    source, name = shipped_text(like), file.stem
    recipe = parse_recipe(source, [f"name={json.dumps(name)}"])  # refuses an invalid name
    body = re.sub(r"^name = .*$", lambda _: toml_line("name", name), source, count=1, flags=re.MULTILINE)
    tables = re.split(r"\n(?=\[)", body.rstrip("\n"))
    parts = [_explained(part, recipe) for part in tables]
    fleet = next(i for i, part in enumerate(parts) if part.startswith("[[replicas]]"))
    parts[fleet] = f"{_comment(FLEET)}\n{parts[fleet]}"
    return HEAD.format(name=name, like=like, file=file.name) + "\n".join(parts) + "\n"


def _explained(part: str, recipe: Recipe) -> str:
    """Return one table of a recipe, with a comment above each key that people change first."""
    table = part.partition("]")[0].strip("[")
    lines, after = part.rstrip("\n").split("\n"), "\n" * (len(part) - len(part.rstrip("\n")))
    for first, words in FIRST.items():
        where, key = first.split(".")
        if where != table:
            continue
        at = next((i for i, line in enumerate(lines) if line.startswith(f"{key} = ")), None)
        if at is None:
            at = len(lines)
            lines.append(toml_line(key, getattr(getattr(recipe, table), key)))
        lines.insert(at, _comment(words))
    return "\n".join(lines) + after


def _comment(words: str) -> str:
    return textwrap.fill(words, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
