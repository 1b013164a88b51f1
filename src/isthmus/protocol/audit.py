"""`isthmus ledger verify`: check a run's history again, and report what the check could not show."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from isthmus.errors import RunError
from isthmus.model.digest import anchor_digest, shard_digest
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.replay import Replay

MOST_NAMED = 12  # anchors listed one by one


@dataclass(kw_only=True)
class Audit:
    """What was checked of rounds `first` to `rounds`. Any failure raises instead."""

    rounds: int
    first: int = 1  # earlier manifests were not read
    settled: int = 0  # settled rounds of the run
    begins_with: int  # the replay starts at theta of this round
    start: str  # who vouches for that theta
    digest: str = ""  # of theta after the last round
    updates: int = 0  # replayed updates, with hash and codec checked
    anchors: list[int] = field(default_factory=list)  # in the bucket
    anchors_replayed: list[int] = field(default_factory=list)  # those whose digest the replay reproduced

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
            f"checked: the chain of {self._manifests()} and their closers' signatures",
            f"checked: hash and codec of the {self.updates} updates that were replayed; they start from "
            f"{self.start}",
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
        if self.settled == last:
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
    everything that is there; RunError names what is false. With `start`, no earlier manifest is read. `tell`
    receives (rounds done, rounds in total)."""
    last, every = ledger.last_round(), range(len(ledger.shards))
    end = last if end is None else min(end, last)
    replay = Replay(ledger, _first_with_payloads(ledger, start + 1, end) - 1)
    first = replay.round + 1 if start else 1
    found = Audit(
        rounds=end, first=first, settled=last, begins_with=replay.round, start=_whose(ledger, replay)
    )
    found.anchors = [t for t in ledger.anchor_rounds() if first - 1 <= t <= end]
    anchors = set(found.anchors)
    for manifest in ledger.between(first, replay.round):
        tell(manifest.round - first + 1, end - first + 1)
    for manifest in ledger.between(replay.round + 1, end):
        replay.step()
        found.updates += len(manifest.entries)
        if replay.round in anchors:
            stated, tensors = ledger.read_anchor(replay.round, every, confirmed=False)
            computed = anchor_digest([shard_digest(tensors, names) for names in ledger.shards])
            if not stated == computed == replay.digest():
                writer, _ = ledger.anchor_header(replay.round)
                words = f"the anchor of round {replay.round}, written by {writer},"
                raise RunError(f"{words} is not what replaying gives")
            found.anchors_replayed.append(replay.round)
        tell(replay.round - first + 1, end - first + 1)
    found.digest = replay.digest()
    return found


def _whose(ledger: Ledger, replay: Replay) -> str:
    if replay.round:
        return f"the anchor of round {replay.round}, whose digest manifest {replay.round + 1} states"
    return "theta^(0) as run.json names it" if ledger.run.start else "theta^(0) as the recipe's seed draws it"


def _first_with_payloads(ledger: Ledger, first: int, last: int) -> int:
    """The oldest round that can be replayed; last + 1 if none. Sweeps delete the oldest first."""
    rounds = range(first, last + 1)
    return first + bisect_left(rounds, True, key=ledger.has_payloads)
