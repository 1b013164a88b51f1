"""Whom a round refuses for what its update does to held-out text, and who is on probation (docs/protocol.md,
Scores). How an update is scored is for whoever makes a `RoundScores`: a closer, or bench/attacks.py.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from isthmus.config import ScoreConfig
from isthmus.protocol.documents import MOST_SCORE

_HARMFUL = re.compile(r"it makes the held-out loss worse by ")
_PASSED = re.compile(r"on probation: passed ")
_NOT_SCORED = "on probation: the closer of this round cannot score it"


def drawn(names: Collection[str], draw: bytes, count: int) -> set[str]:
    """Whose updates are scored in a round. Nobody knows it beforehand who does not know `draw`."""
    return set(sorted(names, key=lambda name: hashlib.sha256(draw + name.encode()).digest())[:count])


def harmful(score: float, bound: float) -> str:
    """Why an update is refused whose score is over the bound; it stands in the manifest."""
    return f"it makes the held-out loss worse by {score:.3g}, over {bound:g}"


def has_passed(reason: str) -> bool:
    """Did an update not count for the one reason that its author is on probation?"""
    return _PASSED.match(reason) is not None


def not_counted(name: str, reason: str) -> str:
    """How an update that a round has not counted is told to people: who passed did nothing wrong."""
    return f"{name} is {reason}" if has_passed(reason) else f"refused {name}: {reason}"


def is_spent(reason: str) -> bool:
    """Is a refused update gone for good? Its author asks. One that does harm would do it again, and one on
    probation was for judgement alone: neither returns to the error feedback."""
    return has_passed(reason) or reason == _NOT_SCORED or _HARMFUL.match(reason) is not None


@dataclass(frozen=True, slots=True)
class Judged:
    """Who is refused and why, and what the log should say of others."""

    refused: dict[str, str] = field(default_factory=dict)
    note: str = ""


class RoundScores:
    """The scores of the updates to one round: each once, and only those that are asked for."""

    def __init__(
        self,
        settings: ScoreConfig,
        names: Collection[str],
        probation: Mapping[str, int],
        draw: bytes,
        score: Callable[[str], float | None],
    ) -> None:
        """`probation`: replica -> rounds that it has passed. `score` gives None where it cannot."""
        self.settings, self.probation, self.score = settings, probation, score
        self.found: dict[str, float | None] = {}
        self.sample = drawn(set(names) - probation.keys(), draw, settings.sample)

    def wants(self, name: str) -> bool:
        """Is this update scored, whatever the others' are?"""
        return self.settings.batches > 0 and (name in self.sample or name in self.probation)

    def of(self, name: str) -> float | None:
        if self.settings.batches == 0:
            return None
        if name not in self.found:
            score = self.score(name)
            finite = score is None or math.isfinite(score)
            self.found[name] = max(-MOST_SCORE, min(score, MOST_SCORE)) if score and finite else score
            if not finite:
                self.found[name] = MOST_SCORE
        return self.found[name]

    def _is_over(self, name: str) -> bool:
        score = self.of(name)
        return score is not None and score > self.settings.bound

    def compare(self, names: Collection[str]) -> Judged:
        """Judge the updates of those who are not on probation. Where one of the sample is over the bound, all
        are scored: only a minority is refused. Where half or more do harm, it is the run, and no replica."""
        if not any(self._is_over(name) for name in names if name in self.sample):
            return Judged()
        over = sorted(name for name in names if self._is_over(name))
        bound = self.settings.bound
        if 2 * len(over) >= len(names):
            return Judged(
                note=f"the updates of {', '.join(over)} make the held-out loss worse by more than {bound:g}, "
                f"but they are {len(over)} of {len(names)}: nobody is refused for it"
            )
        return Judged({name: harmful(self.of(name) or 0.0, bound) for name in over})

    def of_newcomer(self, name: str, others: Collection[str]) -> str:
        """Why an update on probation, with which nothing else is wrong, does not count in this round. Where
        half of the others' do harm too, it is no worse than they."""
        score = self.of(name)
        if score is None:
            return _NOT_SCORED
        if score > self.settings.bound and 2 * sum(map(self._is_over, others)) < len(others):
            return harmful(score, self.settings.bound)
        return f"on probation: passed {self.probation[name] + 1} of {self.settings.probation} rounds"

    def listed(self, names: Iterable[str]) -> tuple[tuple[str, float], ...]:
        """For the manifest."""
        scored = ((name, self.found.get(name)) for name in names)
        return tuple((name, round(score, 6)) for name, score in scored if score is not None)

    def next_probation(self, refused: Mapping[str, str]) -> dict[str, int]:
        """Who is on probation after this round, as far as the round settles it: whoever does harm begins
        anew."""
        after = dict(self.probation)
        for name, reason in refused.items():
            if has_passed(reason):
                after[name] = self.probation[name] + 1
            elif _HARMFUL.match(reason) or (name in after and reason != _NOT_SCORED):
                after[name] = 0
        return {name: passed for name, passed in after.items() if passed < self.settings.probation}
