"""A simulated fleet in which some are bad, for bench/attacks.py.

It averages and refuses by the code of the real fleet (`outer/aggregate.py`, `protocol/compare.py`). Who is
scored is drawn by the seed; in a real fleet it follows from the closer's key.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attacker import BELOW, forged, norm_of

from isthmus.config import Recipe, ScoreConfig
from isthmus.data.corpus import open_corpus
from isthmus.outer.codec import codec_for
from isthmus.outer.exchange import Contribution
from isthmus.protocol.compare import compare
from isthmus.protocol.scores import RoundScores
from isthmus.protocol.signs import SignReader
from isthmus.replica.usefulness import UpdateScorer
from isthmus.runlog import Row
from isthmus.runlog.live import open_view
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.rounds import simulate_rounds
from isthmus.simulator.run import pick_device, pick_plan, pick_precision
from isthmus.sparse import Bundle

TINY = {"tiny": 1e-3, "empty": 1e-9}  # kinds of their own: an honest update, scaled
SLOW = "slow"  # as "apart", but no larger than a score within the bound allows
CAREFUL = 0.8  # of the bound, on text of its own choice: the closer's is another


@dataclass(frozen=True)
class Attack:
    """What the bad ones do. Where they are several, all send the same update."""

    kind: str
    bad: tuple[str, ...]
    usual: bool = False  # the norm is an honest one's, and not just under the limit
    blind: bool = False  # goes by its own norm, as a real one; otherwise it knows the others'

    @property
    def made_by(self) -> str:
        return "large" if self.kind in TINY else "apart" if self.kind == SLOW else self.kind

    def norm(self, own: float, others: Sequence[float], limit: float) -> float:
        if self.kind in TINY:
            return own * TINY[self.kind]
        if self.usual:
            return own
        if self.blind:
            return own * BELOW * limit
        # Of the median of all, the bad ones counted as the largest.
        return 0.98 * limit * sorted(others)[(len(others) + len(self.bad)) // 2]


class HostileExchange(LocalExchange):
    """The exchange of a simulated fleet in which some are bad, and updates are refused as a closer does."""

    def __init__(self, recipe: Recipe, fleet: SimulatedFleet, attack: Attack) -> None:
        super().__init__(recipe)
        self.recipe, self.fleet, self.attack = recipe, fleet, attack
        outer = recipe.outer
        self.codec = codec_for(fleet.device, outer.chunk_side, outer.keep, outer.values)
        self.signs = SignReader(recipe)
        held_out = open_corpus(recipe.data.corpus).validation
        self.scorer = UpdateScorer(recipe, held_out, self.codec, fleet.device, fleet.dtype)
        # The bad one's, on text of its own choice, whether or not the closer scores.
        known = dataclasses.replace(recipe, score=ScoreConfig())
        self.own_scorer = UpdateScorer(known, held_out, self.codec, fleet.device, fleet.dtype)
        self.probation: dict[str, int] = {}
        self.scores: list[dict[str, float]] = []
        self.before: dict[str, float] = {}
        self.norms: list[dict[str, float]] = []
        self.refused: list[str] = []

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        sent = {each.replica: self._unpacked(each) for each in own}
        if self.attack.kind != "honest":
            bad = self._forged(sent, round_number)
            sent |= dict.fromkeys(self.attack.bad, bad)
            own = [self._packed(each, bad) if each.replica in self.attack.bad else each for each in own]
        norms = {name: _norm(bundle) for name, bundle in sent.items()}
        signs = {name: self.signs.read(bundle) for name, bundle in sent.items()}
        draw = hashlib.sha256(f"{self.recipe.seed} {round_number}".encode()).digest()
        self.scorer.begin(self.fleet.anchor, round_number, draw)
        members = {member.name: member for member in self.recipe.fleet()}

        def score(name: str) -> float:
            return self.scorer.score(sent[name], members[name])

        scores = RoundScores(self.recipe.score, norms, self.probation, draw, score)
        refused = compare(signs, norms, self.before, scores, self.recipe.bucket).refused
        self.scores.append(dict(scores.listed(norms)))
        self.probation = scores.next_probation(refused)
        self.refused += [f"{round_number} {name}: {reason}" for name, reason in refused.items()]
        self.norms.append(norms)
        self.before = {name: norm for name, norm in norms.items() if name not in refused}
        super().close(round_number, own)  # counts bytes
        return [each for each in own if each.replica not in refused]

    def _forged(self, sent: dict[str, Bundle], round_number: int) -> Bundle:
        attack = self.attack
        own = sent[attack.bad[0]]
        others = [bundle for name, bundle in sent.items() if name not in attack.bad]
        norm = attack.norm(_norm(own), [_norm(each) for each in others], self.recipe.bucket.norm_limit)

        def made(norm: float) -> Bundle:
            return forged(self.codec, attack.made_by, own, others, norm, round_number)

        return self._largest(made, norm, round_number) if attack.kind == SLOW else made(norm)

    def _largest(self, made: Callable[[float], Bundle], norm: float, round_number: int) -> Bundle:
        """The largest update up to this norm whose score is safely within the bound, by halves."""
        draw = hashlib.sha256(f"its own {self.recipe.seed} {round_number}".encode()).digest()
        self.own_scorer.begin(self.fleet.anchor, round_number, draw)
        least, most, found = 0.0, 1.0, made(norm * 1e-4)
        for _ in range(7):
            share = (least + most) / 2
            tried = made(norm * share)
            if self.own_scorer.score(tried) <= CAREFUL * self.recipe.score.bound:
                least, found = share, tried
            else:
                most = share
        return found

    def _unpacked(self, one: Contribution) -> Bundle:
        parts = [self.codec.unpack_many(data) for _, data in sorted(one.shards.items())]
        return Bundle.of({name: payload for part in parts for name, payload in part.items()})

    def _packed(self, one: Contribution, bundle: Bundle) -> Contribution:
        shards = {i: self.codec.pack_many(bundle.part(names)) for i, names in enumerate(self.fleet.shards)}
        return Contribution(one.replica, shards, one.facts)


def _norm(bundle: Bundle) -> float:
    return norm_of({name: payload.values for name, payload in bundle.items()})


class Rows(list[Row]):
    """Where the rounds' rows go."""


def simulate_attack(recipe: Recipe, attack: Attack, device: str) -> dict[str, Any]:
    """The last row, and what the closer wrote down of each round."""
    where = pick_device(device)
    precision, corpus = pick_precision(recipe, where), open_corpus(recipe.data.corpus)
    plan = pick_plan(recipe, where, precision, compiled=False)
    fleet = SimulatedFleet(recipe, corpus, where, precision, plan, compiled=False)
    exchange, rows = HostileExchange(recipe, fleet, attack), Rows()
    with open_view(recipe, 0, recipe.outer.rounds, rows=[], quiet=True) as view:
        simulate_rounds(recipe, fleet, exchange, rows, view)
    return {
        "row": rows[-1],
        "refused": exchange.refused,
        "missing": [],
        "scores": exchange.scores,
        "norms": exchange.norms,
    }
