"""Does an update count? Closers ask before they list it, readers before they apply what is listed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from isthmus.errors import RunStopped
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.shards import unpack_shards
from isthmus.protocol.trust import Refused
from isthmus.sparse import SparseChunks

ReadShard = Callable[[str, int, Shard], bytes]  # of a replica's update to a round; Refused with the reason
Payloads = Mapping[str, SparseChunks]
NORM_TOLERANCE = 1e-6  # relative: devices add in another order, in float64


def judge(
    ledger: Ledger,
    commit: bytes,
    replica: str,
    round_number: int,
    anchor: str,
    read: ReadShard,
    seen: Callable[[Payloads], None] = lambda payloads: None,
) -> Entry:
    """A commit's entry with the norm of its update, or Refused with the reason.

    Every rule that needs only this one update is here, in the order of docs/protocol.md, A round. Rules that
    compare updates with each other come after it; `seen` is shown each shard's payloads for them.
    """
    entry = ledger.check_commit(commit, replica, round_number, anchor)
    square = 0.0
    for shard in entry.shards:
        payloads = unpack_shards(ledger, {shard.index: read(replica, round_number, shard)})
        square += float(squared_norm(payloads))
        if not math.isfinite(square):
            raise Refused(f"shard {shard.index} is not finite")
        seen(payloads)
    return replace(entry, norm=math.sqrt(square))


def other_start(manifest: Manifest, anchor: str) -> RunStopped:
    """A round that its closer began somewhere else than where the rounds before it lead."""
    return RunStopped(
        f"manifest {manifest.round} of this run, by closer {manifest.closer}, is not to be trusted: it "
        f"starts from anchor {manifest.anchor[:16]}, but replaying the rounds before it gives "
        f"{anchor[:16]}; the run stops here"
    )


def check_counted(manifest: Manifest, updates: Mapping[str, Payloads], whole: bool = True) -> None:
    """Before a round is applied: the updates, as unpacked, have the norms by which they were let in.

    The manifest's documents were checked when it was read, the updates' hashes and codec when they were. A
    process that applies only a part of the model (`whole` False) knows that a part is no larger than the
    whole. A closer that stated another norm is named, and nothing of the round is applied.
    """
    if not updates:
        return
    squares = torch.stack([squared_norm(update) for update in updates.values()]).tolist()  # one wait
    stated = {entry.replica: entry.norm for entry in manifest.entries}
    for replica, square in zip(updates, squares, strict=True):
        norm, found = stated[replica], math.sqrt(square)
        slack = NORM_TOLERANCE * norm
        if not found <= norm + slack or (whole and found < norm - slack):
            raise RunStopped(
                f"manifest {manifest.round} of this run, by closer {manifest.closer}, is not to be trusted: "
                f"it says that {replica}'s update has the norm {norm:.6g}, and that is {found:.6g}; the run "
                "stops here"
            )


def squared_norm(payloads: Payloads) -> torch.Tensor:
    """The sum of squares in float64, on the payloads' device."""
    norms = [torch.linalg.vector_norm(each.values, dtype=torch.float64) for each in payloads.values()]
    return torch.stack(norms).square().sum()
