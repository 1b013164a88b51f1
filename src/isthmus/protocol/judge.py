"""Decide whether an update counts, before a closer lists it."""

import math
from collections.abc import Callable, Mapping

from isthmus.errors import RunStopped
from isthmus.outer.aggregate import squared_norm
from isthmus.protocol.documents import Entry, Manifest, Shard, Skip
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused
from isthmus.sparse import SparseChunks

ReadShard = Callable[[str, int, Shard], bytes]  # (replica, round, shard) -> bytes; Refused with the reason
Payloads = Mapping[str, SparseChunks]


def judge(
    ledger: Ledger,
    commit: bytes,
    replica: str,
    round_number: int,
    anchor: str,
    read: ReadShard,
) -> Entry | Skip:
    """A commit as a manifest lists it, with the norm of its update; or Refused with the reason.

    All rules that need only this one update are here, in the order of docs/protocol.md, A round.
    """
    given = ledger.check_commit(commit, replica, round_number, anchor)
    if given.skip:
        return Skip(replica, given.skip)
    square = 0.0
    for shard in given.shards:
        payloads = unpack_shards(ledger, {shard.index: read(replica, round_number, shard)})
        square += float(squared_norm(payloads))
        if not math.isfinite(square):
            raise Refused(f"shard {shard.index} is not finite", "not_finite")
    return Entry(replica, given.shards, math.sqrt(square), given.facts, given.incarnation)


def other_start(manifest: Manifest, anchor: str) -> RunStopped:
    """The error for a manifest whose anchor differs from what replaying the previous rounds gives."""
    return RunStopped(
        f"manifest {manifest.round} of this run, by closer {manifest.closer}, is not to be trusted: it "
        f"starts from anchor {manifest.anchor[:16]}, but replaying the rounds before it gives "
        f"{anchor[:16]}; the run stops here"
    )
