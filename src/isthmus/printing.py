"""Printing: text from outside stays text and never controls the terminal.

A run's name, a recipe's key, a reason or a file name may hold escape sequences that recolour, retitle or
overwrite a terminal, or U+202E, which reverses a line. They are printed escaped, as `\\x1b`. The streams of
every command and every fleet process are `guarded`, so no print can forget it. Standard library only.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


def visible(value: object) -> str:
    """Return one line, with characters escaped that move, hide or reverse others.

    These are control and format characters (bidi, zero width), surrogates, private and unassigned code
    points, line separators, and every blank except the space.
    """
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def visible_lines(value: object) -> str:
    """Like `visible`, for a text of several lines: newlines stay."""
    return "\n".join(visible(line) for line in str(value).split("\n"))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Guarded:
    """A text stream that writes only visible characters and newlines."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        shown = visible_lines(text)
        if not shown.isascii():  # also escape what the terminal's encoding lacks
            encoding = getattr(self.stream, "encoding", None) or "utf-8"
            shown = shown.encode(encoding, "backslashreplace").decode(encoding)
        self.stream.write(shown)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guarded(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, Guarded) else cast(TextIO, Guarded(stream))


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream itself, to write our own colours or a text that the user wants unchanged."""
    return stream.stream if isinstance(stream, Guarded) else stream


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard stdout and stderr while the block runs."""
    before = sys.stdout, sys.stderr
    guard_streams()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def guard_streams() -> None:
    """Guard stdout and stderr for the rest of the process, which may have started without either."""
    if sys.stdout is not None:
        sys.stdout = guarded(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = guarded(sys.stderr)
