"""Shards of updates: read from the bucket once, checked, and unpacked."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from isthmus.layout.traffic import codec_settings
from isthmus.protocol.ledger import Ledger, Manifest, Shard
from isthmus.protocol.trust import Refused, sha256
from isthmus.sparse import SparseChunks, unpack_many

COPIES_AT_ONCE = 8  # each waits for one answer of the store
HELD_BYTES = 1 << 30  # of the last round's shards, for whoever finds them lost

Unpack = Callable[[bytes], Mapping[str, SparseChunks]]  # raises ValueError


class ShardReader:
    """Reads the shards of one round after another, each of them once.

    `applies` are the shards that this process applies. Only they count as payload: a pipelined closer reads
    the others as well, to check them.
    """

    def __init__(self, ledger: Ledger, applies: Collection[int]) -> None:
        self.ledger, self.applies = ledger, tuple(applies)
        # By name too: bytes that one replica has put need not lie under another's name.
        self.cache: dict[tuple[str, str], bytes] = {}
        self.held: list[
            dict[str, bytes]
        ] = []  # of the last two rounds, by hash, the newer first; see `rescue`
        self.payload_bytes, self.seconds = 0, 0.0
        self.reading, self.since, self.lock = 0, 0.0, threading.Lock()  # how many read now, and since when
        self.pool = ThreadPoolExecutor(COPIES_AT_ONCE, "copy")

    def keep(self, replica: str, shard: Shard, data: bytes) -> None:
        """A shard that need not be read, because this process has just written it."""
        self.cache[replica, shard.digest] = data

    def forget(self) -> None:
        """Another round begins. What was read for the last two is held for whoever finds it lost."""
        if self.cache:
            newer = self._chosen(
                {digest: (name, data) for (name, digest), data in self.cache.items()}, HELD_BYTES
            )
            room = HELD_BYTES - sum(map(len, newer.values()))
            before = next((held for held in self.held if not held.keys() & newer.keys()), {})
            self.held = [newer, self._chosen({digest: ("", data) for digest, data in before.items()}, room)]
        self.cache.clear()

    def _chosen(self, shards: Mapping[str, tuple[str, bytes]], room: int) -> dict[str, bytes]:
        """Of shards by hash as many as there is room for: our own first, then the others' in an order of our
        own, so that replicas that hold a part of a large round hold different parts."""
        own, held = self.ledger.signer.replica, dict[str, bytes]()
        order = sorted(
            shards, key=lambda digest: (shards[digest][0] != own, sha256(f"{own} {digest}".encode()))
        )
        for digest in order:
            data = shards[digest][1]
            if len(data) <= room:
                held[digest] = data
                room -= len(data)
        return held

    def held_bytes(self, digest: str) -> bytes | None:
        """A shard of this round or of the two before it, if we still have it."""
        found = next((held[digest] for held in self.held if digest in held), None)
        return found or next((data for (_, name), data in self.cache.items() if name == digest), None)

    def drop(self, replica: str) -> None:
        """An update that does not count, or not in this form: its bytes are no longer needed."""
        for key in [key for key in self.cache if key[0] == replica]:
            del self.cache[key]

    def read(self, replica: str, manifest: Manifest, shard: Shard) -> bytes:
        """The bytes of a shard that a round counts, or Refused with the reason."""
        return self._read(replica, shard, lambda: self.ledger.counted_shard(manifest, replica, shard))

    def copy_behind(self, manifest: Manifest) -> None:
        """A closer judges no copy of its own update. So the other closers keep one, as they apply the round.

        Nobody waits for it: what is wrong with it now is found out by whoever needs it.
        """
        entry = manifest.entry(manifest.closer)
        if entry is not None and manifest.closer != self.ledger.signer.replica:
            for shard in entry.shards:
                self.pool.submit(self.ledger.copy_shard, entry.replica, manifest.round, shard)

    def judged(self, replica: str, round_number: int, shard: Shard) -> bytes:
        """The bytes of a shard as a closer judges it: of a copy that stays, unless it is our own."""

        def get() -> bytes:
            if replica == self.ledger.signer.replica:
                return self.ledger.get_shard(replica, round_number, shard)
            copied = self.ledger.copy_shard(replica, round_number, shard)
            return self.ledger.read_copy(replica, round_number, shard, copied)

        return self._read(replica, shard, get)

    def _read(self, replica: str, shard: Shard, get: Callable[[], bytes]) -> bytes:
        key = replica, shard.digest
        if key not in self.cache:
            with self._timed(shard):
                self.cache[key] = get()
        return self.cache[key]

    @contextmanager
    def _timed(self, shard: Shard) -> Iterator[None]:
        """Any thread may read; seconds in which several do are counted once."""
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
    shapes = recipe.model.shapes()
    if tuple(payloads) != ledger.shards[index]:
        raise Refused(f"shard {index} does not hold the tensors it should")
    for name, payload in payloads.items():
        if tuple(payload.shape) != shapes[name]:
            raise Refused(f"shard {index}: {name} has the shape {tuple(payload.shape)}, not {shapes[name]}")
        if (payload.side, payload.keep, payload.kind) != codec:
            raise Refused(f"shard {index}: {name} is not coded as this run's recipe says")
    return payloads
