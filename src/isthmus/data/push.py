"""`isthmus data push`: upload a prepared folder into a bucket, for others to fetch.

The manifest is uploaded last, so a partial upload is not a corpus yet. `pushing.json` is first and names
the corpus: a repeated upload skips files that are there, and two corpora never mix.
"""

import hashlib
import json
from pathlib import Path

from isthmus import reading
from isthmus.data.corpus import BUILTIN, Corpus, open_corpus
from isthmus.data.fetch import MOST_FILE_BYTES, PUSHING, in_words
from isthmus.data.manifest import MANIFEST, MAX_JSON_BYTES, TOKENIZER
from isthmus.data.progress import Progress
from isthmus.errors import ConfigError
from isthmus.store import Store, open_store
from isthmus.store.url import is_url

MOST_NOTE_BYTES = 4096


def push(folder: str, url: str, progress: Progress | None = None) -> tuple[Corpus, int]:
    """Upload a corpus. Return it and the bytes uploaded: 0 if it was already there."""
    progress = progress or Progress()
    if folder == BUILTIN:
        raise ConfigError(
            f"{BUILTIN} comes with Isthmus: every machine has it, and no recipe needs a URL for it"
        )
    if is_url(folder) or not is_url(url):
        raise ConfigError(
            f"push takes a prepared folder and then a URL: isthmus data push {folder} s3://bucket/corpus"
        )
    corpus = open_corpus(folder)
    sizes = _sizes(corpus)
    data = reading.read_bytes(corpus.folder / MANIFEST, MAX_JSON_BYTES)
    with in_words(url):
        store = open_store(url)
        if _is_there(store, url, data):
            return corpus, 0
        _begin(store, url, corpus.manifest.digest)
        sent = _send(store, corpus, sizes, progress)
        store.put(MANIFEST, data)
        store.delete(PUSHING)
    return corpus, sent + len(data)


def _sizes(corpus: Corpus) -> dict[str, int]:
    sizes = {shard.name: corpus.manifest.shard_bytes(shard) for shard in corpus.manifest.shards}
    for name, size in sizes.items():
        if size > MOST_FILE_BYTES:
            raise ConfigError(
                f"{name} has {size:,} bytes; at most {MOST_FILE_BYTES:,} are fetched: prepare the "
                "corpus again with fewer --shard-tokens"
            )
    return sizes | {TOKENIZER: reading.stat_regular(corpus.tokenizer_path, follow=False).st_size}


def _is_there(store: Store, url: str, data: bytes) -> bool:
    there = store.get(MANIFEST, max_bytes=MAX_JSON_BYTES)
    if there is not None and there != data:
        raise ConfigError(f"{url} holds another corpus, which runs may use; give another URL")
    return there is not None


def _begin(store: Store, url: str, digest: str) -> None:
    note = json.dumps({"manifest": digest}).encode()
    if store.create(PUSHING, note):
        return
    if store.get(PUSHING, max_bytes=MOST_NOTE_BYTES) != note:
        raise ConfigError(
            f"another corpus is being uploaded to {url}, or was and is unfinished; give another URL"
        )


def _send(store: Store, corpus: Corpus, sizes: dict[str, int], progress: Progress) -> int:
    """Upload every missing file, and compare each with its sha256 on the way."""
    digests = {shard.name: shard.sha256 for shard in corpus.manifest.shards}
    digests[TOKENIZER] = corpus.tokenizer_sha256
    total, done, sent = sum(sizes.values()), 0, 0
    progress.phase(f"uploading {corpus.folder}", total)
    for name, size in sizes.items():
        there = store.head(name)
        if there is None or there.size != size:
            store.put(name, _checked(corpus.folder / name, size, digests[name]))
            sent += size
        done += size
        progress.update(done, f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
    return sent


def _checked(path: Path, size: int, sha256: str) -> bytes:
    data = reading.read_bytes(path, size, follow=False)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(f"{path} differs from its sha256; prepare or copy it again")
    return data
