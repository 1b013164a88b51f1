"""What a document may hold: for every name a shape with bounds, checked once, where the document is read.

Bounds come before any conversion: JSON has integers of thousands of digits, and true is no number. Names that
a shape does not list are ignored, because a newer version may write more; a document's size is bounded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.protocol.trust import Refused

MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Text:
    """At most so many characters, as `pattern` says where there is one."""

    most: int
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Number:
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Many:
    """A list of values of one shape."""

    of: "Shape"
    most: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A list of so many values, each of its own shape."""

    of: "tuple[Shape, ...]"


@dataclass(frozen=True, slots=True)
class Table:
    """An object whose keys are names, all values of one shape."""

    of: "Shape"
    most: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Optional:
    """A field that older documents do not have."""

    of: "Shape"


@dataclass(frozen=True, slots=True)
class Anything:
    """An object that is checked elsewhere."""


Shape = Text | Whole | Number | Many | Row | Table | Optional | Anything | Mapping[str, Any]

NAME = Text(100, r"[\w-]+")  # of a replica: it becomes a part of keys and paths
HASH = Text(64, "[0-9a-f]{64}")
HASH_OR_NONE = Text(64, "([0-9a-f]{64})?")
SECONDS = Number(-MOST_SECONDS, MOST_SECONDS)  # two clocks may differ, so that a span comes out below zero


def check(value: Any, shape: Shape, where: str = "") -> None:
    """Refused, with the field's name and what it should hold, unless the value has the shape."""
    match shape:
        case Optional():
            check(value, shape.of, where)
        case Anything():
            _demand(isinstance(value, dict), where, "an object")
        case Text():
            _demand(_is_text(value, shape), where, f"a short text of the right form, {shape.most} at most")
        case Whole():
            whole = isinstance(value, int) and not isinstance(value, bool)
            _demand(whole and shape.least <= value <= shape.most, where, f"a whole number, {_span(shape)}")
        case Number():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            _demand(number and shape.least <= value <= shape.most, where, f"a number, {_span(shape)}")
        case Many() | Row():
            least, most = (shape.least, shape.most) if isinstance(shape, Many) else (len(shape.of),) * 2
            fits = isinstance(value, list) and least <= len(value) <= most
            _demand(fits, where, f"a list of {least if least == most else f'{least} to {most}'}")
            shapes: Sequence[Shape] = [shape.of] * len(value) if isinstance(shape, Many) else shape.of
            for i, (item, of) in enumerate(zip(value, shapes, strict=True)):
                check(item, of, f"{where}[{i}]")
        case Table():
            fits = isinstance(value, dict) and shape.least <= len(value) <= shape.most
            _demand(fits, where, f"an object of {shape.least} to {shape.most} names")
            for name, item in value.items():
                check(name, NAME, f"a name in {where}")
                check(item, shape.of, f"{where}.{name}")
        case _:
            _demand(isinstance(value, dict), where, "an object")
            for name, of in shape.items():
                if name in value:
                    check(value[name], of, f"{where}.{name}" if where else name)
                elif not isinstance(of, Optional):
                    raise Refused(f"{where}.{name} is missing" if where else f"{name} is missing")


def _is_text(value: Any, shape: Text) -> bool:
    if not isinstance(value, str) or len(value) > shape.most:
        return False
    return re.fullmatch(shape.pattern, value) is not None if shape.pattern else True


def _span(shape: Whole | Number) -> str:
    return f"{shape.least:g} to {shape.most:g}"


def _demand(fits: bool, where: str, right: str) -> None:
    if not fits:
        raise Refused(f"{where or 'it'} is not {right}")
