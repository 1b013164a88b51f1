"""`isthmus ledger verify`: a run's history checked again, and what that check could and could not show."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.errors import RunError
from isthmus.model.digest import anchor_digest, shard_digest
from isthmus.protocol.chain import gone
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.replay import Replay
from isthmus.protocol.trust import Refused
from isthmus.store import StoreRefused

MOST_NAMED = 12  # anchors, one by one
IN_MANIFESTS, IN_PAYLOADS = "in the manifests", "in payloads/, as runs up to 0.2 keep them"


@dataclass(kw_only=True)
class Audit:
    """What was checked of rounds `first` to `rounds`. Whatever failed would have been an exception."""

    rounds: int
    first: int = 1  # the manifests before it were not read
    settled: int = 0  # rounds of the run
    begins_with: int  # the replay starts at theta of this round
    start: str  # whose word that theta is
    digest: str = ""  # of theta after the last round
    updates: int = 0  # replayed: hash, codec and norm
    commits: int = 0  # of all rounds: signed by their authors, for this round, anchor and shards
    commits_are: str = IN_MANIFESTS
    without_commit: list[str] = field(default_factory=list)  # updates that only their closer speaks for
    anchors: list[int] = field(default_factory=list)  # in the bucket
    anchors_replayed: list[int] = field(default_factory=list)  # the same as replaying gives
    last_signed: int = 0  # the newest theta whose digest contributors have signed
    void: list[str] = field(default_factory=list)  # rounds of which nothing is applied, by whose decision

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        return {"from": facts.pop("begins_with"), "to": facts.pop("rounds")} | facts

    def _manifests(self) -> str:
        if self.first == 1:
            return f"all {self.rounds} manifests"
        return f"the manifests of rounds {self.first} to {self.rounds}"

    def to_lines(self) -> list[str]:
        first, last = self.begins_with + 1, self.rounds
        lines = [
            f"rounds {first} to {last} replay to anchor {self.digest[:16]}"
            if first <= last
            else f"no round is replayed: theta^({last}), anchor {self.digest[:16]}, is taken from the bucket",
            f"checked: the chain of {self._manifests()}, their closers' signatures, and {self.commits} "
            f"commits by the signatures of their authors ({self.commits_are})",
            f"checked: hash, codec and norm of the {self.updates} updates that were replayed; they start "
            f"from {self.start}",
        ]
        if self.anchors_replayed:
            lines.append(f"checked: {_anchors(self.anchors_replayed)} are what replaying gives")
        if self.first > 1:
            lines.append(f"not checked: the manifests of rounds 1 to {self.first - 1}, which were not read")
        if self.settled > last:
            lines.append(f"not checked: rounds {last + 1} to {self.settled}, which are settled too")
        if self.begins_with:
            lines.append(
                f"not checked: the updates of rounds 1 to {self.begins_with}, which were not replayed"
            )
        if passed := sorted(set(self.anchors) - set(self.anchors_replayed) - {self.begins_with}):
            lines.append(f"not checked: {_anchors(passed)}")
        if self.without_commit:
            shown = ", ".join(self.without_commit[:5]) + ", ..." * (len(self.without_commit) > 5)
            lines.append(f"only its closer's word: that the author of an update sent it ({shown})")
        lines += [f"{words}: nothing of that is applied" for words in self.void]
        if self.last_signed < last:
            lines.append(f"theta^({last}) follows from these rounds; no later round has confirmed it yet")
        return lines


def _anchors(numbers: list[int]) -> str:
    if len(numbers) > MOST_NAMED:
        return f"{len(numbers)} anchors, of rounds {numbers[0]} to {numbers[-1]},"
    return f"the anchors of rounds {', '.join(map(str, numbers))}"


def audit(
    ledger: Ledger, start: int = 0, end: int | None = None, tell: Callable[[int, int], None] = lambda *n: None
) -> Audit:
    """Replay the rounds from theta^(0), or from `start` or the first round that has its payloads, and check
    all that is there; RunError names what is false. With a `start` no manifest before it is read but those
    that speak for the anchor. `tell` hears how many of how many rounds are done."""
    last, every = ledger.last_round(), range(len(ledger.shards))
    end = last if end is None else min(end, last)
    replay = Replay(ledger, _first_with_payloads(ledger, start + 1, end) - 1)
    first = replay.round + 1 if start else 1
    found = Audit(
        rounds=end, first=first, settled=last, begins_with=replay.round, start=_whose(ledger, replay)
    )
    listed = [t for t in ledger.anchor_rounds() if first - 1 <= t <= end]
    found.anchors = [t for t in listed if not ledger.repairs.is_void(t)]
    anchors = set(found.anchors)
    for manifest in ledger.between(first, replay.round):
        _check_commits(ledger, manifest, found)
        tell(manifest.round - first + 1, end - first + 1)
    ledger.expect(end)
    while replay.round < end:
        manifest = replay.step()
        if manifest is None:
            raise gone(replay.round + 1)
        _check_commits(ledger, manifest, found)
        found.updates += 0 if ledger.repairs.is_void(manifest.round) else len(manifest.entries)
        if replay.round in anchors:
            stated, tensors = ledger.read_anchor(replay.round, every, witnessed=False)
            computed = anchor_digest([shard_digest(tensors, names) for names in ledger.shards])
            if not stated == computed == replay.digest():
                writer, _ = ledger.anchor_header(replay.round)
                words = f"the anchor of round {replay.round}, written by {writer},"
                raise RunError(f"{words} is not what replaying gives")
            found.anchors_replayed.append(replay.round)
        tell(replay.round - first + 1, end - first + 1)
    found.digest = replay.digest()
    found.void = [str(decision) for decision in ledger.repairs.decisions()]
    found.last_signed = found.rounds - 1 if ledger.run.commits_in_manifests else 0
    return found


def _whose(ledger: Ledger, replay: Replay) -> str:
    if replay.round:
        words = ledger.check_witnessed(replay.round, replay.digest(), "its writer")
        return f"the anchor of round {replay.round}, whose digest is signed by {words}"
    return "theta^(0) as run.json names it" if ledger.run.start else "theta^(0) as the recipe's seed draws it"


def _first_with_payloads(ledger: Ledger, first: int, last: int) -> int:
    """The oldest round that can be replayed; last + 1 where none can. They are swept from the first one on,
    so doubling steps find it."""
    without, step = first - 1, 1
    while (t := min(without + step, last)) > without and not ledger.has_payloads(t):
        without, step = t, 2 * step
    while t - without > 1:
        middle = (without + t) // 2
        without, t = (without, middle) if ledger.has_payloads(middle) else (middle, t)
    return without + 1


def _check_commits(ledger: Ledger, manifest: Manifest, found: Audit) -> None:
    """Of every entry of a round: reading the manifest has checked those that are in it."""
    for entry in manifest.entries:
        if entry.proved:
            found.commits += 1
            continue
        found.commits_are = IN_PAYLOADS
        try:
            sealed = ledger.get_commit(entry.replica, manifest.round)
            if sealed is None:
                raise Refused("it is gone")
            signed = ledger.check_commit(sealed, entry.replica, manifest.round, manifest.anchor)
            if signed.shards != entry.shards:
                raise Refused("it lists other shards")
            found.commits += 1
        except (Refused, StoreRefused):
            found.without_commit.append(f"{entry.replica} in round {manifest.round}")
