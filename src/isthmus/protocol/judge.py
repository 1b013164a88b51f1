"""Does an update count? Closers ask before they list it, readers before they apply what is listed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from isthmus.protocol.ledger import Entry, Ledger, Shard
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused
from isthmus.sparse import SparseChunks

ReadShard = Callable[[str, int, Shard], bytes]  # of a replica's update to a round; Refused with the reason


def judge(
    ledger: Ledger, commit: bytes, replica: str, round_number: int, anchor: str, read: ReadShard
) -> Entry:
    """A commit's entry with the norm of its update, or Refused with the reason.

    Every rule that needs only this one update is here, in the order of docs/protocol.md, A round. Rules that
    compare updates with each other come after it.
    """
    entry = ledger.check_commit(commit, replica, round_number, anchor)
    square = 0.0
    for shard in entry.shards:
        payloads = unpack_shards(ledger, {shard.index: read(replica, round_number, shard)})
        square += squared_norm(payloads)
        if not math.isfinite(square):
            raise Refused(f"shard {shard.index} is not finite")
    return replace(entry, norm=math.sqrt(square))


def squared_norm(payloads: Mapping[str, SparseChunks]) -> float:
    return sum(float(payload.values.double().square().sum()) for payload in payloads.values())
