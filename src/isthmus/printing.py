"""What is printed: text from outside stays text and is never an instruction to the terminal.

A run's name, a recipe's key, a reason or a file's name may hold escape sequences that recolour, retitle or
overwrite a terminal, or U+202E, which shows a line backwards. They are shown as what they
are, `\\x1b`. Standard library only.
"""

import unicodedata

# Control, format (bidi, zero width), surrogate, private, unassigned; separators of lines and paragraphs.
UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def visible(value: object) -> str:
    """One line without any character that moves, hides or reverses another; such a one is shown escaped."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if " " <= c <= "~" or unicodedata.category(c) not in UNSEEN else _escaped(c) for c in text
    )


def visible_lines(value: object) -> str:
    """The same of text of ours that has several lines: newlines stay."""
    return "\n".join(visible(line) for line in str(value).split("\n"))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
