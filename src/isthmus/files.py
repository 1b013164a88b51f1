"""Write files: replace them whole, create new ones, or reopen our own. Standard library only."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NEW = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, sync: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file next to `path` that replaces it if the block ends without an exception."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with create_file(temporary, mode) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


def replace_file(path: Path, data: bytes | str, mode: int = 0o666, sync: bool = True) -> None:
    """Write the whole file or leave the old one: temporary name, fsync, rename, fsync of the folder."""
    with replacing(path, mode, sync) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def create_file(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file to write and read; FileExistsError if the name is taken."""
    return open(os.open(path, os.O_RDWR | NEW, mode), "w+b")


def write_new(path: Path, text: str) -> None:
    """Write a whole new file, or leave none; FileExistsError if the name is taken."""
    with create_file(path) as file:
        try:
            file.write(text.encode())
            file.flush()
        except OSError:
            path.unlink()
            raise


def open_own(path: Path, *, create: bool = True, append: bool = False, mode: int = 0o666) -> BinaryIO:
    """Open a file under a known name to write and read: the one we left there, or a new one."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0) | (os.O_APPEND if append else 0)
    return open(os.open(path, flags, mode), "a+b" if append else "r+b")


def own_size(path: Path) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    return path.stat().st_size if path.is_file() else None


def overwrite_own(path: Path, data: str = "") -> None:
    """Overwrite a short note in place, without a temporary name: for frequent writes of little worth."""
    with open_own(path) as file:
        file.truncate()
        file.write(data.encode(errors="replace"))


def remove_folder(path: Path) -> None:
    """Delete a folder of ours if it exists; if it is a link, delete only the link."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable. Not every file system can open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
