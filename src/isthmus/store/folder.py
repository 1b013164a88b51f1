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

from isthmus.errors import ConfigError
from isthmus.files import sync_folder
from isthmus.reading import read_bytes, stat_regular
from isthmus.store.retry import StoreRefused

STALE_SECONDS = 3600.0  # the writer of a temporary file this old is dead
_TEMPORARY = re.compile(r"#\d+$")  # keys never end like this


def read_file(root: Path, key: str, max_bytes: int) -> bytes:
    """Read an object; StoreRefused if it is not one or is too large. Disk faults are OSErrors."""
    size = stat_file(root, key).st_size
    if size > max_bytes:
        raise StoreRefused(f"{root}: {key} holds {size} bytes; at most {max_bytes} are accepted")
    try:
        return read_bytes(root / key, max_bytes, follow=False)
    except ConfigError as error:
        raise _fault(error, key) from None


def stat_file(root: Path, key: str) -> os.stat_result:
    try:
        return stat_regular(root / key, follow=False)
    except ConfigError as error:
        raise _fault(error, key) from None


def _fault(error: ConfigError, key: str) -> Exception:
    """Return the system's own error if there was one, since some pass; else StoreRefused."""
    if isinstance(error.__context__, OSError) and error.__context__.errno != errno.ELOOP:
        return error.__context__
    return StoreRefused(f"{key} is not an object: {error}")


def scan_files(root: Path, prefix: str | None, most: int) -> dict[str, os.stat_result]:
    """The stat result of each object below `prefix`; at most `most` + 1. Skips unreadable folders, and files
    that vanish meanwhile."""
    found: dict[str, os.stat_result] = {}
    cut = len(os.path.join(root, ""))
    for path in islice(_files(root / prefix if prefix else root), most + 1):
        with suppress(OSError):
            found[path[cut:]] = os.lstat(path)
    return found


def _files(top: Path) -> Iterator[str]:
    folders = [str(top)]  # text: a million Path objects take ten times as long
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and not _TEMPORARY.search(entry.name):
                    yield entry.path


def link(aside: Path, path: Path) -> None:
    """Give a file its second name, unless that exists."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            words = "its file system has no hard links, which put-if-absent needs"
            raise ConfigError(f"{path.parent} cannot be a store: {words}") from None
        raise


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
                link(aside, path)
            elif keep:
                os.replace(aside, path)
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
