"""One replica's part in a run, in one of its processes: anchor, error feedback, and updates in transit.

It knows named tensors, a ledger and a key, but not stages, models or batches. Its caller owns weights,
optimiser and data: it copies `anchor` into its weights, trains, and proposes the result.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from isthmus.outer.codec import Payloads
from isthmus.outer.exchange import Contribution
from isthmus.protocol.clipping import clip_factors
from isthmus.protocol.closer import Closer
from isthmus.protocol.exchange import LedgerExchange, Standing
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.patience import Patience
from isthmus.protocol.replay import digest_from_bucket
from isthmus.protocol.retention import Retention
from isthmus.protocol.shards import ShardReader
from isthmus.replica.control_group import ControlGroup
from isthmus.runlog.facts import Facts
from isthmus.runtime.anchor_writer import AnchorWriter
from isthmus.runtime.edge import watched_edge
from isthmus.runtime.outer_step import Files, OuterStep
from isthmus.runtime.refusals import REFUSALS, Refusals


@dataclass(frozen=True, slots=True)
class Settled:
    """A round that was applied."""

    round: int
    returned: Facts | None = None  # the reported facts of an update of ours that does not count


class Session:
    """One process's end. All processes of a replica make the same calls."""

    def __init__(
        self,
        ledger: Ledger,
        anchor: Mapping[str, Tensor],
        own: Collection[str],
        control: ControlGroup,
        incarnation: str,
        log: Callable[[str], None],
        patience: Patience,
        background: bool = True,
    ) -> None:
        """`ledger` was opened with the replica's key. `anchor` and `own` as in OuterStep. Without
        `background` all work happens in the calling thread."""
        self.ledger, self.control, self.log, self.patience = ledger, control, log, patience
        self.incarnation, self.background = incarnation, background
        self.replica = ledger.signer.replica
        self.outer = OuterStep(ledger, anchor, own)
        self.anchor, self.feedback = self.outer.anchor, self.outer.feedback
        self.refusals = Refusals(ledger, self.replica)
        reader = ShardReader(ledger, self.outer.reads)
        self.exchange = LedgerExchange(
            ledger, control, self.outer.writes, reader, self._closer(reader), incarnation, log, patience
        )
        self.retention = Retention(ledger, log, background)
        self.anchors = AnchorWriter(ledger, control, self.exchange, log, background)
        self.open = 1  # the open round
        self.carried = False  # whether the feedback is c = beta e + Delta of that round
        self.pending: Contribution | None = None  # our update to it
        self.unsaved = False  # the feedback has content that neither a checkpoint nor a commit of ours holds
        self.behind = True  # until this start has trained a round: the others may have begun it long ago
        threading.Thread(target=self.outer.warm, daemon=True, name="warm").start()

    def _closer(self, reader: ShardReader) -> Closer | None:
        ledger = self.ledger
        if self.control.rank > 0:  # every leader may close: the membership and its closers may change
            return None
        # One process of several may not have room for the whole model.
        replayed = partial(digest_from_bucket, ledger) if self.control.size == 1 else lambda t: ""
        return Closer(ledger, reader, self.log, self.patience.clock, replayed)

    # An open round

    def watch(self) -> AbstractContextManager[Callable[[], bool]]:
        """Watch whether the others settle the open round without us. It watches only a start's first round,
        and never round 1, which each replica begins when it arrives."""
        late, self.behind = self.behind and self.open > 1, self.exchange.standing is Standing.AGAIN
        if late and self.exchange.standing is Standing.OPEN:
            return watched_edge(self.ledger, self.open, self.control, self.background)
        return nullcontext(lambda: False)

    def propose(self, params: Mapping[str, Tensor]) -> Mapping[int, bytes]:
        """c = beta e + Delta, and the packed shards to send. After this the state can be saved; then call
        `deliver` with the measurements."""
        shards = self.outer.encode(params, self.carried)
        self.carried = True
        return shards

    def deliver(self, shards: Mapping[int, bytes], facts: Facts) -> Contribution:
        """Our update to the open round, which `exchange.close` sends."""
        self.exchange.starts.add(self.incarnation)
        self.pending = Contribution(self.replica, shards, facts)
        return self.pending

    def skip(self, code: str) -> None:
        """Sign that we give nothing to this round, so that no replica waits for us."""
        self.pending = None
        if self.exchange.standing is Standing.OPEN:
            self.exchange.skip(self.open, code)

    def fold(self, params: Mapping[str, Tensor]) -> None:
        """Move our training in the open round to the feedback: it was settled before we had an update."""
        self.outer.fold(params)
        self.unsaved, self.pending = True, None

    # A settled round

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> Settled:
        """theta^(t-1) -> theta^(t), and c -> e by our own counted update."""
        manifest = self._manifest(round_number)
        updates = self.outer.unpack_counted(manifest, contributions)
        factors = self.patience(partial(clip_factors, self.ledger, round_number, updates))
        self.anchors.go_on(round_number - 1)
        settled = self._settle(manifest, updates.get(self.replica))
        self.outer.apply(round_number, updates, factors)
        self.hold(round_number)
        if manifest.closer == self.replica and self.anchors.due(round_number):
            self.anchors.write(round_number, self.outer.anchor_shards())
        if self.control.rank == 0:
            self.retention.after(round_number)
        return settled

    def _manifest(self, round_number: int) -> Manifest:
        manifest = self.ledger.manifest(round_number)
        assert manifest is not None, "only a settled round is applied"
        return manifest

    def _settle(self, manifest: Manifest, listed: Payloads | None) -> Settled:
        """Apply the one rule for the feedback, whatever we hold: see `outer.feedback.settle`."""
        pending, self.pending, t = self.pending, None, manifest.round
        carried, self.carried = self.carried and self.open == t, False
        entry = manifest.entry(self.replica)
        known = entry is not None and entry.incarnation in self.exchange.starts
        self.unsaved |= carried and not (known if entry else self.exchange.committed)
        if listed is not None and not (carried and known):
            self._tell_unknown(t, known)
        self.outer.settle(listed, carried and known)
        returned = None
        if carried and listed is None:
            returned = pending.facts if pending else None
            self.log(f"round {t} was settled without our update; it stays in the error feedback")
            if self.refusals.too_many(t):
                self.outer.drop_feedback()
                self.log(
                    f"round {t}: {REFUSALS} updates in a row were refused for their norm; the error feedback "
                    "is emptied, with what they held"
                )
        return Settled(t, returned)

    def _tell_unknown(self, round_number: int, known: bool) -> None:
        """Log that a manifest counts an update of ours that we cannot subtract, if there is feedback."""
        if not any(bool(tensor.any()) for tensor in self.feedback.values()):
            return
        why = (
            "was not trained to its end this time"
            if known
            else "is of a start that this private state does not know: an older copy of it was restored, "
            "another job of this replica overlaps, or another machine uses its key"
        )
        self.log(
            f"round {round_number} counts an update of ours that {why}; the error feedback is emptied where "
            "that update has an entry"
        )

    def hold(self, round_number: int) -> None:
        """Set the anchor's round; our next commit states its digest."""
        self.exchange.hold_later(round_number, self.outer.digests_later())
        self.open = round_number + 1
        if not self.background:
            self.exchange.settle_anchor()

    def finish(self) -> None:
        """Finish the background work after the last round."""
        self.exchange.settle_anchor()
        self.anchors.finish(self.open - 1)

    # State

    def save(self) -> dict[str, Mapping[str, Tensor]]:
        """The current state, including an update in transit (see `carried`)."""
        return {"anchor": self.anchor, "feedback": self.feedback, "outer": self.outer.method.state()}

    def restore(self, files: Files, carried: bool) -> None:
        self.outer.restore(files)
        self.carried = carried
