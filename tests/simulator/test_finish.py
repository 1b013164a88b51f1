"""Finishing rounds: boundaries open until a plain forward and a pipelined one are the same."""

import pytest
import torch
from small_recipes import pipelined, recipe_text
from test_simulated import MIXED, build, corpus, relative, train  # noqa: F401
from torch._dynamo.utils import counters

from isthmus import simulate
from isthmus.config import parse_recipe
from isthmus.layout.traffic import round_bytes
from isthmus.model.parts import parts
from isthmus.planner.memory import SimulatorPlan
from isthmus.simulator.fleet import SimulatedFleet

UNIFORM = pipelined("edge", count=2, stages=2, compression="1/8", wire="fp64")
OPEN = ["outer.rounds=4", "finish.rounds=2"]


@pytest.mark.parametrize("method", ["sparseloco", "diloco", "adamw"])
def test_after_the_last_round_the_pipelined_loss_is_the_full_one(corpus, method):  # noqa: F811
    fleet = train(corpus, UNIFORM, *OPEN, f"outer.method={method}", rounds=3)
    halfway = fleet.evaluate()
    assert halfway["loss_pipelined"] != pytest.approx(halfway["loss_full"], rel=1e-6)
    fleet.apply(4, fleet.train_round(3, lambda h: None))
    last = fleet.evaluate()
    assert last["loss_pipelined"] == last["loss_full"] == last["loss_mixed"]


def test_until_finishing_begins_the_run_is_the_run_without_it(corpus):  # noqa: F811
    plain, finishing = train(corpus, MIXED, OPEN[0]), train(corpus, MIXED, *OPEN)
    assert relative(finishing.anchor, plain.anchor) == 0
    assert finishing.evaluate() == plain.evaluate()
    for fleet in (plain, finishing):
        fleet.apply(3, fleet.train_round(2, lambda h: None))
    assert relative(finishing.anchor, plain.anchor) > 1e-6


def test_full_from_the_first_finishing_round_is_what_uncompressed_replicas_do(corpus):  # noqa: F811
    all_of_it = ["outer.rounds=2", "finish.rounds=2", "finish.how=full"]
    opened = UNIFORM.replace('"1/8"', '"none"')
    assert (
        relative(train(corpus, UNIFORM, *all_of_it).anchor, train(corpus, opened, "outer.rounds=2").anchor)
        == 0
    )


def test_stacked_equals_in_turns_while_boundaries_open(corpus):  # noqa: F811
    together, turns = train(corpus, MIXED, *OPEN, rounds=4), train(corpus, MIXED, *OPEN, rounds=4, group=1)
    assert relative(together.anchor, turns.anchor) < 1e-10


def test_the_basis_stands_still_while_boundaries_open(corpus):  # noqa: F811
    fleet = train(corpus, UNIFORM, *OPEN, "subspace.grassmann_every=3")
    before = {key: basis.clone() for key, basis in fleet.bases.bases.items()}
    fleet.apply(3, fleet.train_round(2, lambda h: None))
    assert all(torch.equal(fleet.bases.bases[key], basis) for key, basis in before.items())


def test_rows_have_the_loss_where_finishing_begins_and_the_bytes_of_every_round(tmp_path):
    text = recipe_text(UNIFORM.replace("fp64", "fp32"), outer={"inner_steps": 3})
    recipe = parse_recipe(text, [*OPEN, "data.eval_every=100"])
    rows = simulate(recipe, tmp_path / "run", device="cpu", quiet=True).rows
    assert [row["round"] for row in rows if row["loss_full"] is not None] == [0, 2, 4]
    assert rows[4]["loss_pipelined"] == rows[4]["loss_full"]
    for row in rows[1:]:
        assert row["bytes"] == round_bytes(recipe, row["round"])
    assert (
        rows[3]["bytes"]["activations"]
        == rows[4]["bytes"]["activations"]
        == 8 * rows[2]["bytes"]["activations"]
    )
    assert rows[3]["fleet_seconds"] > 0


@pytest.fixture
def eager_compile(monkeypatch):
    """What is traced anew is decided before any code is made of it, so none is made here."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend="eager", dynamic=False))
    parts.cache_clear()
    yield
    parts.cache_clear()


def test_a_layer_and_the_head_are_compiled_once_and_finishing_compiles_nothing(
    corpus,  # noqa: F811
    eager_compile,
):
    recipe = build(corpus, UNIFORM, "outer.rounds=6", "finish.rounds=4")[0]
    plan = SimulatorPlan(recipe.num_replicas, 1, False, 0)
    fleet = SimulatedFleet(recipe, corpus, torch.device("cpu"), "fp64", plan, compiled=True)
    plain = train(corpus, UNIFORM, "outer.rounds=6", "finish.rounds=4", rounds=6)
    compiled = []
    for round_index in range(6):
        before = counters["stats"]["unique_graphs"]
        fleet.apply(round_index + 1, fleet.train_round(round_index, lambda h: None))
        compiled.append(counters["stats"]["unique_graphs"] - before)
    assert compiled == [2, 0, 0, 0, 0, 0]  # one for all layers, one for the head with its loss
    assert relative(fleet.anchor, plain.anchor) < 1e-10  # a compiled forward that kept an old a would part
