"""The fingerprint of a text: one digest of tokenizer and tokens, computed from the files themselves.

A manifest only records what its files held when they were made. A replaced file of the same size opens like
the old one, so every file is read once before anything trains on it. This user's cache remembers its sha256
until the file's size, times or inode change.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from isthmus import reading
from isthmus.data.cache import cache_folder
from isthmus.data.corpus import BUILTIN, Corpus
from isthmus.data.manifest import MAX_JSON_BYTES, TOKENIZER, text_digest
from isthmus.data.progress import Progress, on_stderr
from isthmus.errors import ConfigError
from isthmus.files import replace_file
from isthmus.store.url import is_url

BLOCK_BYTES = 1 << 22
LONG_BYTES = 1 << 30  # reading more shows progress

Known = dict[str, tuple[list[int], str]]  # name -> its `_identity` when it was read, and its sha256


def check_text(corpus: Corpus, spec: str, stated: str = "") -> None:
    """Raise ConfigError unless the text has the fingerprint that its run states, or else its own manifest.
    `spec` names it in the recipe or on the command line."""
    if corpus.name == BUILTIN and corpus.sha256 == (stated or corpus.sha256):
        return  # its tokens exist only in memory
    found, wanted = fingerprint(corpus), stated or corpus.sha256
    if found == wanted:
        return
    if found == corpus.sha256:
        raise ConfigError(
            f"the corpus {spec} here is not the one this run began with: its fingerprint is {found}, and the "
            f"run's is {wanted}; copy that one here, or prepare it again from the same files with the same "
            "options"
        )
    cure = (
        f"remove {corpus.folder}, and it is fetched again"
        if is_url(spec)
        else "copy the whole corpus again, or prepare it again from the same files with the same options"
    )
    raise ConfigError(
        f"the files of the corpus {spec} were changed after it was made: their fingerprint is {found}, and "
        f"that of {'the run' if stated else 'its manifest'} is {wanted}; {cure}"
    )


def fingerprint(corpus: Corpus) -> str:
    """Compute from the files what `Corpus.sha256` should be."""
    if corpus.name == BUILTIN:
        return corpus.sha256
    for name in ("train", "validation"):
        corpus.split(name)  # fetches it if the corpus is at a URL
    return text_digest(
        _digests(corpus.folder, [TOKENIZER, *(shard.name for shard in corpus.manifest.shards)])
    )


def _digests(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the sha256 of these files, reading only new and changed ones."""
    folder = folder.resolve()
    there = {name: _identity(reading.stat_regular(folder / name, follow=False)) for name in names}
    known = _remembered(folder)
    stale = [name for name, identity in there.items() if name not in known or known[name][0] != identity]
    if stale:
        total, done = sum(there[name][0] for name in stale), 0
        progress = on_stderr() if total > LONG_BYTES else Progress()
        progress.phase(f"reading {folder} once, to compare its text with the run's", total)
        try:
            for name in stale:
                known[name] = _read(folder / name, progress, done)
                done += there[name][0]
        finally:
            progress.close()
        _remember(folder, {name: known[name] for name in there})
    return [known[name][1] for name in there]


def _read(path: Path, progress: Progress, done: int) -> tuple[list[int], str]:
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
    with reading.open_regular(path, follow=False) as file:
        identity = _identity(os.fstat(file.fileno()))
        while size := file.readinto(block):
            digest.update(block[:size])
            done += size
            progress.update(done, path.name)
    return identity, digest.hexdigest()


def _identity(found: os.stat_result) -> list[int]:
    """What changes when a file is written or replaced. Users can set its mtime, but not its ctime."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


# The cache has one small file per folder. Without it everything works, only slower.


def _note(folder: Path) -> Path:
    return cache_folder("texts") / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()}.json"


def _remembered(folder: Path) -> Known:
    try:
        note = _note(folder)
        fields = reading.parse_json(reading.read_bytes(note, MAX_JSON_BYTES, follow=False), str(note))
        return {name: (list(identity), str(digest)) for name, (identity, digest) in fields.items()}
    except (OSError, ConfigError, ValueError, TypeError, AttributeError):
        return {}


def _remember(folder: Path, known: Known) -> None:
    with contextlib.suppress(OSError, ConfigError):
        replace_file(_note(folder), json.dumps(known), sync=False)
