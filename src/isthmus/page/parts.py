"""The page's own files, and how it shows text from a run."""

from importlib.resources import files

from isthmus.printing import visible

MOST_CHARACTERS = 300

# Joined in this order into one script and one style sheet: definitions precede their immediate uses.
SCRIPTS = ("base", "words", "contents", "chart", "fleet", "rounds", "bytes", "plan", "page")
STYLES = ("page", "words")


def html() -> str:
    return _read("page.html")


def script() -> str:
    return "\n".join(_read(f"script/{name}.js") for name in SCRIPTS)


def style() -> str:
    return "\n".join(_read(f"style/{name}.css") for name in STYLES)


def icon() -> str:
    return _read("icon.svg")


def _read(name: str) -> str:
    return (files("isthmus.page") / name).read_text(encoding="utf-8")


def text(value: object, most: int = MOST_CHARACTERS) -> str:
    """Return one short printable line. Markup stays literal and is only ever shown as text."""
    shown = visible(" ".join(str(value)[: 2 * most].split()))
    return shown if len(shown) <= most else shown[: most - 1] + "…"
