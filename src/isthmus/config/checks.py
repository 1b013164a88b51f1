"""Checks whose errors say what would be right. Standard library only."""

import difflib
from collections.abc import Sequence

from isthmus.errors import ConfigError


def choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        hint = nearest(value, known)
        raise ConfigError(f'{name} is "{short(value)}"; it is one of {", ".join(known)}{hint}')


def within(name: str, value: float, least: float, most: float) -> None:
    """Check a number of a recipe before anything of its size is made."""
    if not value >= least:  # also true for NaN
        raise ConfigError(f"{name} is {short(value)}; it must be at least {least}")
    if value > most:
        raise ConfigError(f"{name} is {short(value)}; it must be at most {most:,.15g}")


def above(name: str, value: float, bound: float, most: float) -> None:
    if not value > bound:
        raise ConfigError(f"{name} is {short(value)}; it must be a finite number above {bound}")
    within(name, value, bound, most)


def name_of(what: str, name: str, marks: str, most: int = 100) -> None:
    """Check a name that becomes a name of files, objects and processes."""
    if not name or len(name) > most or not all(c.isalnum() or c in marks for c in name):
        listed = [f'"{mark}"' for mark in marks]
        allowed = f"letters, digits, {', '.join(listed[:-1])} and {listed[-1]}"
        raise ConfigError(f'{what} "{short(name)}": use {allowed}, {most} characters at most')


def object_name(what: str, name: str) -> None:
    """Check a replica's name: it becomes a name of objects, and stores allow different characters."""
    if not name.isascii():
        allowed = 'a to z, A to Z, 0 to 9, "-" and "_"'
        raise ConfigError(f'{what} "{short(name)}" becomes a name in the bucket: use {allowed}')


def short(value: object, most: int = 60) -> str:
    """Shorten a value so that it fits into an error line."""
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print thousands of digits
        return "a number of more than 60 digits"
    if isinstance(value, dict | list):
        return "a list or a table"
    shown = str(value)
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def nearest(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean "keep"?`, or nothing if no word is near. Other digits mean another word."""
    for close in difflib.get_close_matches(word[:100], known, n=3, cutoff=0.5):
        typed, meant = ("".join(filter(str.isdigit, each)) for each in (word[:100], close))
        if not typed or not meant or difflib.SequenceMatcher(None, typed, meant).ratio() > 0.5:
            return f'; did you mean "{close}"?'
    return ""
