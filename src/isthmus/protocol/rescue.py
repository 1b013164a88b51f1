"""A payload that a round counts and nobody finds: its readers ask each other, and wait in place.

Whoever applied the round still has the bytes while the next one trains; its author has them on its own disk.
So a reader that misses a shard asks, by `wanted/<replica>/<process>.json`: a round and hashes. Every process
looks there once a round, before it forgets the last one's payloads, and puts what it has below its own
payloads. Where the bytes are gone, a closer that is ahead writes an anchor out of turn. If nothing of that
comes, a decision may (`repairs`); until then the reader goes on waiting, and says for what.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from isthmus.errors import RunError
from isthmus.protocol.documents import MOST_WANTED
from isthmus.protocol.heartbeat import LOST
from isthmus.protocol.helper import Helper
from isthmus.protocol.patience import SLICE_SECONDS, LeftWaiting, Patience
from isthmus.protocol.trust import Refused, sha256
from isthmus.replica.control_group import ControlGroup, agree, all_true, any_true, share_json, whole_number
from isthmus.store import StoreError

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
    from isthmus.protocol.shards import ShardReader

    Missing = list[tuple[Entry, Shard, str]]  # of whose update, which shard, and why it cannot be read

T = TypeVar("T")

PAUSE_SECONDS = (1.0, 30.0)  # between looks for what is lost: short at first, then longer


class LedPast(RunError):
    """A later anchor leads past a round whose payloads are lost: go on from there."""

    def __init__(self, round_number: int, anchor: int) -> None:
        super().__init__(
            f"round {round_number} counts payloads that are lost; the anchor of round {anchor} leads past it"
        )
        self.round, self.anchor = round_number, anchor


class Rescue(Helper):
    """One process's part in it, on both sides."""

    def __init__(
        self,
        ledger: "Ledger",
        reader: "ShardReader",
        control: ControlGroup,
        log: Callable[[str], None],
        patience: Patience,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        """`tell` is told what this process waits for, for its heartbeat."""
        super().__init__(ledger, reader, control, log)
        self.tell, self.sleep, self.leave = tell, patience.sleep, patience.leave
        self.tried: set[tuple[int, int]] = set()  # (lost round, anchor that was to lead past it)
        self.since: float | None = None  # when we began to wait for what is lost

    @property
    def waited_seconds(self) -> float | None:
        """As a heartbeat says it; None while nothing is lost."""
        since = self.since
        return None if since is None else time.monotonic() - since

    def read(self, manifest: "Manifest", attempt: Callable[[], T]) -> T | None:
        """What `attempt` reads of a settled round, or None where a decision makes the round void.

        Where it is Refused, this waits: until all is found, a decision is made, or LedPast. All processes of
        a replica call this together.
        """
        if self._void(manifest.round, again=False):
            return None
        found: T | None = None
        with suppress(Refused):
            found = attempt()
        if all_true(self.control, found is not None):
            return found
        self.since = time.monotonic()
        try:
            return self._wait(manifest, attempt)
        finally:
            self.since = None
            self.tell("")
            self._answered()

    def _wait(self, manifest: "Manifest", attempt: Callable[[], T]) -> T | None:
        t, (pause, longest) = manifest.round, PAUSE_SECONDS
        waited, next_note = 0.0, 0.0
        while True:
            missing = self._within_reach([], partial(self._missing, manifest))
            if all_true(self.control, not missing and not self._away):
                return attempt()
            if self._void(t, again=True):
                return None
            self._look_past(t)
            self.tell(f"{LOST}payloads of round {t}; see `isthmus ledger repair`")
            if missing:
                self._within_reach(None, partial(self._ask, t, missing))
                if waited >= next_note:
                    self.log(self._words(t, missing))
                    next_note = max(30.0, 2 * waited)
            self._within_reach(0, self.give)
            self._pause(pause)
            waited, pause = waited + pause, min(longest, 2 * pause)

    def _pause(self, seconds: float) -> None:
        """LeftWaiting where somebody asks us to leave meanwhile."""
        while seconds > 0 and not (self.leave and self.leave.here()):
            self.sleep(min(seconds, SLICE_SECONDS))
            seconds -= SLICE_SECONDS
        if any_true(self.control, self.leave is not None and self.leave.pending()):
            raise LeftWaiting("left while it waited for payloads that are lost")

    _away = False  # did the store answer when we last looked?

    def _within_reach(self, otherwise: T, work: Callable[[], T]) -> T:
        """A store that is away comes back, and waiting is all we do here."""
        self._away = False
        try:
            return work()
        except StoreError as error:
            if error.kind == "config":
                raise
            self._away = True
            self.once(f"{error}; still trying")
            return otherwise

    def _missing(self, manifest: "Manifest") -> "Missing":
        missing: Missing = []
        for entry in manifest.entries:
            for index in self.reader.applies:
                try:
                    self.reader.read(entry.replica, manifest, entry.shards[index])
                except Refused as reason:
                    if not self._put_back(manifest.round, entry, entry.shards[index]):
                        missing.append((entry, entry.shards[index], str(reason)))
        return missing

    def _put_back(self, round_number: int, entry: "Entry", shard: "Shard") -> bool:
        """An update of our own is on our own disk. As a copy: we may not replace what lies in its place."""
        if entry.replica != self.ledger.signer.replica:
            return False
        data = self.saved(round_number).get(shard.index, b"")
        if sha256(data) != shard.digest:
            return False
        self.ledger.keep_shard(round_number, shard, data)
        self.reader.keep(entry.replica, shard, data)
        self.log(f"round {round_number}: our shard {shard.index} was lost; it is put again from this disk")
        return True

    def _words(self, round_number: int, missing: "Missing") -> str:
        entry, _, reason = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return (
            f"round {round_number} counts {entry.replica}, but {reason}{more}, and no copy is found; asking "
            "the others for one. If nobody has it, `isthmus ledger repair` decides how the run goes on"
        )

    def _ask(self, round_number: int, missing: "Missing") -> None:
        """Again at every look: a request that is renewed is one that somebody still has."""
        hashes = sorted({shard.digest for _, shard, _ in missing})
        body = {"round": round_number, "shards": hashes[:MOST_WANTED]}
        sealed = self.ledger.signer.seal("wanted", self.ledger.run.run_id, body)
        try:
            self.ledger.store.put(self.own_key, sealed, durable=False)
        except StoreError as error:
            if error.kind != "denied":
                raise
            self.once(f"these credentials may not ask for it: {error}")

    def _answered(self) -> None:
        """We ask for nothing any more. Who may not delete says so by an empty request."""
        with suppress(StoreError):
            try:
                self.ledger.store.delete(self.own_key)
            except StoreError as error:
                if error.kind == "denied":
                    self._ask(0, [])

    def _void(self, round_number: int, again: bool) -> bool:
        """Is the round void? All processes take the leader's answer."""
        repairs = self.ledger.repairs
        if again:
            repairs.refresh()
        void = self.leads and self._within_reach(False, lambda: repairs.is_void(round_number))
        if not agree(self.control, void):
            return False
        if not self.leads and not repairs.is_void(round_number):
            repairs.refresh()
            if not repairs.is_void(round_number):
                raise RunError(f"round {round_number} is void for stage 0 of this replica, and not for us")
        self.once(f"{repairs.decision(round_number)}: nothing of that is applied")
        return True

    def _look_past(self, round_number: int) -> None:
        """LedPast where a later anchor can be believed, and has not been tried."""
        anchor = self._within_reach(0, lambda: self._later_anchor(round_number)) if self.leads else 0
        anchor = share_json(self.control, anchor, whole_number)[0]
        if anchor:
            self.tried.add((round_number, anchor))
            raise LedPast(round_number, anchor)

    def _later_anchor(self, round_number: int) -> int:
        """Of all that are there: one that was written out of turn is among them."""
        for t in reversed(self.ledger.anchor_rounds()):
            if t >= round_number and (round_number, t) not in self.tried:
                with suppress(Refused):
                    writer, body = self.ledger.anchor_header(t)
                    self.ledger.check_witnessed(t, body["digest"], writer)
                    return t
        return 0
