"""Find recipes: those that ship with the package, by name, and files."""

import re
from importlib.resources import files
from pathlib import Path

from isthmus.config.checks import nearest, short
from isthmus.errors import ConfigError
from isthmus.reading import DOCUMENT_BYTES, read_text

FOLDER = files("isthmus") / "recipes"
SUFFIX = ".toml"


def shipped_names() -> list[str]:
    """Return the names by size, with the demo first, as a reader wants them listed."""
    names = [entry.name.removesuffix(SUFFIX) for entry in FOLDER.iterdir() if entry.name.endswith(SUFFIX)]
    return sorted(names, key=lambda name: (int((re.match(r"\d+", name) or "0")[0]), name))


def shipped_text(name: str) -> str:
    if name not in shipped_names():
        raise ConfigError(f'there is no recipe "{short(name)}"{_which(name)}')
    return (FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8")


def first_sentence(text: str) -> str:
    """Return the first sentence of the recipe's comment."""
    return text.split("\n", 1)[0].removeprefix("# ").split(". ")[0].rstrip(".")


def find_recipe(given: str | Path) -> str:
    """Return the text of a recipe: of a file if there is one, else of the shipped recipe of this name."""
    name = str(given)
    if name in shipped_names() and (Path(given).is_dir() or not Path(given).exists()):
        return shipped_text(name)
    try:
        return read_text(given, DOCUMENT_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read the recipe {given}: {error.strerror}{_which(name)}") from None
    except ConfigError as error:
        raise ConfigError(f"cannot read the recipe: {error}") from None


def _which(name: str) -> str:
    """Suggest near names, and list all. `recipes/demo.toml` counts as near to `demo`."""
    names = shipped_names()
    return f"{nearest(Path(name).stem, names) or '.'} By name there are {', '.join(names)}"
