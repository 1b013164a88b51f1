"""A stage alone, and all the stages of a replica in one process: the simulator's numbers, cut at the wire."""

from functools import cache

import pytest
import torch
from small_recipes import pipelined, recipe_text, replicas

from isthmus.config import parse_recipe
from isthmus.config.fleet import WIRES
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError
from isthmus.layout.stages import EMBEDDING
from isthmus.layout.traffic import inner_step_bytes
from isthmus.model.llama import init_params
from isthmus.replica.base import precision_dtypes
from isthmus.replica.pipelined import PipelinedReplica
from isthmus.replica.stack import Stack
from isthmus.replica.stage import Stage
from isthmus.subspace.boundaries import BasisSet

RECIPE = recipe_text(
    replicas("rack") + pipelined("edge", stages=4, compression="1/4", wire="fp64"),
    model={"width": 32, "context": 16},
    inner={"batch": 8, "micro_batches": 4, "precision": "fp64"},
    outer={"inner_steps": 3, "rounds": 3, "values": "fp64"},
)
FP32 = ["inner.precision=fp32", "outer.values=fp32", "replicas.edge.wire=fp32"]


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small gain nothing from threads, and lose much to them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def sample():
    return open_corpus("builtin:sample")


def batches_of(recipe):
    return Batches(sample().train, recipe.seed, recipe.num_replicas, recipe.inner.batch, recipe.model.context)


def simulated(recipe, member, precision="fp64", steps=3):
    """Two rounds of a Stack of this one replica, the second from another anchor: losses, norms, weights."""
    master_dtype, dtype = precision_dtypes(precision)
    anchor = {name: t.to(master_dtype) for name, t in init_params(recipe.model, recipe.seed).items()}
    table = anchor[EMBEDDING] if recipe.subspace.adaptation else anchor[EMBEDDING].clone()
    stack = Stack(recipe, [member], anchor, table, BasisSet(recipe, "cpu", master_dtype), dtype=dtype)
    batches, seen = batches_of(recipe), []
    for round_index in range(2):
        if round_index:
            for name, tensor in second_anchor(recipe).items():
                anchor[name].copy_(tensor)
        stack.bases.begin_round(round_index + 1)
        stack.begin_round(anchor)
        for h in range(steps):
            losses, norms = stack.inner_step(batches.at(member.index, round_index * steps + h)[None])
            seen.append((losses.item(), norms.item()))
    return torch.tensor(seen, dtype=torch.float64), stack.row(stack.params, 0)


def trained(recipe, replica, precision="fp64", steps=3):
    """The same two rounds of a real replica, or of one process's part of it."""
    master_dtype, _ = precision_dtypes(precision)
    first = {name: t.to(master_dtype) for name, t in init_params(recipe.model, recipe.seed).items()}
    seen = []
    for round_index, anchor in enumerate((first, second_anchor(recipe))):
        replica.begin_round(anchor)
        for h in range(steps):
            loss = replica.inner_step(round_index * steps + h)
            seen.append((float(loss), replica.grad_norm))
    return torch.tensor(seen, dtype=torch.float64), replica.named_parameters()


def second_anchor(recipe):
    return init_params(recipe.model, recipe.seed + 1)


def relative(one, two):
    gap = sum((one[n] - two[n]).double().square().sum() for n in one)
    return (gap / sum(two[n].double().square().sum() for n in two)).sqrt().item()


CASES = {
    "1/4": [],
    "1/8 in two stages": ["replicas.edge.compression=1/8", "replicas.edge.stages=2"],
    "open": ["replicas.edge.compression=none"],
    "three stages": ["replicas.edge.stages=3"],
    "no adaptation": ["subspace.adaptation=false"],  # Table 5a
    "weight projection": ["subspace.weight_projection=true"],  # Table 5b
    "modified AdamW": ["subspace.modified_adamw=true"],  # Table 5d
    "clipped stage by stage": ["inner.clip_scope=stage", "inner.clip=0.3"],
    "not clipped": ["inner.clip=0"],
    "a U for each boundary": ["subspace.basis=boundary"],
    "one micro-batch": ["inner.micro_batches=1"],
    "half open in the second round": ["finish.rounds=2"],
    "open in the second round": ["finish.rounds=2", "finish.how=full"],
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("case", CASES)
def test_stages_in_one_process_are_the_simulated_replica(case, schedule):
    recipe = parse_recipe(RECIPE, CASES[case])
    member = recipe.fleet()[1]
    seen, weights = simulated(recipe, member)
    replica = PipelinedReplica.in_one_process(
        recipe, member, batches_of(recipe), precision="fp64", schedule=schedule
    )
    ours, params = trained(recipe, replica)
    assert params.keys() == weights.keys()
    assert relative(params, weights) < 1e-9
    assert torch.allclose(ours, seen, rtol=1e-9)


def test_a_replica_with_its_own_micro_batches_trains_as_if_the_recipe_had_that_count():
    found = []
    for setting in ("replicas.edge.micro_batches=2", "inner.micro_batches=2"):
        recipe = parse_recipe(RECIPE, [setting])
        replica = PipelinedReplica.in_one_process(
            recipe, recipe.fleet()[1], batches_of(recipe), precision="fp64"
        )
        found.append(trained(recipe, replica))
    (own_seen, own), (seen, weights) = found
    assert torch.equal(own_seen, seen)  # losses and gradient norms
    assert all(torch.equal(own[name], weights[name]) for name in weights)


def test_stages_in_one_process_are_the_simulated_replica_in_fp32():
    recipe = parse_recipe(RECIPE, FP32)
    member = recipe.fleet()[1]
    seen, weights = simulated(recipe, member, "fp32")
    replica = PipelinedReplica.in_one_process(recipe, member, batches_of(recipe))
    ours, params = trained(recipe, replica, "fp32")
    assert relative(params, weights) < 1e-5
    assert torch.allclose(ours, seen, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "fp64"])
def test_what_crosses_is_rounded_as_the_simulator_rounds_it(wire, optimizer):
    """One micro-batch, so that the two do the same sums: then the roundings are the same ones."""
    settings = [f"replicas.edge.wire={wire}", "inner.micro_batches=1", f"inner.optimizer={optimizer}"]
    recipe = parse_recipe(RECIPE, settings)
    member = recipe.fleet()[1]
    _, weights = simulated(recipe, member)
    replica = PipelinedReplica.in_one_process(recipe, member, batches_of(recipe), precision="fp64")
    assert relative(trained(recipe, replica)[1], weights) < 1e-9


@pytest.mark.parametrize("settings", [[], ["replicas.edge.compression=none", "replicas.edge.wire=bf16"]])
def test_bytes_between_stages_are_those_that_traffic_predicts(settings):
    recipe = parse_recipe(RECIPE, settings)
    member = recipe.fleet()[1]
    replica = PipelinedReplica.in_one_process(recipe, member, batches_of(recipe), precision="fp64")
    replica.inner_step(0)
    counts = replica.pop_counts()
    assert counts.pop("control") == 2 * 3 * 48
    assert counts == inner_step_bytes(recipe, member)
    assert not any(replica.pop_counts().values())


def test_a_restored_replica_goes_on_as_if_never_stopped():
    recipe = parse_recipe(RECIPE)
    member, batches = recipe.fleet()[1], batches_of(recipe)
    straight = PipelinedReplica.in_one_process(recipe, member, batches, precision="fp64")
    for step in range(4):
        if step == 2:
            saved = {name: t.clone() for name, t in straight.state().items()}
            params = {name: t.clone() for name, t in straight.named_parameters().items()}
            again = PipelinedReplica.in_one_process(recipe, member, batches, precision="fp64")
            again.begin_round(params)
            for stage in again.stages:  # T_perp is the round's anchor, not the weights of the moment
                stage.table.copy_(straight.stages[0].table)
            again.restore(saved, step)
        straight.inner_step(step)
    for step in (2, 3):
        again.inner_step(step)
    assert relative(again.named_parameters(), straight.named_parameters()) == 0


def test_a_stage_holds_its_own_names_and_the_activations_of_what_is_in_flight():
    recipe = parse_recipe(RECIPE)
    member = recipe.fleet()[1]
    stages = [Stage(recipe, member, s, precision="fp64") for s in range(4)]
    assert [name for stage in stages for name in stage.params] == list(recipe.model.shapes())
    tokens = batches_of(recipe).at(1, 0)[:2]
    z = stages[0].forward(0, tokens)
    assert z.shape == (2, 16, 8)
    assert not z.requires_grad
    stages[0].forward(1, tokens)
    assert set(stages[0].activations) == {0, 1}
    assert stages[0].backward(0, torch.ones_like(z)) is None
    assert set(stages[0].activations) == {1}


def test_turning_the_basis_is_for_the_simulator():
    recipe = parse_recipe(RECIPE, ["subspace.grassmann_every=3"])
    with pytest.raises(ConfigError, match="simulator only"):
        Stage(recipe, recipe.fleet()[1], 0)
