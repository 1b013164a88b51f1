"""What one faulty member of four costs: its norm is within the limit, and the median clip bounds the rest.

The fleet is simulated; updates are refused by the code that closers use.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from isthmus.config import Recipe, load_recipe
from isthmus.data.corpus import open_corpus
from isthmus.outer.codec import codec_for
from isthmus.outer.exchange import Contribution
from isthmus.protocol.norms import compare_norms
from isthmus.runlog import Row
from isthmus.runlog.live import View
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.rounds import simulate_rounds
from isthmus.simulator.run import pick_device, pick_plan, pick_precision
from isthmus.sparse import Bundle, SparseChunks
from isthmus.sparse.topk import decode

pytestmark = pytest.mark.soak

ROUNDS = 8
SETTINGS = [
    *("seed=0", f"outer.rounds={ROUNDS}", f"data.eval_every={ROUNDS}", "data.eval_batches=4"),
    *("replicas.rack.count=2", "replicas.edge.count=2", 'replicas.edge.compression="1/8"'),
    *("outer.inner_steps=10", 'data.corpus="builtin:sample"', "model.vocab=1024"),
]
Dense = dict[str, Tensor]


def flip(own: Dense, round_number: int) -> Dense:
    """A sign error: it goes up the hill."""
    return {name: -tensor for name, tensor in own.items()}


def noise(own: Dense, round_number: int) -> Dense:
    """Memory that holds something else."""
    random = torch.Generator().manual_seed(round_number)
    drawn = {name: torch.randn(own[name].shape, generator=random) for name in sorted(own)}
    return {name: drawn[name].to(tensor) * tensor.norm() for name, tensor in own.items()}


def focus(own: Dense, round_number: int) -> Dense:
    """All of its norm in the smallest tensors, the gains of the norms."""
    return {name: -1e3 * tensor if tensor.dim() == 1 else tensor for name, tensor in own.items()}


def large(own: Dense, round_number: int) -> Dense:
    """Nothing is wrong with it but its size."""
    return own


def norm_of(bundle: Mapping[str, SparseChunks]) -> float:
    return float(sum(payload.values.double().square().sum() for payload in bundle.values()) ** 0.5)


class FaultyExchange(LocalExchange):
    """`name` sends what `fault` makes of its update, as large as the norm limit lets through."""

    def __init__(self, recipe: Recipe, fleet: SimulatedFleet, name: str, fault: Callable | None) -> None:
        super().__init__(recipe)
        self.recipe, self.fleet, self.name, self.fault = recipe, fleet, name, fault
        outer = recipe.outer
        self.codec = codec_for(fleet.device, outer.chunk_side, outer.keep, outer.values)
        self.before: dict[str, float] = {}
        self.refused: list[str] = []

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        sent = {each.replica: self._unpacked(each) for each in own}
        if self.fault:
            others = sorted(norm_of(bundle) for name, bundle in sent.items() if name != self.name)
            most = 0.98 * self.recipe.bucket.norm_limit * others[len(others) // 2]
            sent[self.name] = self._spoilt(sent[self.name], most, round_number)
            own = [
                self._packed(each, sent[each.replica]) if each.replica == self.name else each for each in own
            ]
        norms = {name: norm_of(bundle) for name, bundle in sent.items()}
        refused = compare_norms(norms, self.before, self.recipe.bucket.norm_limit).refused
        self.refused += refused
        self.before = {name: norm for name, norm in norms.items() if name not in refused}
        super().close(round_number, own)
        return [each for each in own if each.replica not in refused]

    def _spoilt(self, own: Bundle, norm: float, round_number: int) -> Bundle:
        assert self.fault
        changed = self.fault({name: decode(payload) for name, payload in own.items()}, round_number)
        for _ in range(2):  # what the codec keeps has another norm than what it is given
            scale = norm / norm_of(self.codec.encode_many(changed))
            changed = {name: tensor * scale for name, tensor in changed.items()}
        return self.codec.encode_many(changed)

    def _unpacked(self, one: Contribution) -> Bundle:
        parts = [self.codec.unpack_many(data) for _, data in sorted(one.shards.items())]
        return Bundle.of({name: payload for part in parts for name, payload in part.items()})

    def _packed(self, one: Contribution, bundle: Bundle) -> Contribution:
        shards = {i: self.codec.pack_many(bundle.part(names)) for i, names in enumerate(self.fleet.shards)}
        return Contribution(one.replica, shards, one.facts)


class Rows(list[Row]):
    """Where the rounds' rows go."""


@cache
def losses(fault: Callable | None) -> tuple[float, float]:
    """(held-out loss before the first round, after the last)."""
    recipe, device = load_recipe("demo-paper", SETTINGS), pick_device("cpu")
    precision, corpus = pick_precision(recipe, device), open_corpus(recipe.data.corpus)
    plan = pick_plan(recipe, device, precision, compiled=False)
    fleet = SimulatedFleet(recipe, corpus, device, precision, plan, compiled=False)
    exchange, rows = FaultyExchange(recipe, fleet, "rack-1", fault), Rows()
    with View(recipe, 0, recipe.outer.rounds, rows=[], quiet=True) as view:
        simulate_rounds(recipe, fleet, exchange, rows, view)
    assert set(exchange.refused) <= {"rack-1"}, "an honest update was refused"
    return rows[0].loss_mixed, rows[-1].loss_mixed


@pytest.mark.parametrize("fault", [flip, noise, focus, large], ids=lambda fault: fault.__name__)
def test_one_faulty_member_of_four_undoes_less_than_half_of_what_the_others_learn(fault: Callable):
    (begin, honest), (_, end) = losses(None), losses(fault)
    print(f"{fault.__name__}: {begin:.3f} to {end:.3f}; with nobody faulty {honest:.3f}")
    assert honest < begin
    assert begin - end > (begin - honest) / 2
