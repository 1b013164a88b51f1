"""A closer's judgement of the updates to one round: each commit is read when it is new, and judged once."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.config import ScoreConfig
from isthmus.errors import RunError
from isthmus.printing import visible
from isthmus.protocol.compare import compare
from isthmus.protocol.documents import MOST_REASON
from isthmus.protocol.judge import judge
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.scores import RoundScores
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.signs import SignReader
from isthmus.protocol.trust import OtherAnchor, Refused, sha256
from isthmus.sparse import SparseChunks
from isthmus.store import StoreRefused, Unreadable
from isthmus.store.together import as_they_come

if TYPE_CHECKING:
    from isthmus.store import Info

MOST_AT_ONCE, FEWEST_AT_ONCE = 64, 4  # requests of the one closer that works
BYTES_AT_ONCE = 1 << 28  # of shards that are being read
NO_SCORES = ScoreConfig(batches=0)
MOST_VERDICTS = 3  # on commits of one replica in a round, of which all but the last were refused


# The score of a replica's update to a round, from the round's draw and its shards (`replica.usefulness`).
ScoreUpdate = Callable[[str, int, bytes, Mapping[int, bytes]], float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a replica's commit. The first that is good stands, whatever its author puts there later."""

    commit: str  # its hash
    result: Entry | Refused
    number: int  # of the replica's verdicts in this round

    @property
    def stands(self) -> bool:
        return isinstance(self.result, Entry) or self.number == MOST_VERDICTS


class Verdicts:
    """Commits that were found, and what came of them. `begin` is called for each round."""

    def __init__(
        self,
        ledger: Ledger,
        reader: ShardReader,
        score: ScoreUpdate | None = None,
        log: Callable[[str], None] = lambda words: None,
    ) -> None:
        """`score` None: this closer has not the whole model, or no text."""
        self.ledger, self.reader, self.score, self.log = ledger, reader, score, log
        self.score_seconds = self.last_score_seconds = 0.0  # in this round, and in the last that had any
        self.recipe, self.own = ledger.run.recipe, ledger.signer.replica
        self.sign_reader, self.signs = SignReader(self.recipe), dict[str, Tensor]()  # of those who are good
        self.num_replicas = self.recipe.num_replicas
        self.note = ""  # what the last comparison says of those who differ and were not refused
        self.begin(0)

    def begin(self, round_number: int) -> None:
        self.round, recipe = round_number, self.ledger.at(round_number).recipe
        if recipe.num_replicas != self.num_replicas:
            self.sign_reader, self.num_replicas = SignReader(recipe), recipe.num_replicas
        self.listed: dict[str, Info] = {}  # whose commits are there
        self.commits: dict[str, bytes] = {}  # as read
        self.faults: dict[str, str] = {}  # why an object in the place of a commit cannot be read
        self.unreadable: dict[str, Unreadable] = {}  # those that the store gives to nobody, or not to us
        self.read: dict[str, Info] = {}  # as listed when it was read
        self.given: dict[str, Verdict] = {}  # by replica
        self.signs.clear()
        self.last_score_seconds, self.score_seconds = self.score_seconds or self.last_score_seconds, 0.0
        self.scores = self._round_scores(round_number)

    def _round_scores(self, round_number: int) -> RoundScores:
        """Ed25519 is deterministic: a closer that starts again draws the same, and nobody else can."""
        if round_number == 0:
            return RoundScores(NO_SCORES, (), {}, b"", lambda name: None)
        run = self.ledger.at(round_number)
        signature = self.ledger.signer.sign("score", run.run_id, round_number.to_bytes(8))
        draw, probation = hashlib.sha256(signature).digest(), self.ledger.on_probation(round_number)
        settings = run.recipe.score if run.scores else NO_SCORES
        return RoundScores(settings, run.keys, probation, draw, partial(self._score, draw))

    def _score(self, draw: bytes, name: str) -> float | None:
        entry = self.good().get(name)
        if entry is None or self.score is None:
            return None
        shards = {shard.index: self.reader.judged(name, self.round, shard) for shard in entry.shards}
        began = time.monotonic()
        try:
            return self.score(name, self.round, draw, shards)
        except RuntimeError as error:  # torch's: most often there is no memory for it
            self.log(f"round {self.round}: updates are not scored here: {visible(str(error))[:MOST_REASON]}")
            self.score = None
            return None
        finally:
            self.score_seconds += time.monotonic() - began

    @property
    def there(self) -> set[str]:
        """Who has delivered, as far as is known; their commits need not be good."""
        return {*self.listed, *self.commits, *self.good()} - self.faults.keys()

    def good(self) -> dict[str, Entry]:
        return {name: v.result for name, v in self.given.items() if isinstance(v.result, Entry)}

    def refused(self) -> dict[str, Refused]:
        return {name: v.result for name, v in self.given.items() if isinstance(v.result, Refused)}

    def other_anchors(self) -> dict[str, str]:
        """replica -> the anchor that it starts from, where that is not ours."""
        return {name: r.anchor for name, r in self.refused().items() if isinstance(r, OtherAnchor)}

    # Reading commits

    def look(self) -> None:
        """See whose commits are there; none is read."""
        self.listed = self.ledger.scan_commits(self.round)

    def fetch(self) -> None:
        """Read the commits that are new since they were read."""
        self._read([n for n in self.listed if n in self.faults or self.read.get(n) != self.listed[n]])

    def ask(self, names: Iterable[str]) -> None:
        """Read commits that are not listed: a listing may lag, and leaves out what is no object."""
        self._read([name for name in names if name not in self.commits])

    def _read(self, names: Collection[str]) -> None:
        names = [name for name in names if not (name in self.given and self.given[name].stands)]
        calls = [partial(self._get, name) for name in names]
        for name, found in zip(names, self.ledger.store.together(calls, MOST_AT_ONCE), strict=True):
            self.faults.pop(name, None)
            self.unreadable.pop(name, None)
            if isinstance(found, StoreRefused):
                self.commits.pop(name, None)
                self.faults[name] = printable(f"the commit: {found}")
                if isinstance(found, Unreadable):
                    self.unreadable[name] = found
            elif found is not None:
                self.commits[name] = found
            if name in self.listed:
                self.read[name] = self.listed[name]

    def check_readable(self) -> None:
        """RunError where no commit of another can be read: else we would refuse everybody, and the run would
        be ours. Asked when the round could close: two who are quick and put junk are not everybody."""
        if len(self.unreadable) > 1 and not (self.commits.keys() | self.good()) - {self.own}:
            why = next(iter(self.unreadable.values()))
            raise RunError(f"no commit of another replica can be read: are these credentials right? {why}")

    def _get(self, name: str) -> bytes | StoreRefused | None:
        try:
            return self.ledger.get_commit(name, self.round)
        except StoreRefused as error:
            return error

    # Judging

    def judge(self, anchor: str) -> bool:
        """One verdict for each replica; was there anything to judge? A commit that replaces a refused one is
        judged too, a few times.

        Shards are copied and read several at a time, and an update is judged when all of its own have come.
        """
        wanted: list[tuple[str, Shard]] = []
        missing: dict[str, set[int]] = {}
        for name, data in self.commits.items():
            if not self._to_judge(name, data):
                continue
            try:
                entry = self.ledger.check_commit(data, name, self.round, anchor)
            except Refused:
                self._decide(name, anchor, {})  # for the reason
                continue
            missing[name] = {shard.index for shard in entry.shards}
            wanted += [(name, shard) for shard in entry.shards]
        found: dict[str, dict[int, bytes | Refused]] = {name: {} for name in missing}
        calls = (((name, shard.index), partial(self._shard, name, shard)) for name, shard in wanted)
        room = BYTES_AT_ONCE // max(self.ledger.sizes, default=1)
        for (name, index), data in as_they_come(calls, max(FEWEST_AT_ONCE, min(room, MOST_AT_ONCE))):
            found[name][index] = data
            missing[name].discard(index)
            if not missing[name]:
                self._decide(name, anchor, found.pop(name))
                if name in self.good() and self.scores.wants(name):
                    self.scores.of(name)  # now, while others are still awaited
        return bool(wanted)

    def _to_judge(self, name: str, data: bytes) -> bool:
        before = self.given.get(name)
        return before is None or (not before.stands and before.commit != sha256(data))

    def _shard(self, name: str, shard: Shard) -> bytes | Refused:
        try:
            return self.reader.judged(name, self.round, shard)
        except Refused as reason:
            return _alone(reason)

    def _decide(self, name: str, anchor: str, shards: Mapping[int, bytes | Refused]) -> None:
        data, before = self.commits[name], self.given.get(name)
        result = self._verdict(data, name, anchor, shards)
        self.given[name] = Verdict(sha256(data), result, before.number + 1 if before else 1)
        if isinstance(result, Refused):
            self.reader.drop(name)

    def _verdict(
        self, data: bytes, name: str, anchor: str, shards: Mapping[int, bytes | Refused]
    ) -> Entry | Refused:
        signs: list[Tensor] = []

        def note(payloads: Mapping[str, SparseChunks]) -> None:
            signs.append(self.sign_reader.read(payloads))

        def read(replica: str, round_number: int, shard: Shard) -> bytes:
            if isinstance(found := shards[shard.index], Refused):
                raise found
            return found

        try:
            entry = judge(self.ledger, data, name, self.round, anchor, read, note)
            self.signs[name] = torch.cat(signs)
            return entry
        except Refused as reason:
            return _alone(reason)

    def compare(self, previous: Manifest | None) -> tuple[dict[str, Entry], dict[str, str]]:
        """(accepted, refused with the reason) of all that was judged."""
        good = self.good()
        refused = {name: printable(str(reason)) for name, reason in self.refused().items()}
        before = {entry.replica: entry.norm for entry in previous.entries} if previous else {}
        norms = {name: entry.norm for name, entry in good.items()}
        signs = {name: self.signs[name] for name in good}
        compared = compare(signs, norms, before, self.scores, self.recipe.bucket)
        self.note = compared.note
        refused |= compared.refused
        return {name: entry for name, entry in good.items() if name not in refused}, refused


def _alone(reason: Refused) -> Refused:
    """With their frames, it and its context would keep the payload alive."""
    reason.__context__ = None
    return reason.with_traceback(None)


def printable(text: str) -> str:
    return visible(text[:MOST_REASON])[:MOST_REASON]
