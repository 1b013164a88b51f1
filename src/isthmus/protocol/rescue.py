"""A payload that a round counts and nobody finds: its readers ask each other, and wait in place.

Whoever applied the round still has the bytes while the next one trains; its author has them on its own disk.
So a reader that misses a shard asks, by `wanted/<replica>/<process>.json`: a round and hashes. Every process
looks there once a round, before it forgets the last one's payloads, and puts what it has below its own
payloads. Where the bytes are gone, a closer that is ahead writes an anchor out of turn. If nothing of that
comes, a decision may (`repairs`); until then the reader goes on waiting, and says for what.
"""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from isthmus.errors import RunError
from isthmus.protocol.documents import MOST_WANTED, WANTED
from isthmus.protocol.heartbeat import LOST
from isthmus.protocol.patience import SLICE_SECONDS, LeftWaiting, Patience
from isthmus.protocol.schema import check
from isthmus.protocol.trust import Refused, open_sealed, sha256
from isthmus.replica.control_group import ControlGroup, agree, all_true, any_true, share_json, whole_number
from isthmus.store import StoreError, StoreRefused

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
    from isthmus.protocol.shards import ShardReader
    from isthmus.store import Info

    Missing = list[tuple[Entry, Shard, str]]  # of whose update, which shard, and why it cannot be read

T = TypeVar("T")

PAUSE_SECONDS = (1.0, 30.0)  # between looks for what is lost: short at first, then longer
MAX_WANTED_BYTES = 2**16
MOST_GIVEN = 4096  # shards that we remember to have given


class LedPast(RunError):
    """A later anchor leads past a round whose payloads are lost: go on from there."""

    def __init__(self, round_number: int, anchor: int) -> None:
        super().__init__(
            f"round {round_number} counts payloads that are lost; the anchor of round {anchor} leads past it"
        )
        self.round, self.anchor = round_number, anchor


@dataclass(frozen=True, slots=True)
class Request:
    """What a process misses."""

    round: int
    hashes: frozenset[str]


class Rescue:
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
        self.ledger, self.reader, self.control, self.log = ledger, reader, control, log
        self.tell, self.sleep, self.leave = tell, patience.sleep, patience.leave
        self.saved: Callable[[int], Mapping[int, bytes]] = lambda round_number: {}  # our updates, on our disk
        self.own_key = f"wanted/{ledger.signer.replica}/{control.rank}.json"
        self.asks: dict[str, tuple[Info, Request | None]] = {}  # by key, as they were last read
        self.given: set[str] = set()
        self.unmet = 0  # the newest round of which somebody asked for what we do not have
        self.last_anchor = 0  # the last that we wrote out of turn
        self.tried: set[tuple[int, int]] = set()  # (lost round, anchor that was to lead past it)
        self.said: set[str] = set()
        self.since: float | None = None  # when we began to wait for what is lost

    @property
    def waited_seconds(self) -> float | None:
        """As a heartbeat says it; None while nothing is lost."""
        since = self.since
        return None if since is None else time.monotonic() - since

    @property
    def _leads(self) -> bool:
        return self.control.rank == 0

    # Who reads

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
            self._within_reach(0, self._give)
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
            self._once(f"{error}; still trying")
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
            self._once(f"these credentials may not ask for it: {error}")

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
        void = self._leads and self._within_reach(False, lambda: repairs.is_void(round_number))
        if not agree(self.control, void):
            return False
        if not self._leads and not repairs.is_void(round_number):
            repairs.refresh()
            if not repairs.is_void(round_number):
                raise RunError(f"round {round_number} is void for stage 0 of this replica, and not for us")
        self._once(f"{repairs.decision(round_number)}: nothing of that is applied")
        return True

    def _look_past(self, round_number: int) -> None:
        """LedPast where a later anchor can be believed, and has not been tried."""
        anchor = self._within_reach(0, lambda: self._later_anchor(round_number)) if self._leads else 0
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

    # Who helps

    def help(self) -> None:
        """Once a round, before its payloads are forgotten. It never fails: it is not our round that is lost.
        All processes of a replica call this together; the leader lists, the others only where somebody asks.
        """
        asked = self._leads and self._in_peace(False, lambda: self._give() > 0)
        if agree(self.control, asked) and not self._leads:
            self._in_peace(0, self._give)

    def _in_peace(self, otherwise: T, work: Callable[[], T]) -> T:
        try:
            return work()
        except (StoreError, StoreRefused, Refused) as error:
            self._once(f"nobody is helped to payloads that were lost: {error}")
            return otherwise

    def wants_anchor(self, round_number: int) -> bool:
        """Is an anchor wanted out of turn, after this round? Somebody misses what nobody gave. At most one
        for each that comes in its turn, so that a request costs no more than that."""
        every = self.ledger.run.recipe.bucket.anchor_every
        due = 0 < self.unmet <= round_number and round_number >= (self.last_anchor or -every) + every
        if due:
            self.last_anchor, self.unmet = round_number, 0
        return due

    def _give(self) -> int:
        """Put what others ask for and we have; how many ask."""
        asks, self.unmet = self._requests(), 0
        for request in asks:
            manifest = self.ledger.manifest(request.round) if request.round else None
            for entry in manifest.entries if manifest else ():
                for shard in entry.shards:
                    if shard.digest in request.hashes and not self._give_one(request.round, entry, shard):
                        self.unmet = max(self.unmet, request.round)
        return len(asks)

    def _give_one(self, round_number: int, entry: "Entry", shard: "Shard") -> bool:
        key = self.ledger.kept_key("", round_number, shard)
        if key in self.given:
            return True
        data = self.reader.held_bytes(shard.digest)
        if data is None and entry.replica == self.ledger.signer.replica:
            data = self.saved(round_number).get(shard.index)
        if data is None or sha256(data) != shard.digest:
            return False
        self.ledger.keep_shard(round_number, shard, data)
        if len(self.given) >= MOST_GIVEN:
            self.given.clear()
        self.given.add(key)
        self.log(
            f"round {round_number}: shard {shard.index} of {entry.replica} is lost; here is a copy of ours"
        )
        return True

    def _requests(self) -> list[Request]:
        """What others ask for. A request is read once, and again when it was renewed."""
        most = sum(member.config.parts for member in self.ledger.run.recipe.fleet())
        listed = self.ledger.store.scan("wanted", most=2 * most + 1000)
        names = {key: name for key in listed if (name := self._asker(key, most))}
        self.asks = {key: known for key, known in self.asks.items() if key in names}
        for key, name in names.items():
            if key not in self.asks or self.asks[key][0] != listed[key]:
                self.asks[key] = listed[key], self._request(key, name)
        return [request for _, request in self.asks.values() if request and request.hashes]

    def _asker(self, key: str, most: int) -> str:
        found = re.fullmatch(r"wanted/([\w-]+)/([0-9]{1,4})\.json", key)
        if not found or key == self.own_key or found[1] not in self.ledger.names or int(found[2]) >= most:
            return ""
        return found[1]

    def _request(self, key: str, name: str) -> Request | None:
        run = self.ledger.run
        try:
            sealed = self.ledger.get_document(key, MAX_WANTED_BYTES)
            signer, body = open_sealed(sealed or b"", "wanted", run.run_id, run.keys)
            check(body, WANTED)
        except (Refused, StoreRefused):
            return None
        return Request(body["round"], frozenset(body["shards"])) if signer == name else None

    def _once(self, words: str) -> None:
        if words not in self.said:
            if len(self.said) >= 100:
                self.said.clear()
            self.said.add(words)
            self.log(words)
