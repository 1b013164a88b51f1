"""A closer's judgement of the updates to one round: it reads each new commit and judges it once."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from isthmus.errors import RunError
from isthmus.outer.aggregate import squared_norm
from isthmus.printing import visible
from isthmus.protocol.documents import MOST_WORDS, Commit, Entry, Manifest, Refusal, Shard, Skip
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.norms import compare_norms
from isthmus.protocol.shards import ShardReader, unpack_shards
from isthmus.protocol.trust import OtherAnchor, Refused, sha256
from isthmus.store import StoreRefused, Unreadable
from isthmus.store.together import together

if TYPE_CHECKING:
    from isthmus.store import Info

MOST_AT_ONCE = 64  # parallel requests of the closer in turn
MOST_VERDICTS = 3  # per replica and round; all but the last were refusals


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a replica's commit. The first good one stands, whatever its author puts there later."""

    commit: str  # its hash
    result: Entry | Skip | Refused
    number: int  # counts the replica's verdicts in this round

    @property
    def stands(self) -> bool:
        return not isinstance(self.result, Refused) or self.number == MOST_VERDICTS


class Judge:
    """Commits found and their verdicts. Call `begin` for each round."""

    def __init__(self, ledger: Ledger, reader: ShardReader) -> None:
        self.ledger, self.reader = ledger, reader
        self.recipe, self.own = ledger.run.recipe, ledger.signer.replica
        self.note = ""  # the last comparison's note on updates that differ and stay
        self.begin(0)

    def begin(self, round_number: int) -> None:
        self.round = round_number
        self.listed: dict[str, Info] = {}  # replica -> its listed commit
        self.commits: dict[str, bytes] = {}  # as read
        self.faults: dict[str, StoreRefused] = {}  # why an object in the place of a commit cannot be read
        self.read: dict[str, Info] = {}  # the listing's entry at the time of the read
        self.given: dict[str, Verdict] = {}  # by replica

    @property
    def there(self) -> set[str]:
        """Replicas known to have delivered; their commits need not be good."""
        return {*self.listed, *self.commits, *self.good(), *self.skipped()} - self.faults.keys()

    def good(self) -> dict[str, Entry]:
        return {name: v.result for name, v in self.given.items() if isinstance(v.result, Entry)}

    def skipped(self) -> dict[str, Skip]:
        return {name: v.result for name, v in self.given.items() if isinstance(v.result, Skip)}

    def refused(self) -> dict[str, Refused]:
        return {name: v.result for name, v in self.given.items() if isinstance(v.result, Refused)}

    def other_anchors(self) -> list[str]:
        """The anchors of commits that do not start from ours."""
        return [reason.anchor for reason in self.refused().values() if isinstance(reason, OtherAnchor)]

    # Reading commits

    def look(self) -> None:
        """List the commits that exist; read none."""
        self.listed = self.ledger.scan_commits(self.round)

    def fetch(self) -> None:
        """Read the commits that are new or changed."""
        self._read([n for n in self.listed if n in self.faults or self.read.get(n) != self.listed[n]])

    def ask(self, names: Iterable[str]) -> None:
        """Read commits that are not listed: a listing may lag, and omits what is not an object."""
        self._read([name for name in names if name not in self.commits])

    def _read(self, names: Collection[str]) -> None:
        names = [name for name in names if not (name in self.given and self.given[name].stands)]
        calls = [partial(self._get, name) for name in names]
        for name, found in zip(names, together(calls, MOST_AT_ONCE), strict=True):
            self.faults.pop(name, None)
            if isinstance(found, StoreRefused):
                self.commits.pop(name, None)
                self.faults[name] = found
            elif found is not None:
                self.commits[name] = found
            if name in self.listed:
                self.read[name] = self.listed[name]

    def _get(self, name: str) -> bytes | StoreRefused | None:
        try:
            return self.ledger.get_commit(name, self.round)
        except StoreRefused as error:
            return error

    def check_readable(self) -> None:
        """Raise RunError if no other replica's commit can be read: we would refuse all and run alone. Asked
        when the round could close, since two quick authors of junk are not everybody."""
        unreadable = [why for why in self.faults.values() if isinstance(why, Unreadable)]
        if len(unreadable) > 1 and not (self.commits.keys() | self.good()) - {self.own}:
            raise RunError(
                f"no commit of another replica can be read: are these credentials right? {unreadable[0]}"
            )

    # Judging

    def judge(self, anchor: str) -> bool:
        """Judge each replica once; return whether it read an update. A commit that replaces a refused one is
        judged too, a few times."""
        updates: dict[str, Commit] = {}
        for name, data in self.commits.items():
            before = self.given.get(name)
            if before and (before.stands or before.commit == sha256(data)):
                continue
            try:
                commit = self.ledger.check_commit(data, name, self.round, anchor)
            except Refused as reason:
                self._decide(name, reason)
                continue
            if commit.skip:
                self._decide(name, Skip(name, commit.skip))
            else:
                updates[name] = commit
        calls = [partial(self._shard, name, s) for name, commit in updates.items() for s in commit.shards]
        shards = iter(together(calls, MOST_AT_ONCE))
        for name, commit in updates.items():
            packed = [next(shards) for _ in commit.shards]
            try:
                self._decide(name, judged(self.ledger, name, commit, packed))
            except Refused as reason:
                self._decide(name, reason)
        return bool(updates)

    def _shard(self, name: str, shard: Shard) -> bytes | Refused:
        try:
            return self.reader.read(name, self.round, shard)
        except Refused as reason:
            return reason

    def _decide(self, name: str, result: Entry | Skip | Refused) -> None:
        before = self.given.get(name)
        if isinstance(result, Refused):
            # Without its frames and context, which would keep the payload alive.
            result.__context__, result = None, result.with_traceback(None)
            self.reader.drop(name)
        self.given[name] = Verdict(sha256(self.commits[name]), result, before.number + 1 if before else 1)

    def compare(self, previous: Manifest | None) -> tuple[dict[str, Entry], dict[str, Refusal]]:
        """(accepted, refused with the reason) of all that was found and gives something."""
        good = self.good()
        faults = {name: Refused(f"the commit: {why}", "unreadable") for name, why in self.faults.items()}
        before = {entry.replica: entry.norm for entry in previous.entries} if previous else {}
        norms = {name: entry.norm for name, entry in good.items()}
        compared = compare_norms(norms, before, self.recipe.bucket.norm_limit)
        self.note = compared.note
        refused = {name: why for name, why in (faults | self.refused()).items() if name not in good}
        refused |= compared.refused
        accepted = {name: entry for name, entry in good.items() if name not in refused}
        return accepted, {
            name: Refusal(name, why.code, visible(str(why)[:MOST_WORDS])[:MOST_WORDS])
            for name, why in refused.items()
        }


def judged(ledger: Ledger, replica: str, commit: Commit, packed: Sequence[bytes | Refused]) -> Entry:
    """A checked commit as a manifest lists it, with the norm of its update; or Refused with the reason."""
    square = 0.0
    for shard, data in zip(commit.shards, packed, strict=True):
        if isinstance(data, Refused):
            raise data
        square += float(squared_norm(unpack_shards(ledger, {shard.index: data})))
        if not math.isfinite(square):
            raise Refused(f"shard {shard.index} is not finite", "not_finite")
    return Entry(replica, commit.shards, math.sqrt(square), commit.facts, commit.incarnation)
