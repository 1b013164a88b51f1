"""How much text is read at once, and the words for a document that cannot be read.

A file of 1 kB can state gigabytes; an honest document is far smaller.
"""

from collections.abc import Sequence

from isthmus.errors import ConfigError

MAX_DOCUMENT_BYTES = 64 << 20  # of UTF-8
MAX_LINE_BYTES = 80 << 20  # of JSON: escapes make it longer than its text
MAX_LINE_VALUES = 1_000_000  # of one line of JSON, outside its texts
# .gz and .zst: text shrinks 3 to 20 times, logs 100 times. The first megabytes may be anything.
MAX_EXPANSION = 250
FREE_BYTES = 64 << 20


class BadFile(ConfigError):
    """A fault in what a file holds: every reading finds it again, in the same place."""


class BadFiles(ConfigError):
    """Several files that cannot be used: `reasons` has a line for each, with its cure."""

    def __init__(self, reasons: Sequence[str], summary: str) -> None:
        super().__init__(summary)
        self.reasons = reasons


class NeedsPackage(ConfigError):
    """The file may be good: what reads it is not installed."""


def check_document(text: str, where: str) -> None:
    size = (
        len(text) if len(text) > MAX_DOCUMENT_BYTES or text.isascii() else len(text.encode(errors="replace"))
    )
    if size > MAX_DOCUMENT_BYTES:
        raise BadFile(
            f"{where}: a text of {size:,} bytes; a document has at most {MAX_DOCUMENT_BYTES:,}: cut it"
        )


def missing_field(where: str, field: str, fields: list[str]) -> str:
    there = ", ".join(map(str, fields[:8])) or "none"
    return f"{where}: no field {field!r} (it has: {there:.400}); name the one with the text by --text-field"
