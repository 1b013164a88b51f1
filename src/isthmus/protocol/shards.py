"""Read update shards from the bucket once, check and unpack them."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from isthmus.layout.traffic import codec_settings
from isthmus.protocol.documents import Shard
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import Refused
from isthmus.sparse import SparseChunks, unpack_many

Unpack = Callable[[bytes], Mapping[str, SparseChunks]]  # raises ValueError


class ShardReader:
    """Reads the shards of one round after another, each of them once.

    `applies` are the shards that this process applies. Only they count as payload: a pipelined closer also
    reads the others, to check them.
    """

    def __init__(self, ledger: Ledger, applies: Collection[int]) -> None:
        self.ledger, self.applies = ledger, tuple(applies)
        # The key includes the name: one replica's bytes need not exist under another's name.
        self.cache: dict[tuple[str, str], bytes] = {}
        self.payload_bytes, self.seconds = 0, 0.0
        self.reading, self.since, self.lock = 0, 0.0, threading.Lock()  # number of reads now, and since when

    def keep(self, replica: str, shard: Shard, data: bytes) -> None:
        """Cache a shard that this process has just written."""
        self.cache[replica, shard.digest] = data

    def forget(self) -> None:
        """Start another round."""
        self.cache.clear()

    def drop(self, replica: str) -> None:
        """Drop the bytes of an update that does not count, or not in this form."""
        for key in [key for key in self.cache if key[0] == replica]:
            del self.cache[key]

    def read(self, replica: str, round_number: int, shard: Shard) -> bytes:
        """The bytes of a shard, or Refused with the reason."""
        key = replica, shard.digest
        if key not in self.cache:
            with self._timed(shard):
                self.cache[key] = self.ledger.get_shard(replica, round_number, shard)
        return self.cache[key]

    @contextmanager
    def _timed(self, shard: Shard) -> Iterator[None]:
        """Count a read's bytes and seconds. Any thread may read; overlapping seconds count once."""
        if shard.index not in self.applies:
            yield
            return
        with self.lock:
            self.since = time.monotonic() if self.reading == 0 else self.since
            self.reading += 1
        try:
            yield
            with self.lock:
                self.payload_bytes += shard.size
        finally:
            with self.lock:
                self.reading -= 1
                self.seconds += time.monotonic() - self.since if self.reading == 0 else 0.0

    def pop_counts(self) -> tuple[int, float]:
        """Payload bytes, and the seconds they took, since the last call."""
        counts, self.payload_bytes, self.seconds = (self.payload_bytes, self.seconds), 0, 0.0
        return counts


def unpack_shards(
    ledger: Ledger, shards: Mapping[int, bytes], unpack: Unpack = unpack_many
) -> dict[str, SparseChunks]:
    """Payloads by tensor name; Refused unless names, shapes and codec are this run's."""
    payloads: dict[str, SparseChunks] = {}
    for index, packed in shards.items():
        payloads |= _unpack(ledger, index, packed, unpack)
    return payloads


def _unpack(ledger: Ledger, index: int, packed: bytes, unpack: Unpack) -> Mapping[str, SparseChunks]:
    recipe = ledger.run.recipe
    try:
        payloads = unpack(packed)
    except ValueError as error:
        raise Refused(f"shard {index} is malformed: {error}") from None
    codec = recipe.outer.chunk_side, *codec_settings(recipe)
    shapes = ledger.shapes
    if tuple(payloads) != ledger.shards[index]:
        raise Refused(f"shard {index} does not hold the tensors it should")
    for name, payload in payloads.items():
        if tuple(payload.shape) != shapes[name]:
            raise Refused(f"shard {index}: {name} has the shape {tuple(payload.shape)}, not {shapes[name]}")
        if (payload.side, payload.keep, payload.kind) != codec:
            raise Refused(f"shard {index}: {name} is not coded as this run's recipe says")
    return payloads
