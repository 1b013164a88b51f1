"""The folder a corpus is made in: who may write there, what a killed run left, and how to leave nothing."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.data.manifest import JOURNAL, MANIFEST, TOKENIZER, Manifest, read_manifest, write_atomic
from isthmus.errors import ConfigError

OURS = re.compile(
    rf"((train|validation)-\d{{5,}}\.bin|{re.escape(MANIFEST)}|{re.escape(TOKENIZER)}|{re.escape(JOURNAL)})(\.partial)?"
)


def finished(folder: Path, fingerprint: str, overwrite: bool) -> Manifest | None:
    """The corpus that is already there, made by the same arguments; ConfigError where something else is."""
    if overwrite and is_ours(folder):
        return None
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest.fingerprint != fingerprint:
            raise ConfigError(
                f"{folder} holds a corpus of other inputs or options; choose another folder or --overwrite"
            )
        return manifest
    if (journal := read_journal(folder)) is not None:
        if journal["fingerprint"] != fingerprint:
            raise ConfigError(
                f"{folder} holds an unfinished corpus with other inputs or options; "
                "repeat those, choose another folder, or --overwrite"
            )
        return None
    # Before the journal nothing but its own temporary file is written; all else belongs to someone.
    foreign = [path.name for path in folder.iterdir() if not path.name.endswith(".partial")]
    if foreign:
        raise ConfigError(f"{folder} is not empty and not a corpus ({foreign[0]}); choose a new one")
    return None


def is_ours(folder: Path) -> bool:
    """A folder with nothing but the files of a corpus, whole or unfinished."""
    names = [path.name for path in folder.iterdir()]
    strangers = [name for name in names if not OURS.fullmatch(name)]
    if strangers:
        raise ConfigError(f"{folder} also holds {strangers[0]}; --overwrite replaces nothing but a corpus")
    return bool(names)


def read_journal(folder: Path) -> dict | None:
    try:
        return json.loads((folder / JOURNAL).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ConfigError(f"{folder / JOURNAL} is damaged; start again with --overwrite") from None


def write_journal(folder: Path, journal: dict) -> None:
    write_atomic(folder / JOURNAL, json.dumps(journal).encode())


def clear(folder: Path, keep: tuple[str, ...] = ()) -> None:
    """Remove the files of a corpus. The manifest goes first, so that what is left is never taken for one."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        if OURS.fullmatch(path.name) and path.name not in keep:
            path.unlink()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder if need be and hold it for one process; new folders that stay empty go again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except FileExistsError:
        raise ConfigError(f"{folder} is a file; --to must name a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


@contextmanager
def nothing_left_of_bad_input(folder: Path) -> Iterator[None]:
    """Bad input takes its shards with it; after a kill or a full disk the same command continues."""
    try:
        yield
    except ConfigError:
        clear(folder)
        raise


def lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system; two writers at once are then the user's affair
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(
            f"another process is preparing {folder}; wait for it, or end it and run this again"
        ) from None
