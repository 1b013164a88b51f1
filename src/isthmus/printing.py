"""What is printed: text from outside stays text and is never an instruction to the terminal.

A run's name, a recipe's key, a reason or a file's name may hold escape sequences that recolour, retitle or
overwrite a terminal, or U+202E, which shows a line backwards. They are shown as what they are, `\\x1b`.
The streams of every command and of every process of a fleet are `guarded`, so no print can forget it.
Standard library only.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


def visible(value: object) -> str:
    """One line without any character that moves, hides or reverses others: such a one is shown escaped.

    Not printable are control and format characters (bidi, zero width), surrogates, private and unassigned
    ones, separators of lines, and every blank that is not a space.
    """
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def visible_lines(value: object) -> str:
    """The same of a text of several lines: newlines stay."""
    return "\n".join(visible(line) for line in str(value).split("\n"))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Guarded:
    """A text stream on which nothing but visible characters and newlines is written."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        shown = visible_lines(text)
        if not shown.isascii():  # what the terminal's encoding lacks is shown escaped, too
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
    """The stream itself, for who writes colours of its own, or a text that somebody asked for as it is."""
    return stream.stream if isinstance(stream, Guarded) else stream


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """stdout and stderr are guarded while the block runs."""
    before = sys.stdout, sys.stderr
    guard_streams()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def guard_streams() -> None:
    """The same for the rest of the process. A process may have been started without either."""
    if sys.stdout is not None:
        sys.stdout = guarded(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = guarded(sys.stderr)
