"""One replica's part in a run, in one of its processes: anchor, error feedback, and updates on their way.

It knows named tensors, a ledger and a key, but not stages, models or batches. Its caller owns weights,
optimiser and data: it copies `anchor` into its weights, trains, and delivers the result. In a leader, threads
send heartbeats, hash and upload anchors, and close a round that is overdue while the caller is elsewhere.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from isthmus.errors import RunError, RunStopped
from isthmus.layout.deal import Deal
from isthmus.outer.codec import Payloads
from isthmus.outer.exchange import Contribution
from isthmus.protocol.anchor_upload import AnchorUpload
from isthmus.protocol.clipping import clip_factors
from isthmus.protocol.closer import Closer
from isthmus.protocol.exchange import LedgerExchange, Standing
from isthmus.protocol.heartbeat import READY
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.missing import LedPast
from isthmus.protocol.norms import TOO_LARGE
from isthmus.protocol.patience import Patience
from isthmus.protocol.replay import digest_from_bucket
from isthmus.protocol.retention import Retention
from isthmus.protocol.shards import ShardReader
from isthmus.replica.control_group import ControlGroup, all_true
from isthmus.runlog.facts import Facts
from isthmus.runtime.heartbeat import HeartbeatThread
from isthmus.runtime.outer_step import Files, OuterStep
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.status import WorkerStatus
from isthmus.store import StoreError

NO_SHARE = "no_share"  # the code of our skip
REFUSALS = 3  # for the norm in a row, after which the error feedback is emptied
LOOK_BACK = 12  # rounds searched for them: a slow replica does not deliver in every round
LOOK_SECONDS = (0.5, 30.0)  # least and most time between looks at a round, while the caller trains it
MOST_LOOKS = 60  # in a round as long as the previous one


@dataclass(frozen=True, slots=True)
class State:
    """All that a session needs to continue: its tensors, which are not copied, and four small facts."""

    round: int  # the open round
    files: Files  # "anchor", "feedback", "outer" (the method's own): name -> tensor
    carried: bool = False  # the feedback is c = beta e + Delta of that round, whose update is on its way
    starts: Sequence[str] = ()  # starts of this replica that may have committed an update


@dataclass(frozen=True, slots=True)
class Settled:
    """What `Session.settle` did. `session.anchor` is now theta^(round)."""

    round: int
    counted: bool = False  # an update of ours is in it
    returned: Facts | None = None  # the figures of an update of ours that does not count
    facts: Facts | None = None  # what we committed to it: the figures of all our processes
    apply_seconds: float = 0.0


class Session:
    """One process's end. All processes of a replica make the same calls.

    session = Session.open(ledger, anchor, own, control, incarnation, log, state=state, again=False)
    session.catch_up(weights)
    while not session.done:
        ... copy session.anchor into the weights, train H steps ...
        session.deliver(weights, facts)
        session.settle()
        session.catch_up()
    session.leave()
    """

    def __init__(
        self,
        ledger: Ledger,
        anchor: Mapping[str, Tensor],
        own: Collection[str],
        control: ControlGroup,
        incarnation: str,
        log: Callable[[str], None],
        patience: Patience | None = None,
        *,
        again: bool = True,
        background: bool = True,
    ) -> None:
        """`ledger` was opened with the replica's key. `anchor` and `own` as in OuterStep. `again`: the caller
        can repeat a round that counts an update of ours and that its state does not contain; see `begin`.
        Without `background` all work happens in the calling thread."""
        self.ledger, self.control, self.log = ledger, control, log
        self.patience = patience or Patience(log)
        self.incarnation, self.again, self.background = incarnation, again, background
        self.replica, self.leads = ledger.signer.replica, control.rank == 0
        self.outer = OuterStep(ledger, anchor, own)
        self.anchor, self.feedback = self.outer.anchor, self.outer.feedback
        reader = ShardReader(ledger, self.outer.reads)
        closer = self._closer(reader)
        self.exchange = LedgerExchange(
            ledger, control, self.outer.writes, reader, closer, incarnation, log, self.patience
        )
        self.edge = self.exchange.edge
        self.retention = Retention(ledger, log, background)
        self.status, self.heart = WorkerStatus(), HeartbeatThread(self)
        self.round = 1  # the open round
        self.carried = False  # whether the feedback is c = beta e + Delta of that round
        self.encoded: Mapping[int, bytes] | None = None  # the shards of our update, until it is delivered
        self.pending: Facts | None = None  # the figures of our update
        self.unsaved = False  # the feedback has content that neither a checkpoint nor a commit of ours holds
        self.share: Deal | None = None  # our share of the open round's data
        self.late = True  # until this start has trained a round: the others may have begun it long ago
        self.watching = False  # whether the others may settle the open round without us
        self.emptied_in = 0  # the round after which refusals were last counted from
        self.waits, self.torn = False, False
        self.lock = threading.Lock()  # held by each call of ours, so that the thread stays away
        self.settled, self.ended = threading.Event(), threading.Event()
        self.fault: Exception | None = None  # of the thread
        threading.Thread(target=self.outer.warm, daemon=True, name="warm").start()

    @classmethod
    def open(
        cls,
        ledger: Ledger,
        anchor: Mapping[str, Tensor],
        own: Collection[str],
        control: ControlGroup,
        incarnation: str,
        log: Callable[[str], None],
        patience: Patience | None = None,
        *,
        state: State | None = None,
        params: Mapping[str, Tensor] | None = None,
        again: bool = True,
        background: bool = True,
    ) -> "Session":
        """A session that has begun and restored `state`; see `restore`."""
        session = cls(
            ledger, anchor, own, control, incarnation, log, patience, again=again, background=background
        )
        session.start()
        session.restore(state, params)
        return session

    def _closer(self, reader: ShardReader) -> Closer | None:
        ledger = self.ledger
        if not self.leads:  # every leader may close: the membership and its closers may change
            return None
        # One process of several may not have room for the whole model.
        replayed = partial(digest_from_bucket, ledger) if self.control.size == 1 else lambda t: ""
        return Closer(ledger, reader, self.log, self.patience.clock, replayed)

    def start(self) -> None:
        """Begin to send heartbeats and to watch over the open round."""
        if self.leads and self.background:
            self.heart.start()
            threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def restore(self, state: State | None, params: Mapping[str, Tensor] | None = None) -> None:
        """Continue from `state`, or join from the bucket without one. `params`: the weights that belong to
        it, if they are inside a round; they are folded into the feedback if the round cannot be continued.

        It blocks until the anchor of round `self.round - 1` is here. That is the state's, unless payloads of
        its open round are gone or it lies far back.
        """
        with self._working():
            Recovery(self).restore(state, params)

    def save(self) -> State:
        """The current state, with an update of ours that is on its way. Valid between any two calls, and
        after an interrupt; RunError if that hit the outer step itself."""
        if self.torn:
            raise RunError(f"replica {self.replica}: interrupted in the outer step; the state before counts")
        files = {"anchor": self.anchor, "feedback": self.feedback, "outer": self.outer.method.state()}
        carried = self.carried and bool(self.feedback)
        return State(self.round, files, carried, sorted(self.exchange.starts))

    @property
    def wish(self) -> int:
        """What a process of this replica was asked at the last edge; see `Leave.asked`."""
        return self.exchange.wish

    @property
    def starts(self) -> Collection[str]:
        """Starts of this replica that may have committed an update."""
        return self.exchange.starts

    @property
    def done(self) -> bool:
        return self.round > self.ledger.run.recipe.outer.rounds

    # The open round

    def begin(self) -> bool:
        """Whether the caller trains the open round. Otherwise it calls `settle` at once: the round is
        settled, or we have no share of its data. RunStopped if the owner has revoked us.

        A settled round to which a start of ours has committed is trained again, for its feedback and
        moments, because later rounds may have sent parts of it. Without `again` it is applied, and `settle`
        empties the feedback where the payload has an entry.
        """
        with self._working():
            standing = self.exchange.enter(self.round)
            if standing is Standing.AGAIN and not self.again:
                standing = self.exchange.standing = Standing.SETTLED
            if standing is Standing.SETTLED:
                return False
            if not self.patience(self._has_share):
                return False
            late, self.late = self.late and self.round > 1, standing is Standing.AGAIN
            self.watching = late and standing is Standing.OPEN
            return True

    def _has_share(self) -> bool:
        """Whether we are dealt a share of the open round's data. A member without one says so: perhaps nobody
        else is there."""
        ledger, t, key = self.ledger, self.round, self.ledger.signer.public_key
        member = ledger.at(t).keys.get(self.replica) == key
        if not member and ledger.run.keys.get(self.replica) != key:
            raise RunStopped(ledger.revoked(self.replica, t))
        self.share = ledger.deal(t, self.replica) if member else None
        if self.share is None and not self.waits:
            self.log(f"round {t} began without us; we wait for the next one")
        self.waits = self.share is None
        if self.waits:
            self.status.state = READY
        if self.waits and member and self.exchange.standing is Standing.OPEN:
            self.exchange.skip(t, NO_SHARE)
        return not self.waits

    def overtaken(self) -> bool:
        """Whether the others have settled the open round without us: the caller may stop training it and call
        `settle`. Only a start's first round is left like that, and never round 1, which each replica begins
        when it arrives. It makes no control call: with several processes, the leader's answer counts."""
        if self.watching and self.leads and not self.background:
            self._look()
        return self.watching and self.settled.is_set()

    def is_finite(self, params: Mapping[str, Tensor]) -> bool:
        """Whether all processes can deliver their weights; one control call, if there are several."""
        return all_true(self.control, self.outer.is_finite(params))

    def encode(self, params: Mapping[str, Tensor]) -> None:
        """c = beta e + Delta, and the packed shards to send; from here on `save` holds the update. `params`
        are not read if the feedback already is that c."""
        self.encoded = self.outer.encode(params, self.carried)
        self.carried = True

    def deliver(self, params: Mapping[str, Tensor] | None, facts: Facts) -> None:
        """Send our update to the open round: encode, PUT, commit. `params`: the names that we train, on the
        anchor's device; None if the update is encoded, or restored and on its way."""
        with self._working():
            if params is not None or self.encoded is None:
                self.encode(params or {})
            assert self.encoded is not None
            self.exchange.starts.add(self.incarnation)
            self.pending, shards, self.encoded = facts, self.encoded, None
            self.exchange.deliver(self.round, Contribution(self.replica, shards, facts))

    def skip(self, code: str) -> None:
        """Sign that we give nothing to the open round, so that no replica waits for us."""
        with self._working():
            self.pending = None
            if self.exchange.standing is Standing.OPEN:
                self.exchange.skip(self.round, code)

    def settle(self, params: Mapping[str, Tensor] | None = None) -> Settled:
        """Wait until the open round is settled, and apply it. `params`: the weights, if we have trained a
        part of the round and not delivered it; what they have learnt moves to the feedback."""
        with self._working():
            t, self.watching = self.round, False
            try:
                manifest, contributions = self.exchange.counted(t)
            except LedPast as gap:
                Recovery(self).pass_over(gap, params)
                return Settled(self.round - 1)
            return self._apply(manifest, contributions, params)

    def catch_up(self, params: Mapping[str, Tensor] | None = None) -> None:
        """Settle every round that needs no training by the caller: an update of ours that is on its way,
        rounds that are settled, rounds without a share for us. `params` as in `restore`."""
        while not self.done:
            if self.begin():
                if not self.carried:
                    return
                self.deliver(None, self.pending or Facts())
            self.settle(params)
            params = None

    def finish(self, facts: Facts) -> None:
        """Agree on the last anchor, complete its upload, and take along figures that no commit states."""
        with self._working():
            if self.edge.upload and self.background:
                self.edge.upload.join()
            frames = self.edge.share(facts=facts.plus(self.exchange.pop_facts()))
            self.status.farewell = Facts.gather([frame.facts or Facts() for frame in frames])

    def leave(self) -> None:
        """Say farewell; `status.state` is the last word."""
        self.ended.set()
        if self.leads and self.background:
            self.heart.end()

    # A settled round

    def fold(self, params: Mapping[str, Tensor]) -> None:
        """Move anchor - params to the feedback: the open round was settled before we had an update."""
        self.outer.fold(params)
        self.unsaved, self.pending = True, None
        self.log(
            f"round {self.round} was settled without us; what we trained of it goes to the error feedback"
        )

    def _apply(
        self,
        manifest: Manifest,
        contributions: Sequence[Contribution],
        params: Mapping[str, Tensor] | None,
    ) -> Settled:
        """theta^(t-1) -> theta^(t), and c -> e by our own counted update."""
        began, t, facts = time.monotonic(), manifest.round, self.exchange.told
        updates = self.outer.unpack_counted(t, contributions)
        factors = self.patience(partial(clip_factors, self.ledger, t, updates))
        if self.edge.upload:
            self.edge.upload.read.wait()  # then the anchor may change
        self.torn = True
        if params is not None and not self.carried:
            self.fold(params)
        returned = self._settle(manifest, updates.get(self.replica))
        self.outer.apply(t, updates, factors)
        self.hold(t)
        self.torn, self.exchange.told = False, None
        if manifest.closer == self.replica and t % self.ledger.run.recipe.bucket.anchor_every == 0:
            self._upload_anchor(t)
        if not self.background:
            self.edge.settle()
        if self.leads:
            self.retention.after(t)
        return Settled(t, self.replica in updates, returned, facts, time.monotonic() - began)

    def _settle(self, manifest: Manifest, listed: Payloads | None) -> Facts | None:
        """Apply the one rule for the feedback, whatever we hold: see `outer.feedback.settle`. Return the
        figures of an update of ours that does not count."""
        pending, self.pending, t = self.pending, None, manifest.round
        carried, self.carried = self.carried, False
        entry = manifest.entry(self.replica)
        known = entry is not None and entry.incarnation in self.exchange.starts
        self.unsaved |= carried and not (known if entry else self.exchange.committed)
        if listed is not None and not (carried and known):
            self._tell_unknown(t, known)
        self.outer.settle(listed, carried and known)
        if not carried or listed is not None:
            return None
        self.log(f"round {t} was settled without our update; it stays in the error feedback")
        if is_refused_too_often(self.ledger, self.replica, t, self.emptied_in):
            self.emptied_in = t
            self.outer.drop_feedback()
            self.log(
                f"round {t}: {REFUSALS} updates in a row were refused for their norm; the error feedback "
                "is emptied, with what they held"
            )
        return pending

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
        """Set the anchor's round; our next word to the others states its digest."""
        self.edge.hold(round_number, self.outer.digests_later())
        self.round = self.status.round = round_number
        self.round += 1
        self.settled.clear()

    def _upload_anchor(self, round_number: int) -> None:
        """Each process of a round's closer uploads the part that it trains."""
        if before := self.edge.upload:
            self.log(f"the anchor of round {round_number} is not written: {before.round}'s still goes up")
            return
        self.edge.upload = upload = AnchorUpload(self.ledger, round_number, self.outer.anchor_shards())
        if self.background:
            upload.start()
        else:
            upload.run()
            self.edge.share()

    # While the caller is elsewhere

    @property
    def usual_seconds(self) -> float:
        """Expected seconds of a round; 0 if unknown."""
        return self.exchange.rounds.seconds

    def waiting(self) -> tuple[bool, str, float | None]:
        """(whether a payload is missing, what we wait for, how long) for the heartbeat."""
        missing, patience = self.exchange.missing, self.patience
        awaiting = patience.awaiting or missing.awaiting or self.exchange.awaiting
        waited_seconds = patience.waited_seconds or missing.waited_seconds
        return missing.since is not None, awaiting, waited_seconds

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A call of ours runs: the thread stays away. What went wrong in it is raised here."""
        with self.lock:
            fault, self.fault = self.fault, None
            if fault:
                raise fault
            yield

    def _watch(self) -> None:
        while not self.ended.wait(self.look_seconds()):
            self.look_after()

    def look_seconds(self) -> float:
        """Seconds between two looks at the open round: more in rounds that are long."""
        before = self.ledger.known(self.round - 1)
        least, most = LOOK_SECONDS
        return min(most, max(least, before.seconds / MOST_LOOKS if before else 0.0))

    def look_after(self) -> None:
        """Look whether the open round was settled without us, and close it if it is overdue. Nothing happens
        while a call of ours runs."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._look()
            self.exchange.close_overdue()
        except StoreError:
            pass  # the next look may succeed, and the next call of ours waits for the store
        except Exception as error:
            self.fault = error
        finally:
            self.lock.release()

    def _look(self) -> None:
        if self.watching and not self.settled.is_set():
            with suppress(RunError):  # a round cannot be settled while the store is down
                if self.ledger.settled_at(self.round) is not None:
                    self.settled.set()


def is_refused_too_often(ledger: Ledger, replica: str, round_number: int, since: int = 0) -> bool:
    """Whether a replica's update to this round is the third in a row with too large a norm, after `since`.

    A replica does not judge its own norm before it sends: only a closer sees the others', and a fleet whose
    norms all grow must not stop sending. But wrong feedback persists through every refusal. The count is the
    manifests', so it survives a restart, and all processes of a replica reach the same.
    """
    refusals = 0
    for t in range(round_number, max(since, round_number - LOOK_BACK, 0), -1):
        manifest = ledger.manifest(t)
        if manifest is None or manifest.entry(replica) is not None:
            return False
        refusal = manifest.refusal(replica)
        if refusal is None:
            continue  # we were late or away
        if refusal.code != TOO_LARGE:
            return False
        refusals += 1
        if refusals == REFUSALS:
            return True
    return False
