"""A folder as a store: objects are regular files, read and written below one folder.

Whoever shares the folder may put a pipe, a link or a folder where an object belongs. Such a thing is no
object: reading it is refused at once, and a listing leaves it out. Links are not followed to a file.
"""

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.files import sync_folder
from isthmus.reading import read_bytes, stat_regular
from isthmus.store.retry import StoreRefused

STALE_SECONDS = 3600.0  # the writer of a temporary file this old is dead
_TEMPORARY = re.compile(r"#\d+$")  # no key ends so


def read_file(root: Path, key: str, max_bytes: int) -> bytes:
    """An object; StoreRefused where it is none or too large. Faults of the disk are OSErrors."""
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
    """The system's own error where there was one: some of them pass. Else it is no object of ours."""
    if isinstance(error.__context__, OSError) and error.__context__.errno != errno.ELOOP:
        return error.__context__
    return StoreRefused(f"{key} is not an object: {error}")


def list_files(root: Path, prefix: str | None) -> list[str]:
    """The keys of all objects below `prefix`. What cannot be looked into holds none."""
    cut = len(os.path.join(root, ""))
    return [path[cut:] for path in _files(root / prefix if prefix else root)]


def scan_files(root: Path, prefix: str | None) -> dict[str, os.stat_result]:
    """The same with what the system says of each. One that goes while it is looked at is left out."""
    found: dict[str, os.stat_result] = {}
    for key in list_files(root, prefix):
        with suppress(OSError):
            found[key] = os.lstat(root / key)
    return found


def _files(top: Path) -> Iterator[str]:
    folders = [str(top)]  # as text: a Path of each of a million entries takes ten times as long
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and not _TEMPORARY.search(entry.name):
                    yield entry.path


def link(aside: Path, path: Path) -> None:
    """Give a file its second name, unless that is taken."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            words = "its file system has no hard links, which put-if-absent needs"
            raise ConfigError(f"{path.parent} cannot be a store: {words}") from None
        raise


def write_file(root: Path, key: str, data: bytes, *, create: bool, sync: bool, keep: bool = True) -> None:
    """Write below `root`: aside, then under its name by rename or (to create) by link, which has one winner.

    Not by obstore, which gives a file its name before its bytes are on the disk: after a power cut an empty
    manifest could then hold its key for ever. Nor by `isthmus.files`, whose temporary names would be listed.
    """
    path = root / key
    try:
        inside = path.parent.resolve().is_relative_to(root.resolve())
    except RuntimeError:  # a loop
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
            # Also of a name that was taken: who gave it may have died before this. All the way up, since who
            # made the folders may be another; one that has not changed costs nothing.
            for above in path.parents if sync else ():
                if above.is_relative_to(root):
                    sync_folder(above)
    finally:
        aside.unlink(missing_ok=True)


def _open_new(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:  # somebody has removed the folder, which was empty until now
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)


def remove_empty(root: Path, prefix: str) -> None:
    """Remove a folder without objects; one that is in use stays."""
    with suppress(OSError):
        os.rmdir(root / prefix)


def remove_stale(folder: Path) -> None:
    """Remove temporary files that killed writers left."""
    for base, _, names in os.walk(folder):
        for path in (Path(base, name) for name in names if _TEMPORARY.search(name)):
            with suppress(OSError):  # its writer was faster
                if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                    path.unlink()
