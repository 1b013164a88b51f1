"""The folder of a corpus being made: its lock, its journal, and its removal."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from isthmus.data.documents import START, Position
from isthmus.data.manifest import (
    JOURNAL,
    MANIFEST,
    TOKENIZER,
    Manifest,
    parse_fields,
    read_manifest,
)
from isthmus.data.shards import ShardState
from isthmus.errors import ConfigError
from isthmus.files import replace_file

WHOLE = "|".join(map(re.escape, (MANIFEST, TOKENIZER, JOURNAL)))
OURS = re.compile(rf"{WHOLE}|(train|validation)-\d{{5,}}\.bin(\.partial)?")
# Temporary files that a killed process leaves.
TEMPORARY = re.compile(rf"\.({WHOLE})\.\d+\.[0-9a-f]+\.tmp")


@dataclass(frozen=True, slots=True)
class Journal:
    """progress.json: how far a preparation got, for the process that continues it."""

    fingerprint: str
    position: Position = START
    train: ShardState | None = None
    validation: ShardState | None = None

    def write(self, folder: Path) -> None:
        replace_file(folder / JOURNAL, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Journal | None":
        try:
            fields = parse_fields((folder / JOURNAL).read_bytes(), str(folder / JOURNAL))
            return msgspec.convert(fields, cls)
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.ValidationError):
            raise ConfigError(f"{folder / JOURNAL} is damaged; start again with --overwrite") from None


def fingerprint_in(folder: Path) -> str | None:
    """Return the fingerprint of the corpus in the folder, whole or unfinished."""
    if (folder / MANIFEST).exists():
        return read_manifest(folder).fingerprint
    journal = Journal.read(folder)
    return journal.fingerprint if journal else None


def finished(folder: Path, fingerprint: str, overwrite: bool) -> Manifest | None:
    """Return the corpus if the same arguments made it; ConfigError if the folder holds something else."""
    if overwrite and is_ours(folder):
        return None
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest.fingerprint != fingerprint:
            raise ConfigError(
                f"{folder} holds a corpus of other inputs or options; choose another folder or --overwrite"
            )
        return manifest
    if (journal := Journal.read(folder)) is not None:
        if journal.fingerprint != fingerprint:
            raise ConfigError(
                f"{folder} holds an unfinished corpus with other inputs or options; "
                "repeat those, choose another folder, or --overwrite"
            )
        return None
    # The journal is always written first, so a folder with files and no journal belongs to someone else.
    if foreign := next(folder.iterdir(), None):
        raise ConfigError(f"{folder} is not empty and not a corpus ({foreign.name}); choose a new one")
    return None


def is_ours(folder: Path) -> bool:
    """Return whether the folder holds a corpus, whole or unfinished; ConfigError if it holds more."""
    names = [path.name for path in folder.iterdir()]
    foreign = [name for name in names if not OURS.fullmatch(name)]
    if foreign:
        raise ConfigError(f"{folder} also holds {foreign[0]}; --overwrite only replaces a corpus")
    return bool(names)


def clear(folder: Path, keep: tuple[str, ...] = ()) -> None:
    """Remove a corpus's files. The manifest is first, so that the rest never passes for a corpus."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
        if OURS.fullmatch(path.name) and path.name not in keep:
            path.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if it is missing and lock it for this process; remove it if it stays empty."""
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
        for path in folder.iterdir():
            if TEMPORARY.fullmatch(path.name):
                path.unlink()
        yield
    finally:
        os.close(descriptor)
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(
            f"another process is preparing {folder}; wait for it, or end it and run this again"
        ) from None
