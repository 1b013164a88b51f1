"""Fetch a corpus from a URL into this user's cache, as far as needed, and trust it only by its hash.

manifest.json  its sha256 names the folder of the cache; a run fixes it, and then nothing else is taken
    other files    checked in memory by the sha256 in the manifest, and only then written, under their names

So a file with its final name in the cache is whole, and a killed fetch continues with the missing files.
"""

import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from isthmus import reading
from isthmus.data.cache import cache_folder, made_folder
from isthmus.data.manifest import MANIFEST, MAX_JSON_BYTES, TOKENIZER, Manifest, parse_manifest
from isthmus.data.progress import Progress, on_stderr
from isthmus.data.tokenizer import MAX_TOKENIZER_BYTES
from isthmus.disk import in_words as size
from isthmus.errors import ConfigError
from isthmus.files import open_own, own_size, replace_file
from isthmus.store import Store, StoreError, StoreRefused, open_store, parse_url
from isthmus.store.together import as_they_come

PUSHING = "pushing.json"  # in the bucket while a corpus is being uploaded
MOST_FILE_BYTES = 1 << 30  # of a shard: memory holds it until its hash is checked
AT_ONCE = 4
MEMORY_BYTES = 256 << 20  # of all files in transfer
ROOM_BYTES = 64 << 20  # disk space to leave free


@dataclass(frozen=True, slots=True)
class Copy:
    """This machine's copy of a corpus at a URL, whole or in parts."""

    url: str
    folder: Path
    manifest: Manifest

    @classmethod
    def of(cls, url: str, manifest_sha256: str = "") -> "Copy":
        """Fetch manifest and tokenizer. Without a hash, accept whatever corpus is at the URL now."""
        url, _ = parse_url(url)
        cache = cache_folder()
        data = _cached_manifest(cache / manifest_sha256) if manifest_sha256 else None
        if data is None:
            with in_words(url):
                data = _fetched_manifest(url, manifest_sha256)
        manifest = parse_manifest(data, f"{MANIFEST} of {url}")
        for shard in manifest.shards:
            if manifest.shard_bytes(shard) > MOST_FILE_BYTES:
                raise ConfigError(
                    f"{url}: {shard.name} has {manifest.shard_bytes(shard):,} bytes; at most "
                    f"{MOST_FILE_BYTES:,} are fetched: prepare it with fewer --shard-tokens"
                )
        copy = cls(url, made_folder(cache / manifest.digest), manifest)
        if _cached_manifest(copy.folder) != data:
            with copy._locked():
                replace_file(copy.folder / MANIFEST, data)
        if own_size(copy.folder / TOKENIZER) is None:
            with copy._locked(), in_words(url):
                copy._take(_opened(url), TOKENIZER, MAX_TOKENIZER_BYTES, manifest.tokenizer_sha256)
        return copy

    def fetch(self, split: str, progress: Progress | None = None) -> None:
        """Fetch the missing shards of a split."""
        if not self._missing(split):
            return
        with self._locked():
            missing = self._missing(split)  # another process may have fetched them meanwhile
            if not missing:
                return
            self._check_room(sum(missing.values()))
            progress = progress or on_stderr()
            try:
                self._fetch(missing, split, progress)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    "interrupted; what was fetched is kept, and the same command continues"
                ) from None
            finally:
                progress.close()

    def _missing(self, split: str) -> dict[str, int]:
        """Map missing shards to their sizes. A shard of a different size counts as missing."""
        shards = {
            shard.name: self.manifest.shard_bytes(shard) for shard in getattr(self.manifest, split).shards
        }
        return {name: size for name, size in shards.items() if own_size(self.folder / name) != size}

    def _fetch(self, missing: dict[str, int], split: str, progress: Progress) -> None:
        digests = {shard.name: shard.sha256 for shard in self.manifest.shards}
        total, done = sum(missing.values()), 0
        progress.phase(f"fetching the {split} part of {self.url}", total)
        at_once = max(1, min(AT_ONCE, MEMORY_BYTES // max(missing.values())))
        with in_words(self.url):
            store = _opened(self.url)
            calls = [(n, partial(self._take, store, n, size, digests[n])) for n, size in missing.items()]
            for name, _ in as_they_come(calls, at_once):
                done += missing[name]
                progress.update(done, f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    def _take(self, store: Store, name: str, most: int, sha256: str) -> None:
        """Fetch one file, and check it before writing it to the disk."""
        try:
            data = store.get(name, max_bytes=most)
        except StoreRefused:
            data = b""
        if data is None:
            raise ConfigError(f"{self.url} has no {name}; push the corpus again, to another URL")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ConfigError(
                f"{self.url}: {name} is not what its manifest says (sha256): it was changed or damaged; "
                "push the corpus again, to another URL"
            )
        replace_file(self.folder / name, data)

    def _check_room(self, wanted: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < wanted + ROOM_BYTES:
            raise ConfigError(
                f"the corpus {self.url} needs {size(wanted)} more in {self.folder.parent}, with "
                f"{size(ROOM_BYTES)} beside it, and {size(free)} are free; make room, or set "
                "ISTHMUS_CACHE to a folder on another disk"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process fetch while others wait."""
        with open_own(self.folder / ".lock", mode=0o600) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for path in self.folder.glob(".*.tmp"):  # left by a killed process
                path.unlink(missing_ok=True)
            yield


def has_copy(manifest_sha256: str) -> bool:
    """Return whether all of that corpus is here."""
    folder = cache_folder() / manifest_sha256
    data = _cached_manifest(folder) if manifest_sha256 else None
    if data is None or own_size(folder / TOKENIZER) is None:
        return False
    copy = Copy("", folder, parse_manifest(data, str(folder / MANIFEST)))
    return not copy._missing("train") and not copy._missing("validation")


@contextmanager
def in_words(url: str) -> Iterator[None]:
    """Turn the store's faults into one line for whoever named the URL."""
    try:
        yield
    except StoreError as error:
        raise error.at_start() from None
    except StoreRefused as reason:
        raise ConfigError(f"{url} is no corpus: {reason}") from None


def _opened(url: str) -> Store:
    _, folder = parse_url(url)
    if folder and not folder.is_dir():
        raise ConfigError(f"there is no corpus at {url}: no such folder on this machine")
    return open_store(url, create=False)


def _cached_manifest(folder: Path) -> bytes | None:
    try:
        data = reading.read_bytes(folder / MANIFEST, MAX_JSON_BYTES, follow=False)
    except (FileNotFoundError, ConfigError):
        return None
    return data if hashlib.sha256(data).hexdigest() == folder.name else None


def _fetched_manifest(url: str, wanted: str) -> bytes:
    store = _opened(url)
    data = store.get(MANIFEST, max_bytes=MAX_JSON_BYTES)
    if data is None and store.head(PUSHING):
        raise ConfigError(f"the corpus at {url} is not all there yet; type its `isthmus data push` again")
    if data is None:
        raise ConfigError(f"there is no corpus at {url}; upload one by `isthmus data push DIR {url}`")
    found = hashlib.sha256(data).hexdigest()
    if wanted and found != wanted:
        raise ConfigError(
            f"the corpus at {url} is not the one of this run: its manifest has the sha256 {found[:12]}..., "
            f"and the run began with {wanted[:12]}...; ask the run's owner for that one"
        )
    return data
