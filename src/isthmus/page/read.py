"""Bounded reading of folders from a stranger: regular files, inside the folder, of a limited size.

How a file is read is isthmus.reading's; here a link that leads out of the folder is not followed, and a
refusal is a StoreRefused, as a bucket's is: a page goes on without that file.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from isthmus.config import Recipe, stored_recipe
from isthmus.errors import ConfigError
from isthmus.reading import parse_json, read_bytes, stat_regular
from isthmus.store.retry import StoreRefused
from isthmus.store.url import SEGMENT

METRICS_BYTES = 64 << 20  # of metrics.jsonl, its end: some 25,000 rounds
LINE_BYTES = 1 << 20
MOST_LISTED = 1_000_000
T = TypeVar("T")


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
            return stat_regular(self.find(name), follow=False)
        except FileNotFoundError:
            return None
        except ConfigError as refusal:
            raise StoreRefused(self._named(refusal)) from None

    def read(self, name: str, most: int, *, start: int | None = None) -> bytes | None:
        """The whole file, or None; one that is larger is refused, or read from `start` on, `most` bytes."""
        try:
            return read_bytes(self.find(name), most, start=start, follow=False)
        except FileNotFoundError:
            return None
        except ConfigError as refusal:
            raise StoreRefused(self._named(refusal)) from None

    def _named(self, refusal: ConfigError) -> str:
        """The file by its name in the folder: where the folder is, the page need not say."""
        return str(refusal).replace(f"{self.root}{os.sep}", "")


class FolderBucket:
    """A bucket in a folder, for a reader who neither writes nor follows a link out of it."""

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root)
        self.url = str(root)

    def get(self, key: str, *, max_bytes: int, deadline: float | None = None) -> bytes | None:
        return self.folder.read(_checked(key), max_bytes)

    def get_dated(self, key: str, *, max_bytes: int, deadline: float | None = None) -> Any:
        info = self.head(key)  # first: nobody's object looks newer than it is
        data = self.get(key, max_bytes=max_bytes) if info else None
        return None if data is None else (data, info)

    def head(self, key: str, *, deadline: float | None = None) -> Any:
        from isthmus.store.objects import Info

        found = self.folder.stat(_checked(key))
        return found and Info(found.st_size, found.st_mtime)

    def scan(self, prefix: str = "", *, most: int | None = None, deadline: float | None = None) -> Any:
        """As a store's. A stranger may have filled the folder: no more is listed than `most`."""
        most = MOST_LISTED if most is None else most
        keys = list(islice(self._keys(self.folder.find(_checked(prefix.rstrip("/")))), most + 1))
        if len(keys) > most:
            raise StoreRefused(f"more than {most} files lie below {prefix}")
        found = {}
        for key in sorted(keys):
            with suppress(StoreRefused):
                found[key] = self.head(key)
        return {key: info for key, info in found.items() if info}

    def list(self, prefix: str = "", *, deadline: float | None = None) -> list[str]:
        return list(self.scan(prefix))

    def together(self, calls: Iterable[Callable[[], T]], at_once: int = 1) -> Any:
        return [call() for call in calls]

    def _keys(self, folder: Path) -> Iterator[str]:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._keys(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    yield Path(entry.path).relative_to(self.folder.root).as_posix()

    def foreign(self, read: Callable[[], T]) -> T:
        """As a store's: here every fault is already about one file."""
        return read()


def _checked(key: str) -> str:
    if len(key) > 700 or not all(SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise StoreRefused(f"{key[:80]!r} is not a key")
    return key


def resolved_recipe(text: str, source: str) -> Recipe:
    """The recipe of a run, in which everything that was "auto" has been picked."""
    recipe = stored_recipe(text, source)
    for replica in recipe.replicas:
        replica.ratio  # noqa: B018 - raises where "auto" was left in it
    return recipe


def read_json(folder: Folder, name: str, most: int) -> Any:
    """A JSON document, or None where there is none; refused where it is not JSON."""
    data = folder.read(name, most)
    try:
        return None if data is None else parse_json(data, name)
    except ConfigError as refusal:
        raise StoreRefused(str(refusal)) from None


class JsonLines:
    """Every line that is JSON, one after the other; `broken` counts those that are not.

    What follows the last newline is still being written; where the file was not read from its start
    (`whole`), what comes before the first one was cut.
    """

    def __init__(self, data: bytes, whole: bool) -> None:
        self.data, self.broken = data, 0
        self.at = 0 if whole else data.find(b"\n") + 1

    def __iter__(self) -> Iterator[Any]:
        while (end := self.data.find(b"\n", self.at)) >= 0:
            line, self.at = self.data[self.at : end], end + 1
            if not line.strip():
                continue
            try:
                if len(line) > LINE_BYTES:
                    raise ConfigError("a row is a short line")
                yield parse_json(line, "a line")
            except ConfigError:
                self.broken += 1
