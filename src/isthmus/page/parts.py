"""The page's own files: as the server sends them, and as the report has them inside."""

from importlib.resources import files

# In this order they are one script and one style sheet: what a part uses at once stands before it.
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
