"""A corpus at a URL: what is needed of it is fetched into this user's cache, and trusted by its hash only.

    manifest.json  its sha256 names the folder of the cache; a run fixes it, and then nothing else is taken
    other files    checked in memory by the sha256 in the manifest, and only then written, under their names

So a file that has its name in the cache is whole, and a fetch that was killed goes on with what is missing.
"""

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from isthmus import reading
from isthmus.data.manifest import MANIFEST, MAX_JSON_BYTES, TOKENIZER, Manifest, parse_manifest
from isthmus.data.progress import Progress, on_stderr
from isthmus.data.tokenizer_file import MAX_BYTES as MAX_TOKENIZER_BYTES
from isthmus.disk import in_words as size
from isthmus.errors import ConfigError
from isthmus.files import open_own, own_size, replace_file
from isthmus.store import Store, StoreError, StoreRefused, open_store, parse_url
from isthmus.store.together import as_they_come

PUSHING = "pushing.json"  # in the bucket, while a corpus is being uploaded
MOST_FILE_BYTES = 1 << 30  # of a shard: it is held in memory until its hash is known
AT_ONCE = 4
MEMORY_BYTES = 256 << 20  # of all files that are under way
ROOM_BYTES = 64 << 20  # that the disk keeps


@dataclass(frozen=True, slots=True)
class Copy:
    """This machine's copy of a corpus at a URL, whole or in parts."""

    url: str
    folder: Path
    manifest: Manifest

    @classmethod
    def of(cls, url: str, manifest_sha256: str = "") -> "Copy":
        """With manifest and tokenizer here. Without a hash, whatever corpus is at the URL now."""
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
        copy = cls(url, private_folder(cache / manifest.digest), manifest)
        if _cached_manifest(copy.folder) != data:
            with copy._locked():
                replace_file(copy.folder / MANIFEST, data)
        if own_size(copy.folder / TOKENIZER) is None:
            with copy._locked(), in_words(url):
                copy._take(_opened(url), TOKENIZER, MAX_TOKENIZER_BYTES, manifest.tokenizer_sha256)
        return copy

    def fetch(self, split: str, progress: Progress | None = None) -> None:
        """Bring the shards of a part that are not here yet."""
        if not self._missing(split):
            return
        with self._locked():
            missing = self._missing(split)  # another process may have brought them meanwhile
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
        """Name -> bytes of the shards that are not here. One of another size is fetched again."""
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
        """One file, checked before it is on the disk."""
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
        """One process fetches; others wait for it."""
        with open_own(self.folder / ".lock", mode=0o600) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for path in self.folder.glob(".*.tmp"):  # of a process that was killed
                path.unlink(missing_ok=True)
            yield


def has_copy(manifest_sha256: str) -> bool:
    """Is all of that corpus here?"""
    folder = cache_folder() / manifest_sha256
    data = _cached_manifest(folder) if manifest_sha256 else None
    if data is None or own_size(folder / TOKENIZER) is None:
        return False
    copy = Copy("", folder, parse_manifest(data, str(folder / MANIFEST)))
    return not copy._missing("train") and not copy._missing("validation")


def cache_folder() -> Path:
    """Where copies lie: ISTHMUS_CACHE, else below XDG_CACHE_HOME or ~/.cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"
    return private_folder(Path(os.environ.get("ISTHMUS_CACHE") or usual).expanduser() / "corpora")


def private_folder(path: Path) -> Path:
    """Made if it is missing. Nobody else may put files or links there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path} for fetched corpora ({error.strerror}); set ISTHMUS_CACHE to "
            "another"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{path} is a link, or others may write to it; remove it, or set ISTHMUS_CACHE to a folder of "
            "yours"
        )
    return path


@contextmanager
def in_words(url: str) -> Iterator[None]:
    """Faults of the store, as one line to who named it."""
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
