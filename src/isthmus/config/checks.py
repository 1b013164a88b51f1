"""Errors that say what would be right. Standard library only."""

import difflib
from collections.abc import Sequence

from isthmus.errors import ConfigError


def choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f'{name} is "{value}"; it is one of {", ".join(known)}{nearest(value, known)}')


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")


def above(name: str, value: float, bound: float) -> None:
    if not bound < value < float("inf"):
        raise ConfigError(f"{name} is {value}; it must be a finite number above {bound}")


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean "keep"?`, or nothing when no known word is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else ""
