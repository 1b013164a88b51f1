"""A question to the person at the terminal, before an address that a file names is followed."""

import argparse
import sys

from isthmus.errors import Elsewhere
from isthmus.printing import visible


def agreed(args: argparse.Namespace, found: Elsewhere) -> argparse.Namespace:
    """The same command with the address in place of the folder that names it, once a person has said yes.

    Without a terminal nobody can be asked, and the address must have been typed.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise found
    question = f"isthmus: {found.where} says that its bucket is {found.address}; read from there? [y/N] "
    print(visible(question), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise found
    return argparse.Namespace(**{name: _put(value, found) for name, value in vars(args).items()})


def _put(value: object, found: Elsewhere) -> object:
    if isinstance(value, list):
        return [_put(entry, found) for entry in value]
    return found.address if value == found.where else value
