"""A folder as a store: objects are regular files, read and written below one folder.

Others with access to the folder may put a pipe, a link or a folder where an object belongs. None of these is
an object: reads refuse them at once, and listings leave them out. Links to files are not followed.
"""

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.files import sync_folder
from isthmus.reading import read_bytes, stat_regular
from isthmus.store.requests import Info
from isthmus.store.retry import StoreRefused

STALE_SECONDS = 3600.0  # the writer of a temporary file this old is dead
_TEMPORARY = re.compile(r"#\d+$")  # keys never end like this


class FolderAway(OSError):
    """The folder of a store that we have used is not there: its disk was unmounted, or it was moved away."""


class FolderRequests:
    """One try of each request to a folder's files. The last two arguments are for object stores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used = False  # whether it has held an object of ours

    def get(self, key: str, max_bytes: int, client: Any, allow: Any) -> tuple[bytes, Info]:
        info = self._stat(key)  # first: no object may look newer than its bytes
        if info.size > max_bytes:
            raise StoreRefused(
                f"{self.folder}: {key} holds {info.size} bytes; at most {max_bytes} are accepted"
            )
        try:
            return read_bytes(self.folder / key, max_bytes, follow=False), info
        except ConfigError as error:
            raise _fault(error, key) from None

    def put(self, key: str, data: bytes, create: bool, durable: bool, client: Any, allow: Any) -> None:
        self._check_there()  # or the objects would go below the mount point
        write_file(self.folder, key, data, create=create, sync=durable)
        self.used = True

    def head(self, key: str, client: Any, allow: Any) -> Info | None:
        with suppress(StoreRefused):  # a folder or a pipe is not an object
            return self._stat(key)

    def scan(self, prefix: str | None, most: int, client: Any, allow: Any) -> dict[str, Info]:
        """At most `most` + 1 objects. Skips unreadable folders, and files that vanish meanwhile."""
        found: dict[str, Info] = {}
        cut = len(os.path.join(self.folder, ""))
        for path in islice(_files(self.folder / prefix if prefix else self.folder), most + 1):
            with suppress(OSError):
                found[path[cut:]] = _info(os.lstat(path))
        if not found:
            self._check_there()
        return found

    def _stat(self, key: str) -> Info:
        try:
            info = _info(stat_regular(self.folder / key, follow=False))
        except FileNotFoundError:
            self._check_there()
            raise
        except ConfigError as error:
            raise _fault(error, key) from None
        self.used = True
        return info

    def _check_there(self) -> None:
        """Raise a fault that passes if the folder is missing or empty although it has held objects."""
        if not self.used:
            return
        with suppress(OSError), os.scandir(self.folder) as entries:
            if next(entries, None):
                return
        raise FolderAway(errno.ESTALE, "the folder is missing or empty; is its disk mounted?")


def _info(stat: os.stat_result) -> Info:
    return Info(stat.st_size, stat.st_mtime, f"{stat.st_ino}-{stat.st_mtime_ns}")


def _fault(error: ConfigError, key: str) -> Exception:
    """Return the system's own error if there was one, since some pass; else StoreRefused."""
    if isinstance(error.__context__, OSError) and error.__context__.errno != errno.ELOOP:
        return error.__context__
    return StoreRefused(f"{key} is not an object: {error}")


def _files(top: Path) -> Iterator[str]:
    folders = [str(top)]  # text: a million Path objects take ten times as long
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and not _TEMPORARY.search(entry.name):
                    yield entry.path


def write_file(root: Path, key: str, data: bytes, *, create: bool, sync: bool, keep: bool = True) -> None:
    """Write below `root`: to a temporary file, then rename it or (to create) link it, which has one winner.

    Not with obstore, which names a file before its bytes are on the disk: after a power cut an empty manifest
    could hold its key for ever. Nor with `isthmus.files`, whose temporary names would be listed.
    """
    path = root / key
    try:
        inside = path.parent.resolve().is_relative_to(root.resolve())
    except RuntimeError:  # a loop of links
        inside = False
    if not inside:
        raise StoreRefused(f"{key} leads out of {root} by a symbolic link")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreRefused(f"{key} cannot be written below an object") from None
    aside = path.with_name(f"{path.name}#{os.getpid()}{secrets.randbits(48)}")
    handle = _open_new(aside)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(handle)
        try:
            if create:
                os.link(aside, path)
            elif keep:
                os.replace(aside, path)
        except OSError as error:
            if create and error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                words = "its file system has no hard links, which put-if-absent needs"
                raise ConfigError(f"{path.parent} cannot be a store: {words}") from None
            raise
        finally:
            # Even if the name exists: its writer may have died before this. Every parent too, since another
            # process may have made them; syncing an unchanged folder costs nothing.
            for above in path.parents if sync else ():
                if above.is_relative_to(root):
                    sync_folder(above)
    finally:
        aside.unlink(missing_ok=True)


def _open_new(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:  # somebody removed the folder while it was empty
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def remove_empty(root: Path, prefix: str) -> None:
    """Remove a folder without objects; leave one that is in use."""
    with suppress(OSError):
        os.rmdir(root / prefix)


def remove_stale(folder: Path) -> None:
    """Remove the temporary files of killed writers."""
    for base, _, names in os.walk(folder):
        for path in (Path(base, name) for name in names if _TEMPORARY.search(name)):
            with suppress(OSError):  # its writer removed it first
                if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                    path.unlink()
