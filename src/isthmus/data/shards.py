"""Token shards on disk. A kill at any moment loses work and nothing else.

A shard grows under `NAME.partial`. A checkpoint first syncs the data, then records it in the journal, and
only then renames shards that the journal lists as whole. After a kill the journal decides: listed shards are
renamed if they were not yet, and the growing one is cut to its recorded length.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from isthmus.data.manifest import Shard, Split, file_sha256, shard_name
from isthmus.files import create_file, open_own, own_size, sync_folder


@dataclass(slots=True)
class ShardState:
    """The journal's record of one split."""

    shards: list[Shard] = field(default_factory=list)
    open_tokens: int = 0  # in the growing shard
    open_documents: int = 0
    bytes: int = 0  # of text, in all shards


class ShardWriter:
    """Append the documents of one split to shards of `shard_tokens` tokens each; the last may be shorter."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, state: ShardState | None = None
    ) -> None:
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.state = state or ShardState()
        self._file: BinaryIO | None = None
        self._num_renamed = 0

    @property
    def path(self) -> Path:
        """Return the final name of the growing shard."""
        return self.folder / shard_name(self.split, len(self.state.shards))

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.state.shards) + self.state.open_tokens

    def append(self, ids: np.ndarray, text_bytes: int) -> None:
        """Add one document, which may span shards."""
        state = self.state
        state.bytes += text_bytes
        while ids.size:
            part, ids = np.split(ids, [self.shard_tokens - state.open_tokens])
            self._open().write(part.tobytes())
            state.open_tokens += part.size
            state.open_documents += int(ids.size == 0)
            if state.open_tokens == self.shard_tokens:
                self.close_shard()

    def close_shard(self) -> None:
        """End the growing shard; it keeps its partial name until the journal lists it."""
        state = self.state
        if not state.open_tokens:
            return
        self.sync()
        self._open().close()
        self._file = None
        digest = file_sha256(partial(self.path))
        state.shards.append(Shard(self.path.name, state.open_tokens, state.open_documents, digest))
        state.open_tokens = state.open_documents = 0

    def sync(self) -> None:
        """Flush everything to the disk, before the journal records `state`."""
        if self.state.open_tokens:
            file = self._open()
            file.flush()
            os.fsync(file.fileno())

    def rename_whole(self) -> None:
        """Give the shards that the journal lists their final names."""
        shards = self.state.shards
        for shard in shards[self._num_renamed :]:
            path = self.folder / shard.name
            if own_size(partial(path)) is not None:
                os.replace(partial(path), path)
        if self._num_renamed < len(shards):
            sync_folder(self.folder)
        self._num_renamed = len(shards)

    def intact(self) -> bool:
        """Return whether the files match the state that this writer was given."""
        for shard in self.state.shards:
            path = self.folder / shard.name
            path = path if os.path.lexists(path) else partial(path)
            if own_size(path) != shard.tokens * self.dtype.itemsize:
                return False
        return (own_size(partial(self.path)) or 0) >= self.state.open_tokens * self.dtype.itemsize

    def to_split(self) -> Split:
        shards = self.state.shards
        return Split(
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            bytes=self.state.bytes,
            shards=list(shards),
        )

    def _open(self) -> BinaryIO:
        if self._file is None:
            path, size = partial(self.path), self.state.open_tokens * self.dtype.itemsize
            if not size:
                path.unlink(missing_ok=True)  # unjournalled data of a killed process, or a planted link
            self._file = open_own(path, create=False) if size else create_file(path)
            self._file.truncate(size)
            self._file.seek(size)
        return self._file


def partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
