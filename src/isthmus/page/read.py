"""Bounded reading of folders from a stranger: regular files, inside the folder, of a limited size.

A link that leads out of it, a pipe, a file without end or a recipe
of a billion replicas is refused in words, and never opened, followed or built.
"""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from isthmus.config import Recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.store.retry import StoreRefused
from isthmus.store.url import SEGMENT

DOCUMENT_BYTES = 1 << 20  # recipe.toml, about.json
METRICS_BYTES = 64 << 20  # of metrics.jsonl, its end: some 25,000 rounds
LINE_BYTES = 1 << 20
MOST_REPLICAS = 4096
MOST_STAGES = 256
MOST_LAYERS = 4096
MOST_MICRO_BATCHES = 4096


class Folder:
    """Files below one folder. A refusal is a StoreRefused whose text names the file, not its content."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def find(self, name: str) -> Path:
        """Where `name` really is; refused where that is outside."""
        try:
            real = (self.root / name).resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte
            raise StoreRefused(f"{name} cannot be resolved") from None
        if not real.is_relative_to(self.root):
            raise StoreRefused(f"{name} leads out of the folder by a symbolic link; it is not read")
        return real

    def stat(self, name: str) -> os.stat_result | None:
        """Of a regular file; None where there is none."""
        try:
            found = self.find(name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreRefused(f"{name} cannot be looked at: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise StoreRefused(f"{name} is not a regular file; it is not read")
        return found

    def read(self, name: str, most: int, *, start: int | None = None) -> bytes | None:
        """The whole file, or None; one that is larger is refused, or read from `start` on, `most` bytes."""
        if self.stat(name) is None:
            return None
        try:
            # Links are not followed any more, and a pipe in the file's place would not block.
            handle = os.open(self.find(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreRefused(f"{name} cannot be read: {error.strerror}") from None
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise StoreRefused(f"{name} is not a regular file; it is not read")
            if start is None and found.st_size > most:
                raise StoreRefused(f"{name} holds {found.st_size} bytes; at most {most} are read")
            file.seek(start or 0)
            try:
                return file.read(most)
            except OSError as error:
                raise StoreRefused(f"{name} cannot be read: {error.strerror}") from None


class FolderBucket:
    """A bucket in a folder, for a reader who neither writes nor follows a link out of it."""

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root)
        self.url = str(root)

    def get(self, key: str, *, max_bytes: int, deadline: float | None = None) -> bytes | None:
        return self.folder.read(_checked(key), max_bytes)

    def head(self, key: str, *, deadline: float | None = None) -> Any:
        from isthmus.store.objects import Info

        found = self.folder.stat(_checked(key))
        return found and Info(found.st_size, found.st_mtime)


def _checked(key: str) -> str:
    if len(key) > 700 or not all(SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise StoreRefused(f"{key[:80]!r} is not a key")
    return key


def bounded_recipe(text: str, source: str) -> Recipe:
    """The recipe, unless it describes something that no machine could draw or even list."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        table = {}  # parse_recipe says what is wrong
    replicas = [r for r in _list(table.get("replicas")) if isinstance(r, dict)]
    model, inner = (
        found if isinstance(found := table.get(name), dict) else {} for name in ("model", "inner")
    )
    limits = {
        "replicas": (sum(_whole(r.get("count", 1)) for r in replicas), MOST_REPLICAS),
        "stages": (max((_whole(r.get("stages", 1)) for r in replicas), default=1), MOST_STAGES),
        "processes": (max((_whole(r.get("processes", 1)) for r in replicas), default=1), MOST_STAGES),
        "layers": (_whole(model.get("layers", 1)), MOST_LAYERS),
        "micro-batches": (_whole(inner.get("micro_batches", 1)), MOST_MICRO_BATCHES),
    }
    for what, (number, most) in limits.items():
        if number > most:
            raise ConfigError(f"{source} states {number:.6g} {what}; `isthmus watch` shows at most {most}")
    try:
        recipe = parse_recipe(text, source=source)
        for replica in recipe.replicas:
            replica.ratio  # noqa: B018 - raises where "auto" was left in it
    except (RecursionError, OverflowError):
        raise ConfigError(f"{source} is not a recipe that can be read") from None
    return recipe


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def read_json(folder: Folder, name: str, most: int) -> Any:
    """A JSON document, or None where there is none; refused where it is not JSON."""
    data = folder.read(name, most)
    if data is None:
        return None
    try:
        return json.loads(data, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        raise StoreRefused(f"{name} is not JSON") from None


def read_lines(data: bytes, whole: bool) -> tuple[list[Any], int]:
    """(every line that is JSON, how many are not). What follows the last newline is still being written;
    where the file was not read from its start, what comes before the first one was cut."""
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    found, broken = [], 0
    for line in lines if whole else lines[1:]:
        if not line.strip():
            continue
        try:
            if len(line) > LINE_BYTES:
                raise ValueError
            found.append(json.loads(line, parse_constant=lambda _: None))
        except (ValueError, RecursionError):
            broken += 1
    return found, broken
