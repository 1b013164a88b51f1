"""An open corpus: token shards mapped into memory and read like one long array."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from isthmus import reading
from isthmus.data.manifest import (
    SHA256,
    TOKENIZER,
    Manifest,
    Shard,
    Split,
    file_sha256,
    read_manifest,
    shard_name,
)
from isthmus.errors import ConfigError
from isthmus.store.url import is_url

BUILTIN = "builtin:sample"
BUILTIN_FOLDER = Path(__file__).parent / "builtin"


class TokenView:
    """One split as one sequence of token ids, over all of its shards."""

    def __init__(self, name: str, shards: list[np.ndarray], vocab_size: int | None = None) -> None:
        self.name, self.vocab_size = name, vocab_size
        self.shards = [np.asarray(shard) for shard in shards]
        self._starts = np.concatenate([[0], np.cumsum([shard.size for shard in shards])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start..stop as int64; they may span shards."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        parts = [
            shard[max(0, start - first) : max(0, stop - first)]
            for shard, first in zip(self.shards, self._starts, strict=False)
        ]
        return self._known(np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64))

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each of `starts`: (N,) -> (N, length) int64, one gather per shard."""
        if starts.size and not (starts.min() >= 0 and starts.max() + length <= len(self)):
            raise IndexError(f"windows of {length} tokens at {starts.min()} to {starts.max()} of {len(self)}")
        out = np.empty((starts.size, length), dtype=np.int64)
        home = np.searchsorted(self._starts, starts, side="right") - 1
        crossing = starts + length > self._starts[home + 1]
        for number in np.unique(home[~crossing]):
            rows = np.flatnonzero((home == number) & ~crossing)
            every = np.lib.stride_tricks.sliding_window_view(self.shards[number], length)
            out[rows] = every[starts[rows] - self._starts[number]]
        for row in np.flatnonzero(crossing):
            out[row] = self.slice(int(starts[row]), int(starts[row]) + length)
        return self._known(out)

    def _known(self, ids: np.ndarray) -> np.ndarray:
        """Refuse token ids without a row in the embedding: they would halt a GPU for good."""
        if self.vocab_size is not None and ids.size and (largest := int(ids.max())) >= self.vocab_size:
            raise ConfigError(
                f"the {self.name} part holds the token {largest}, and its tokenizer has {self.vocab_size}; "
                "copy the corpus, or prepare it again"
            )
        return ids


@dataclass(frozen=True)
class Corpus:
    """The text that a run trains and validates on."""

    name: str
    folder: Path
    manifest: Manifest
    split: Callable[[str], TokenView]  # a corpus at a URL fetches a split on first use

    @cached_property
    def train(self) -> TokenView:
        return self.split("train")

    @cached_property
    def validation(self) -> TokenView:
        return self.split("validation")

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER

    @property
    def tokenizer_sha256(self) -> str:
        return self.manifest.tokenizer_sha256

    @property
    def end_id(self) -> int:
        """Return the token that ends every document."""
        return self.manifest.end_id

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the validation text: loss in nats / ln 2 / bytes_per_token is bits per byte."""
        return self.manifest.validation.bytes_per_token

    @cached_property
    def sha256(self) -> str:
        """Digest of tokenizer and tokens: two machines with the same digest train on the same data."""
        return self.manifest.tokens_sha256

    def verify(self) -> None:
        """Compare every file with its sha256 in the manifest; ConfigError names the first that differs."""
        if file_sha256(self.tokenizer_path) != self.tokenizer_sha256:
            raise ConfigError(f"{self.tokenizer_path} differs from its sha256; prepare or copy it again")
        if self.name == BUILTIN:
            return  # its tokens exist only in memory
        for name in ("train", "validation"):
            self.split(name)  # fetch this split of a corpus at a URL
        for shard in self.manifest.shards:
            if file_sha256(self.folder / shard.name) != shard.sha256:
                raise ConfigError(
                    f"{self.folder / shard.name} differs from its sha256; prepare or copy it again"
                )


def open_corpus(spec: str | Path) -> Corpus:
    """Open a prepared folder, a URL of one, or "builtin:sample".

    A folder's sizes are checked here, its contents by Corpus.verify(). Files from a URL are checked by hash
    when they are fetched; URL#SHA256 fixes the manifest, and so the corpus.
    """
    if str(spec) == BUILTIN:
        return open_builtin()
    if not str(spec).strip():
        raise ConfigError(f'no corpus is named; give a prepared folder, its URL, or "{BUILTIN}"')
    if str(spec).startswith("builtin:"):
        raise ConfigError(f"there is no corpus {spec!r}; the one that comes with Isthmus is {BUILTIN!r}")
    if is_url(str(spec)):
        return open_remote(str(spec))
    folder = Path(spec).expanduser()
    manifest = read_manifest(folder)
    try:
        reading.stat_regular(folder / TOKENIZER, follow=False)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder / TOKENIZER} is missing; copy the whole corpus, or prepare it again"
        ) from None
    views = {name: map_split(folder, name, manifest) for name in ("train", "validation")}
    return Corpus(folder.resolve().name, folder, manifest, views.__getitem__)


def check_here(spec: str) -> None:
    """Raise ConfigError if a folder holds no corpus. URLs are checked when the run starts. Loads no torch."""
    if spec != BUILTIN and not is_url(spec):
        open_corpus(spec)


def open_remote(spec: str) -> Corpus:
    from isthmus.data.fetch import Copy  # loads obstore, and most corpora are folders

    url, mark, manifest_sha256 = spec.partition("#")
    if mark and not SHA256.fullmatch(manifest_sha256):
        raise ConfigError(
            f"{spec} does not end in the sha256 of a manifest; write the URL alone, or 64 hexadecimal digits "
            "after #"
        )
    copy = Copy.of(url, manifest_sha256)

    def split(name: str) -> TokenView:
        copy.fetch(name)
        return map_split(copy.folder, name, copy.manifest)

    return Corpus(url.rstrip("/").rpartition("/")[2], copy.folder, copy.manifest, split)


def open_here(spec: str) -> Corpus:
    """Open a corpus without any network access: a stranger's folder may name the URL."""
    if is_url(spec):
        from isthmus.data.fetch import has_copy

        if not has_copy(spec.partition("#")[2]):
            raise ConfigError(
                f"the text of this run is at {spec}, says its recipe; an address from a file is not "
                "followed: give --corpus that URL if you trust it"
            )
    return open_corpus(spec)


def pinned(spec: str, corpus: Corpus) -> str:
    """Fix the corpus by its hash, so that nobody can replace it later."""
    return f"{spec}#{corpus.manifest.digest}" if is_url(spec) and "#" not in spec else spec


def map_split(folder: Path, name: str, manifest: Manifest) -> TokenView:
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    arrays = []
    for shard in getattr(manifest, name).shards:
        path, expected = folder / shard.name, shard.tokens * dtype.itemsize
        try:
            with reading.open_regular(path, follow=False) as file:
                size = os.fstat(file.fileno()).st_size
                if size == expected:
                    arrays.append(np.memmap(file, dtype=dtype, mode="r", shape=(shard.tokens,)))
                    continue
                found = f"has {size:,} bytes instead of {expected:,}"
        except FileNotFoundError:
            found = "is missing"
        except (OSError, OverflowError) as error:
            found = f"cannot be mapped into memory ({error})"
        raise ConfigError(f"{path} {found}; copy the whole corpus, or prepare it again")
    return TokenView(name, arrays, manifest.vocab_size)


@cache
def open_builtin() -> Corpus:
    """Encode the sample that ships with Isthmus, once per process; it takes half a second."""
    from isthmus.data.finding import find_files
    from isthmus.data.tokenizer import Encoder

    data = (BUILTIN_FOLDER / TOKENIZER).read_bytes()
    encoder = Encoder(data)
    splits, views, sources = {}, {}, []
    for name in ("train", "validation"):
        [file] = find_files([BUILTIN_FOLDER / f"{name}.jsonl.gz"])
        texts = list(file.documents("text"))
        tokens = np.concatenate(encoder.encode(texts))
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        text_bytes = sum(len(text.encode()) for text in texts)
        shard = Shard(shard_name(name, 0), tokens.size, len(texts), digest)
        splits[name] = Split(tokens.size, len(texts), text_bytes, [shard])
        views[name] = TokenView(name, [tokens], encoder.vocab_size)
        sources.append(file.describe())
    manifest = Manifest(
        vocab_size=encoder.vocab_size,
        dtype=encoder.dtype.name,
        end_token=encoder.end_token,
        end_id=encoder.end_id,
        tokenizer_sha256=hashlib.sha256(data).hexdigest(),
        **splits,
        sources=sources,
        arguments={},
        fingerprint=BUILTIN,
    )
    return Corpus(BUILTIN, BUILTIN_FOLDER, manifest, views.__getitem__)
