"""A closer's judgement of the updates to one round: it reads each new commit and judges it once."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from isthmus.errors import RunError
from isthmus.printing import visible
from isthmus.protocol.documents import MOST_WORDS, Entry, Manifest, Refusal, Shard, Skip
from isthmus.protocol.judge import judge
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.norms import compare_norms
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.trust import OtherAnchor, Refused, sha256
from isthmus.store import StoreRefused, Unreadable
from isthmus.store.together import as_they_come, together

if TYPE_CHECKING:
    from isthmus.store import Info

MOST_AT_ONCE, FEWEST_AT_ONCE = 64, 4  # parallel requests of the closer in turn
BYTES_AT_ONCE = 1 << 28  # of shards in parallel reads
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


class Verdicts:
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
        self.faults: dict[str, Refused] = {}  # why an object in the place of a commit cannot be read
        self.unreadable: dict[str, Unreadable] = {}  # commits that the store gives to nobody, or not to us
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

    def other_anchors(self) -> dict[str, str]:
        """replica -> the anchor it starts from, if that is not ours."""
        return {name: r.anchor for name, r in self.refused().items() if isinstance(r, OtherAnchor)}

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
            self.unreadable.pop(name, None)
            if isinstance(found, StoreRefused):
                self.commits.pop(name, None)
                self.faults[name] = Refused(f"the commit: {found}", "unreadable")
                if isinstance(found, Unreadable):
                    self.unreadable[name] = found
            elif found is not None:
                self.commits[name] = found
            if name in self.listed:
                self.read[name] = self.listed[name]

    def check_readable(self) -> None:
        """Raise RunError if no other replica's commit can be read: we would refuse all and run alone. Asked
        when the round could close, since two quick authors of junk are not everybody."""
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
        """Judge each replica once; return whether there was anything to judge. A commit that replaces a
        refused one is judged too, a few times.

        It reads several shards at a time, and judges an update once all its shards are read.
        """
        wanted: list[tuple[str, Shard]] = []
        missing: dict[str, set[int]] = {}
        for name, data in self.commits.items():
            if not self._to_judge(name, data):
                continue
            try:
                commit = self.ledger.check_commit(data, name, self.round, anchor)
            except Refused:
                self._decide(name, anchor, {})  # record the reason
                continue
            if commit.skip:
                self._decide(name, anchor, {})
                continue
            missing[name] = {shard.index for shard in commit.shards}
            wanted += [(name, shard) for shard in commit.shards]
        found: dict[str, dict[int, bytes | Refused]] = {name: {} for name in missing}
        calls = (((name, shard.index), partial(self._shard, name, shard)) for name, shard in wanted)
        room = BYTES_AT_ONCE // max(self.ledger.sizes, default=1)
        for (name, index), data in as_they_come(calls, max(FEWEST_AT_ONCE, min(room, MOST_AT_ONCE))):
            found[name][index] = data
            missing[name].discard(index)
            if not missing[name]:
                self._decide(name, anchor, found.pop(name))
        return bool(wanted)

    def _to_judge(self, name: str, data: bytes) -> bool:
        before = self.given.get(name)
        return before is None or (not before.stands and before.commit != sha256(data))

    def _shard(self, name: str, shard: Shard) -> bytes | Refused:
        try:
            return self.reader.read(name, self.round, shard)
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
    ) -> Entry | Skip | Refused:
        def read(replica: str, round_number: int, shard: Shard) -> bytes:
            if isinstance(found := shards[shard.index], Refused):
                raise found
            return found

        try:
            return judge(self.ledger, data, name, self.round, anchor, read)
        except Refused as reason:
            return _alone(reason)

    def compare(self, previous: Manifest | None) -> tuple[dict[str, Entry], dict[str, Refusal]]:
        """(accepted, refused with the reason) of all that was found and gives something."""
        good, refused = self.good(), {**self.faults, **self.refused()}
        before = {entry.replica: entry.norm for entry in previous.entries} if previous else {}
        norms = {name: entry.norm for name, entry in good.items()}
        compared = compare_norms(norms, before, self.recipe.bucket.norm_limit)
        self.note = compared.note
        refused = {name: why for name, why in refused.items() if name not in good} | compared.refused
        accepted = {name: entry for name, entry in good.items() if name not in refused}
        return accepted, {name: _refusal(name, why) for name, why in refused.items()}


def _alone(reason: Refused) -> Refused:
    """Drop the frames and context of a refusal, which would keep the payload alive."""
    reason.__context__ = None
    return reason.with_traceback(None)


def _refusal(name: str, why: Refused) -> Refusal:
    return Refusal(name, why.code, visible(str(why)[:MOST_WORDS])[:MOST_WORDS])
