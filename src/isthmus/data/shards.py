"""Token shards on disk, written so that a kill at any moment loses work but never truth.

A shard grows under `NAME.partial`. A checkpoint syncs what has grown, then the journal records it, and only
then do shards that the journal lists as whole take their final names. After a kill the journal is the truth:
listed shards are renamed if that had not happened yet, the growing one is cut back to its recorded length.
"""

import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from isthmus.data.manifest import Shard, Split, file_sha256, sync_folder


class ShardWriter:
    """Appends the documents of one split to shards of `shard_tokens` tokens each, the last one excepted."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, state: dict | None = None
    ) -> None:
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        state = state or {"shards": [], "open_tokens": 0, "open_documents": 0, "bytes": 0}
        self.shards = [Shard(**shard) for shard in state["shards"]]
        self.open_tokens: int = state["open_tokens"]
        self.open_documents: int = state["open_documents"]
        self.bytes: int = state["bytes"]
        self._file = None
        self._settled = 0

    @property
    def path(self) -> Path:
        """The final name of the growing shard."""
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards) + self.open_tokens

    def append(self, ids: np.ndarray, text_bytes: int) -> None:
        """Add one document; it may end in a later shard than it began in."""
        self.bytes += text_bytes
        while ids.size:
            part, ids = np.split(ids, [self.shard_tokens - self.open_tokens])
            self._open().write(part.tobytes())
            self.open_tokens += part.size
            self.open_documents += ids.size == 0
            if self.open_tokens == self.shard_tokens:
                self.close_shard()

    def close_shard(self) -> None:
        """End the growing shard; it keeps its partial name until the journal has it."""
        if not self.open_tokens:
            return
        self._sync()
        self._file.close()
        self._file = None
        digest = file_sha256(partial(self.path))
        self.shards.append(Shard(self.path.name, self.open_tokens, self.open_documents, digest))
        self.open_tokens = self.open_documents = 0

    def checkpoint(self) -> dict:
        """Put everything on the disk and return the state to write into the journal."""
        if self.open_tokens:
            self._sync()
        return {
            "shards": [asdict(shard) for shard in self.shards],
            "open_tokens": self.open_tokens,
            "open_documents": int(self.open_documents),
            "bytes": self.bytes,
        }

    def settle(self) -> None:
        """Give the shards that the journal lists their final names."""
        for shard in self.shards[self._settled :]:
            path = self.folder / shard.name
            if partial(path).exists():
                os.replace(partial(path), path)
        if self._settled < len(self.shards):
            sync_folder(self.folder)
        self._settled = len(self.shards)

    def intact(self) -> bool:
        """Whether the files are those of the state this writer was made with."""
        for shard in self.shards:
            path = self.folder / shard.name
            path = path if path.exists() else partial(path)
            if not path.exists() or path.stat().st_size != shard.tokens * self.dtype.itemsize:
                return False
        growing = partial(self.path)
        size = growing.stat().st_size if growing.exists() else 0
        return size >= self.open_tokens * self.dtype.itemsize

    def to_split(self) -> Split:
        return Split(
            tokens=sum(shard.tokens for shard in self.shards),
            documents=sum(shard.documents for shard in self.shards),
            bytes=self.bytes,
            shards=list(self.shards),
        )

    def _open(self):
        if self._file is None:
            path = partial(self.path)
            self._file = open(path, "r+b" if self.open_tokens else "wb")  # noqa: SIM115
            self._file.truncate(self.open_tokens * self.dtype.itemsize)
            self._file.seek(0, os.SEEK_END)
        return self._file

    def _sync(self) -> None:
        file = self._open()
        file.flush()
        os.fsync(file.fileno())


def partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
