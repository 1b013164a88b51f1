"""How a session reaches the others' anchor: from its state, from an anchor in the bucket, or past a round
whose payloads are gone. The ordinary loop then repeats or applies the rounds that follow."""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isthmus.errors import RunError, RunStopped
from isthmus.model.digest import shard_digest
from isthmus.protocol.missing import LedPast
from isthmus.protocol.trust import Refused
from isthmus.replica.control_group import agree, all_true, share_json, whole_number
from isthmus.store import StoreError
from isthmus.store.together import together

if TYPE_CHECKING:
    from isthmus.runtime.session import Session, State

AT_ONCE = 64  # manifests that one batch requests


class Way(IntEnum):
    """How a session with a restored state reaches the others' anchor."""

    ROUNDS = 0  # round by round
    LATER_ANCHOR = 1  # from a later anchor; the feedback stays
    EMPTIED = 2


class Recovery:
    """Moves a session to its place in the run (docs/protocol.md, Crash points). All processes of a replica
    take the same steps together."""

    def __init__(self, session: "Session") -> None:
        self.session, self.ledger, self.control = session, session.ledger, session.control
        self.patience, self.outer = session.patience, session.outer
        self.replica, self.leads = session.replica, session.leads

    def restore(self, state: "State | None", params: Mapping[str, Tensor] | None) -> None:
        """See `Session.restore`."""
        session = self.session
        if state is None:
            last = self._agreed_last_round()
            self._from_bucket(last)
            if last:
                session.log(
                    f"no private state here: joining at round {last} from the bucket with a fresh optimiser "
                    "and an empty error feedback"
                )
            return
        session.exchange.starts = set(state.starts)
        self.outer.restore(state.files)
        session.carried, session.round = state.carried, state.round
        way = self.patience(partial(self._way_on, state.round)) if self.leads else Way.ROUNDS
        way = Way(self.control.share(bytes([way]))[0][0])
        if way is Way.ROUNDS:
            session.hold(state.round - 1)
            return
        session.log(f"going on from a later anchor than that of round {state.round}")
        self._past(way is Way.EMPTIED, params)

    def pass_over(self, gap: LedPast, params: Mapping[str, Tensor] | None) -> None:
        """Take a later anchor past lost payloads, and keep our feedback if possible."""
        self.session.log(str(gap))
        lost = self.leads and self.patience(partial(self._is_lost, gap.round, gap.anchor))
        self._past(agree(self.control, lost), params, gap.anchor)

    def _way_on(self, round_number: int) -> "Way":
        """Continue from our anchor, round by round, or from a later one: if our round's payloads are gone, or
        if we are far behind and no update of ours counts meanwhile."""
        anchors = self.ledger.believed_anchors(2)
        if not anchors or round_number > anchors[0]:
            return Way.ROUNDS
        swept, far = self._is_swept(round_number), round_number <= min(anchors[1:], default=0)
        if not swept and not far:
            return Way.ROUNDS
        if self._is_lost(round_number, self.ledger.last_round()):
            return Way.EMPTIED if swept else Way.ROUNDS
        return Way.LATER_ANCHOR

    def _is_swept(self, round_number: int) -> bool:
        """Whether payloads of a settled round are gone. Each replica sweeps its own."""
        ledger, manifest = self.ledger, self.ledger.manifest(round_number)
        others = [entry for entry in manifest.entries if entry.replica != self.replica] if manifest else []
        some = [(entry, entry.shards[0]) for entry in (others[:1] + others[-1:])]
        return not all(ledger.has_shard(e.replica, round_number, s) for e, s in some)

    def _is_lost(self, first: int, last: int) -> bool:
        """Whether the feedback must be emptied to continue from an anchor after these rounds. What our open
        round counted can be subtracted if we have its c and its payload exists."""
        ledger, manifest = self.ledger, self.ledger.manifest(first)
        entry = manifest.entry(self.replica) if manifest else None
        has = entry and self.session.carried and ledger.has_shard(self.replica, first, entry.shards[0])
        if entry and not has:
            return True
        return self._counts_us(first + 1, last)

    def _past(self, emptied: bool, params: Mapping[str, Tensor] | None, anchor: int = 0) -> None:
        """Continue from a later anchor. The feedback stays if no update of ours counts in the rounds between.
        Otherwise unknown parts of it were sent."""
        session = self.session
        if emptied:
            self.outer.drop_feedback()
            session.exchange.starts.clear()
            session.log(
                f"rounds from {session.round} on count updates of ours, and cannot be trained again because "
                "payloads are gone: the error feedback is emptied"
            )
        elif session.carried:
            self._settle_open()
        elif params is not None:
            session.fold(params)
        session.unsaved, session.pending, session.carried = True, None, False
        self._from_bucket(self._agreed_last_round(), anchor, fresh=False)

    def _settle_open(self) -> None:
        """c -> e of the open round, by our own counted update alone."""
        t, manifest = self.session.round, self.ledger.manifest(self.session.round)
        if entry := manifest.entry(self.replica) if manifest else None:
            read = partial(self.ledger.get_shard, entry.replica, t)
            try:
                shards = {i: self.patience(partial(read, entry.shards[i])) for i in self.outer.writes}
                known = entry.incarnation in self.session.exchange.starts
                self.outer.settle(self.outer.unpack(shards), known)
            except Refused as reason:
                self.outer.drop_feedback()
                self.session.log(
                    f"round {t}: our update cannot be read ({reason}); the error feedback is emptied"
                )

    def _counts_us(self, first: int, last: int) -> bool:
        """Whether one of these rounds counts an update of ours. Manifests are never deleted."""
        for start in range(first, last + 1, AT_ONCE):
            calls = [partial(self.ledger.manifest, t) for t in range(start, min(start + AT_ONCE, last + 1))]
            if any(manifest and manifest.entry(self.replica) for manifest in together(calls)):
                return True
        return False

    # Anchors in the bucket

    def _agreed_last_round(self) -> int:
        mine = self.patience(self.ledger.last_round) if self.leads else 0
        return share_json(self.control, mine, whole_number)[0]

    def _from_bucket(self, last: int, first: int = 0, *, fresh: bool = True) -> None:
        """Take the newest usable anchor, or that of round `first`; the loop then replays the rounds after it.
        Only a `fresh` process, which has restored no state, still holds the theta^(0) that it was given."""
        session = self.session
        session.exchange.from_bucket = True
        for start in chain([first] if first else [], self._agreed_anchors(last)):
            digest, tensors = self._read_anchor(start)
            if all_true(self.control, bool(digest)) and self._has_digest(start, tensors, digest):
                self.outer.restore_anchor(tensors, tensors if start else None)
                session.hold(start)
                return
        if self.ledger.run.start or not fresh:
            raise RunError("no anchor of this run can be read from its bucket now; trying again")
        session.hold(0)

    def _agreed_anchors(self, last: int) -> Iterator[int]:
        """Rounds with an anchor, newest first; the leader looks for the next one only when needed."""
        anchors = self.ledger.anchors_down(last) if self.leads else iter(())
        while (start := share_json(self.control, next(anchors, -1), _round_or_none)[0]) >= 0:
            yield start

    def _has_digest(self, round_number: int, tensors: Mapping[str, Tensor], digest: str) -> bool:
        """Whether these tensors have the digest that the anchor's writer states and contributors signed."""
        names = self.ledger.shards
        parts = {i: shard_digest(tensors, names[i]) for i in self.outer.reads}
        if self.session.edge.hold_now(round_number, parts) == digest:
            return True
        self.session.log(f"the anchor of round {round_number} is not what it states; trying the one before")
        return False

    def _read_anchor(self, round_number: int) -> tuple[str, dict[str, Tensor]]:
        try:
            return self.patience(partial(self.ledger.read_anchor, round_number, self.outer.reads))
        except (StoreError, RunStopped):
            raise  # it may be whole but unreachable; or nothing in this run is to be trusted
        except RunError as error:
            self.session.log(f"{error}; trying the one before")
            return "", {}


def _round_or_none(value: Any) -> int:
    return -1 if value == -1 else whole_number(value)
