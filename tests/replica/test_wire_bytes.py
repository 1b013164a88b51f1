"""Bytes between stages are one number for every wire: as stages count what they send, in the simulator's
rows, in `plan`, and as arithmetic. Over sockets, by processes: tests/fleet/test_twin.py."""

import pytest
from small_recipes import pipelined, recipe_text

from isthmus import simulate
from isthmus.config import parse_recipe
from isthmus.config.fleet import WIRES
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.layout.traffic import STAGE_PURPOSES, inner_step_bytes, round_bytes
from isthmus.layout.wire import INT_BITS
from isthmus.planner.plan import predict
from isthmus.replica.pipelined import PipelinedReplica
from isthmus.runlog import totals

# 5 dimensions of 15 tokens: no sequence's codes fill their last byte.
RECIPE = recipe_text(
    "".join(pipelined(wire, stages=3, compression="5/32", wire=wire) for wire in WIRES),
    model={"width": 32, "context": 15},
    inner={"batch": 4, "micro_batches": 2, "precision": "fp64"},
    outer={"inner_steps": 2, "rounds": 2, "values": "fp64"},
    finish={"rounds": 1, "how": "full"},  # the second round sends whole streams
)


@pytest.fixture(scope="module")
def recipe():
    return parse_recipe(RECIPE)


def by_hand(bits, rows, length, dim):
    """A sequence's codes, and a byte a token."""
    return rows * ((length * dim * bits + 8 * bits - 1) // (8 * bits) * bits + length)


def sent_by_stages(recipe, member):
    inner, model = recipe.inner, recipe.model
    corpus = open_corpus("builtin:sample")
    batches = Batches(corpus.train, recipe.seed, recipe.num_replicas, inner.batch, model.context)
    replica = PipelinedReplica.in_one_process(recipe, member, batches, precision="fp64")
    for step in range(recipe.outer.rounds * recipe.outer.inner_steps):
        replica.inner_step(step)
    return replica.pop_counts()


def test_stages_the_simulator_and_the_plan_count_the_same_bytes_with_every_wire(recipe, tmp_path):
    members = recipe.fleet()
    assert [member.config.wire for member in members] == list(WIRES)
    counted = [sent_by_stages(recipe, member) for member in members]
    sent = {purpose: sum(own[purpose] for own in counted) for purpose in STAGE_PURPOSES}
    rounds = [round_bytes(recipe, t) for t in (1, 2)]
    assert {purpose: sum(one[purpose] for one in rounds) for purpose in STAGE_PURPOSES} == sent
    rows = simulate(recipe, tmp_path / "run", device="cpu", quiet=True).rows
    assert {purpose: totals(rows)["bytes"][purpose] for purpose in STAGE_PURPOSES} == sent
    forecast = predict(recipe, tflops=1)
    assert {purpose: forecast.bytes[purpose] for purpose in STAGE_PURPOSES} == sent
    for member, own in zip(members, counted, strict=True):
        (kind,) = (kind for kind in forecast.kinds if kind.name == member.config.name)
        assert {purpose: kind.bytes[purpose] for purpose in STAGE_PURPOSES} == {
            purpose: own[purpose] for purpose in STAGE_PURPOSES
        }


@pytest.mark.parametrize("wire", INT_BITS)
def test_they_are_those_counted_by_hand(recipe, wire):
    links, length = 2, 15
    for t, dim in ((1, 5), (2, 32)):
        now = recipe.in_round(t)
        (member,) = (member for member in now.fleet() if member.config.wire == wire)
        crossing = inner_step_bytes(now, member)
        for purpose in ("activations", "gradients"):
            assert crossing[purpose] == links * by_hand(INT_BITS[wire], 4, length, dim)
