"""Replicas with batches of their own: how they read, how they train, and how they count in the mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_recipes import pipelined, recipe_text, replicas

from isthmus.config import Recipe, parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError
from isthmus.layout.traffic import inner_step_bytes
from isthmus.outer.rounds import run_rounds
from isthmus.outer.weights import round_weights
from isthmus.planner.cost import round_seconds
from isthmus.planner.memory import SimulatorPlan, parts_of, plan_simulator, stacked_members
from isthmus.planner.plan import predict
from isthmus.replica.full import FullReplica
from isthmus.replica.pipelined import PipelinedReplica
from isthmus.runlog.row import Row
from isthmus.simulator.exchange import ExchangingFleet, LocalExchange
from isthmus.simulator.fleet import SimulatedFleet

FP64 = {"inner": {"precision": "fp64"}, "outer": {"values": "fp64", "inner_steps": 2, "rounds": 2}}
STRONG, WEAK = (
    replicas("strong", batch=6),
    pipelined("weak", stages=2, compression="1/4", wire="fp64", batch=2),
)


@pytest.fixture(scope="module")
def corpus():
    return open_corpus("builtin:sample")


def simulated(corpus, recipe: Recipe, rounds: int = 2, group: int = 8, parts: int = 1) -> SimulatedFleet:
    plan = SimulatorPlan(group, parts, False, 0)
    fleet = SimulatedFleet(recipe, corpus, torch.device("cpu"), "fp64", plan, compiled=False)
    exchanging = ExchangingFleet(fleet, LocalExchange(recipe))
    run_rounds(exchanging, range(1, rounds + 1), lambda h: None, lambda t, seconds: None)
    return fleet


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), steps=st.integers(1, 9), seed=st.integers(0, 9)
)
@settings(deadline=None, max_examples=40)
def test_no_sequence_is_repeated_or_skipped_by_unequal_batches(sizes, steps, seed):
    view = open_corpus("builtin:sample").train
    batches, plain = Batches(view, seed, len(sizes), sizes, 32), Batches(view, seed, 1, 1, 32)
    read = [row for step in range(steps) for i in range(len(sizes)) for row in batches.at(i, step)]
    assert [len(batches.at(i, 0)) for i in range(len(sizes))] == sizes
    assert all(torch.equal(row, plain.at(0, place)[0]) for place, row in enumerate(read))
    assert len(read) == steps * sum(sizes)
    assert len(np.unique(batches.sequences(0, len(read)))) == min(len(read), batches.num_sequences)


def test_a_round_is_the_mean_by_sequences_of_what_each_replica_trained(corpus):
    """Against each replica on its own: theta = (6 theta_strong + 2 theta_weak) / 8 under plain averaging."""
    recipe = parse_recipe(
        recipe_text(STRONG + WEAK, **FP64),
        ["outer.method=diloco", "outer.lr=1", "outer.momentum=0", "outer.clip=none"],
    )
    fleet = simulated(corpus, recipe, rounds=1)
    first = SimulatedFleet(recipe, corpus, torch.device("cpu"), "fp64", SimulatorPlan(1, 1, False, 0), False)
    batches, found = Batches.of(recipe, corpus.train), []
    for member in recipe.fleet():
        whole = member.config.kind == "full"
        one = (
            FullReplica(recipe, member, batches, precision="fp64")
            if whole
            else PipelinedReplica.in_one_process(recipe, member, batches, precision="fp64")
        )
        one.begin_round(first.anchor)
        for step in range(recipe.outer.inner_steps):
            one.inner_step(step)
        found.append(one.named_parameters())
    for name, theta in fleet.anchor.items():
        mean = (6 * found[0][name].double() + 2 * found[1][name].double()) / 8
        torch.testing.assert_close(theta, mean, rtol=1e-9, atol=1e-12)


def test_batches_that_are_all_alike_give_the_bits_of_one_batch_for_all(corpus):
    plain = parse_recipe(recipe_text(replicas("a", count=2) + pipelined("b", stages=2), **FP64))
    stated = replace(plain, replicas=tuple(replace(r, batch=4) for r in plain.replicas))
    one, two = simulated(corpus, plain), simulated(corpus, stated)
    assert all(torch.equal(one.anchor[name], two.anchor[name]) for name in one.anchor)


def test_stacks_of_one_batch_each_give_what_turns_give(corpus):
    recipe = parse_recipe(recipe_text(replicas("a", count=2) + replicas("b", batch=2, count=2), **FP64))
    assert [len(members) for members in stacked_members(recipe, 8)] == [2, 2]
    together, turns, parted = (
        simulated(corpus, recipe, group=g, parts=p) for g, p in ((8, 1), (1, 1), (2, 2))
    )
    for name, theta in together.anchor.items():
        torch.testing.assert_close(turns.anchor[name], theta, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parted.anchor[name], theta, rtol=1e-9, atol=1e-12)


def test_a_part_of_a_batch_is_never_larger_than_a_part_of_the_largest():
    recipe = parse_recipe(
        recipe_text(replicas("a", batch=12) + replicas("b", batch=9) + replicas("c", batch=1))
    )
    for steps in (1, 2, 3, 4, 6, 12):
        for replica in recipe.replicas:
            batch, parts = recipe.batch_of(replica), parts_of(recipe, replica, steps)
            assert batch % parts == 0
            assert batch // parts <= 12 // steps
    plan = plan_simulator(recipe, "fp32", 10**12, compiled=False, can_park=False)
    assert plan.group == 1
    assert plan.grad_accum_steps == 1


def test_tokens_bytes_and_step_times_follow_the_batch_of_each_kind():
    fleet = replicas("strong", batch=6, tflops=1e-6) + pipelined(
        "weak", stages=2, batch=2, tflops=1e-6, compression="1/4", count=2
    )
    recipe = parse_recipe(recipe_text(fleet))
    plain = parse_recipe(recipe_text(fleet), ["replicas.strong.batch=0", "replicas.weak.batch=0"])
    assert recipe.round_tokens == recipe.outer.inner_steps * (6 + 2 * 2) * 16
    assert recipe.tokens_of(recipe.fleet()) == recipe.round_tokens
    assert Row.from_simulation(recipe, 1, {}, None, loss_train=1.0, grad_norm=1.0, seconds=1.0).tokens == (
        recipe.round_tokens
    )
    weak, usual = (inner_step_bytes(r, r.fleet()[1]) for r in (recipe, plain))
    assert {key: 2 * number for key, number in weak.items()} == usual
    own, others = ({k.name: k for k in predict(r).kinds} for r in (recipe, plain))
    assert own["strong"].compute.flops_per_step == 1.5 * others["strong"].compute.flops_per_step
    assert own["weak"].compute.seconds_per_step == 0.5 * others["weak"].compute.seconds_per_step
    assert own["weak"].memory[0]["activations"] < others["weak"].memory[0]["activations"]


def test_the_virtual_clock_waits_for_the_largest_batch_where_no_rate_is_stated():
    alone, mixed = (
        parse_recipe(
            recipe_text(replicas("a", batch=6) + replicas("b", batch=batch)), ["outer.inner_steps=10"]
        )
        for batch in (6, 2)
    )
    # The average replica of `mixed` takes 4 sequences in a second, so that of 6 takes 1.5 s.
    exchange = round_seconds(alone, 0.0)
    assert round_seconds(alone, 1.5) - exchange == pytest.approx(15.0)
    assert round_seconds(mixed, 1.0) - exchange == pytest.approx(15.0)


def test_weights_are_the_recipes_and_as_small_as_they_can_be():
    recipe = parse_recipe(
        recipe_text(replicas("a", batch=6) + replicas("b", batch=4) + replicas("c", batch=4))
    )
    assert round_weights(recipe, ["a", "b", "c"]) == [3, 2, 2]
    assert round_weights(recipe, ["c", "b"]) == [1, 1]
    assert round_weights(recipe, ["a"]) == [1]


@pytest.mark.parametrize(
    ("fleet", "says"),
    [
        (
            pipelined("edge", stages=2, batch=3),
            "replica edge: batch is 3, which 2 micro-batches do not divide",
        ),
        (replicas("a", processes=2, batch=3), "2 processes do not divide batch = 3"),
        (replicas("a", batch=4, micro_batches=3), "batch is 4, which 3 micro-batches do not divide"),
        (replicas("a", batch=-1), "batch is -1; it must be at least 0"),
        (replicas("a", batch=2**21), "batch is 2097152; it must be at most"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_named(fleet, says):
    with pytest.raises(ConfigError, match=says):
        parse_recipe(recipe_text(fleet))


def test_averaging_of_gradients_asks_for_equal_batches():
    with pytest.raises(ConfigError, match="gives all batches the same weight"):
        parse_recipe(recipe_text(replicas("a", batch=2), outer={"method": "adamw"}))
