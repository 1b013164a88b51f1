"""Files replaced as a whole: a kill leaves the old one or the new one. Standard library only."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing_by_name(path: Path, mode: int = 0o666, sync: bool = True) -> Iterator[Path]:
    """A new empty file beside `path`, which takes its place when the block ends without an exception.

    For libraries that open files by their names. O_EXCL refuses whatever lies under the temporary name
    already, a planted link too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
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


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable. Not every file system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
