"""The other side of `rescue`: what others miss of a settled round, and we still have.

A request is a stranger's: signed by who asks, bounded, and answered only where a settled round counts it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from isthmus.errors import RunError
from isthmus.protocol.documents import WANTED
from isthmus.protocol.schema import check
from isthmus.protocol.trust import Refused, open_sealed, sha256
from isthmus.replica.control_group import ControlGroup, agree
from isthmus.store import StoreRefused

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Entry, Ledger, Shard
    from isthmus.protocol.shards import ShardReader
    from isthmus.store import Info

T = TypeVar("T")

MAX_WANTED_BYTES = 2**16
MOST_GIVEN = 4096  # shards that we remember to have given


@dataclass(frozen=True, slots=True)
class Request:
    """What a process misses."""

    round: int
    hashes: frozenset[str]


class Helper:
    """One process that looks, once a round, what others ask for."""

    def __init__(
        self, ledger: "Ledger", reader: "ShardReader", control: ControlGroup, log: Callable[[str], None]
    ) -> None:
        self.ledger, self.reader, self.control, self.log = ledger, reader, control, log
        self.saved: Callable[[int], Mapping[int, bytes]] = lambda round_number: {}  # our updates, on our disk
        self.own_key = f"wanted/{ledger.signer.replica}/{control.rank}.json"
        self.asks: dict[str, tuple[Info, Request | None]] = {}  # by key, as they were last read
        self.given: set[str] = set()
        self.unmet = 0  # the newest round of which somebody asked for what we do not have
        self.last_anchor = 0  # the last that we wrote out of turn
        self.said: set[str] = set()

    @property
    def leads(self) -> bool:
        return self.control.rank == 0

    def help(self) -> None:
        """Once a round, before its payloads are forgotten. It never fails: it is not our round that is lost.
        All processes of a replica call this together; the leader lists, the others only where somebody asks.
        """
        asked = self.leads and self._in_peace(False, lambda: self.give() > 0)
        if agree(self.control, asked) and not self.leads:
            self._in_peace(0, self.give)

    def _in_peace(self, otherwise: T, work: Callable[[], T]) -> T:
        try:
            return work()
        except (RunError, StoreRefused, Refused) as error:  # a StoreError is a RunError
            self.once(f"could not look whether somebody lost payloads that we have: {error}")
            return otherwise

    def wants_anchor(self, round_number: int) -> bool:
        """Is an anchor wanted out of turn, after this round? Somebody misses what nobody gave. At most one
        for each that comes in its turn, so that a request costs no more than that."""
        every = self.ledger.run.recipe.bucket.anchor_every
        due = 0 < self.unmet <= round_number and round_number >= (self.last_anchor or -every) + every
        if due:
            self.last_anchor, self.unmet = round_number, 0
        return due

    def give(self) -> int:
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

    def once(self, words: str) -> None:
        if words not in self.said:
            if len(self.said) >= 100:
                self.said.clear()
            self.said.add(words)
            self.log(words)
