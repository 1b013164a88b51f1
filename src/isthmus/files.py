"""Files that we write: replaced as a whole, made new, or our own opened again. Standard library only.

Somebody else may have put a link, a pipe or a second name of another file where we write. All that Isthmus
writes on a disk passes through here, so that nothing outside the folder is touched.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import ConfigError

NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: to open a pipe would wait for its reader.
KNOWN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def replacing_by_name(path: Path, mode: int = 0o666, sync: bool = True) -> Iterator[Path]:
    """A new empty file beside `path`, which takes its place when the block ends without an exception.

    For libraries that open files by their names. O_EXCL refuses whatever lies under the temporary name
    already, a planted link too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | NEW, mode))
    try:
        yield temporary
        if sync:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
    """The same as an open file to write into."""
    with replacing_by_name(path, mode, sync) as temporary, open(temporary, "wb") as file:
        yield file


def replace_file(path: Path, data: bytes | str, mode: int = 0o666, sync: bool = True) -> None:
    """Write the whole file or leave the old one: temporary name, fsync, rename, fsync of the folder."""
    with replacing(path, mode, sync) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def create_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file, to write and read; FileExistsError where anything has this name, a planted link too."""
    return open(os.open(path, os.O_RDWR | NEW, mode), "w+b")


def open_own(path: Path, *, create: bool = True, append: bool = False, mode: int = 0o666) -> BinaryIO:
    """A file under a known name, to write and read: the one we left there, or a new one.

    ConfigError where the name leads elsewhere: by a symbolic link, as a second name of another file, or to
    what is not a file.
    """
    flags = KNOWN | (os.O_CREAT if create else 0) | (os.O_APPEND if append else 0)
    _refuse_other(path)  # before it is opened: to open a device may do something
    handle = os.open(path, flags, mode)
    try:
        _refuse_other(path, os.fstat(handle))  # and after it: it may have been replaced
        return open(handle, "a+b" if append else "r+b")
    except BaseException:
        os.close(handle)
        raise


def own_size(path: Path) -> int | None:
    """Bytes of a file that `open_own` would open; None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else None


def overwrite_own(path: Path, data: str = "") -> None:
    """A short note in place, without a temporary name: for what is written often and worth little."""
    with open_own(path) as file:
        file.truncate()
        file.write(data.encode(errors="replace"))


def own_folder(path: Path) -> None:
    """Make the folder where it is missing; ConfigError where its name leads elsewhere."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link; Isthmus does not write through it: remove it")


def remove_folder(path: Path) -> None:
    """Delete a folder of ours, if it is there; of a link only the link."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _refuse_other(path: Path, found: os.stat_result | None = None) -> None:
    if found is None:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
    if stat.S_ISLNK(found.st_mode):
        what = "a symbolic link"
    elif not stat.S_ISREG(found.st_mode):
        what = "not a file"
    elif found.st_nlink > 1:
        what = f"one of {found.st_nlink} names of a file (hard links)"
    else:
        return
    raise ConfigError(f"{path} is {what}; Isthmus writes only files of its own: remove it")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable. Not every file system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
