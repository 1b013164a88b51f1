"""Disk space: what is free, what is needed, and the one-line error if it is too little. Standard library
only."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.errors import ConfigError, RunError

FULL = (errno.ENOSPC, errno.EDQUOT)
SPARE_BYTES = 1 << 20  # for what the count leaves out: notes, logs, the file system's own tables


class DiskFull(RunError):
    """The disk has no room for a write. Waiting does not help: somebody has to make room."""

    passes = False


def free_bytes(folder: Path) -> int | None:
    """Bytes that this process may still write below a folder, which need not exist yet; None if unknown."""
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def shortage(folder: Path, needed: int, what: str) -> str:
    """Return a one-line message if `what` does not fit on the disk, else an empty string."""
    free = free_bytes(folder)
    return "" if free is None or free >= needed + SPARE_BYTES else _line(folder, needed, what)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise ConfigError if there is too little room, before anything starts."""
    if words := shortage(folder, needed, what):
        raise ConfigError(words)


@contextmanager
def explain_disk_full(folder: Path, needed: int, what: str) -> Iterator[None]:
    """Turn a full disk into DiskFull, which names the folder, the free space and the needed space."""
    if words := shortage(folder, needed, what):
        raise DiskFull(words)
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(_line(folder, needed, what)) from None


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def full_line(error: OSError, folder: Path | None = None) -> str:
    """Return the line for a failed write whose size was not known in advance. `folder` is where it was
    probably made: the error of a write to an open file names no file."""
    folder = Path(os.fsdecode(error.filename)).parent if error.filename else folder or Path.cwd()
    return f"the disk of {folder} is full ({in_words(free_bytes(folder))} free); make room there"


def _line(folder: Path, needed: int, what: str) -> str:
    free, needs = in_words(free_bytes(folder)), in_words(needed + SPARE_BYTES)
    return f"the disk of {folder} has {free} free, and {what} needs {needs}; make room there"


def in_words(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "an unknown part"
    for name in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} B" if name == "B" else f"{num_bytes:.1f} {name}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
