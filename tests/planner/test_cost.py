"""The virtual clock, in closed formulas (docs/method.md, The virtual clock)."""

import pytest

from isthmus.config import parse_recipe
from isthmus.layout.traffic import inner_step_bytes, outer_bytes
from isthmus.planner.cost import exchange_seconds, inner_step_seconds, round_seconds

TEXT = """
name = "t"
[model]
preset = "nano"
[inner]
batch = 32
micro_batches = 16
[outer]
inner_steps = 10
[[replicas]]
name = "rack"
tflops = 0.1
link = { mbps = 1000, latency_ms = 5 }
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 4
compression = "1/8"
tflops = 0.01
link = { mbps = 100, latency_ms = 20 }
"""


def edge(*overrides):
    recipe = parse_recipe(TEXT, overrides)
    return recipe, recipe.fleet()[1]


def test_a_full_replica_takes_6n_flops_a_token():
    recipe = parse_recipe(TEXT)
    flops = 6 * recipe.model.num_parameters * 32 * 128
    assert inner_step_seconds(recipe, recipe.fleet()[0], 0.0) == pytest.approx(flops / 0.1e12)


def test_a_fast_link_leaves_the_ceiling_of_a_flushing_schedule():
    recipe, member = edge("replicas.edge.link.latency_ms=0.0")
    compute = 6 * recipe.model.num_parameters * 32 * 128 / 4 / 0.01e12
    crossing = inner_step_bytes(recipe, member)
    r = (crossing["activations"] + crossing["tokens"]) / 3 * 8 / 100e6 / compute
    assert r < 1
    ceiling = 16 / (16 + 3 * (1 + 2 * r))
    assert compute / inner_step_seconds(recipe, member, 0.0) == pytest.approx(ceiling)


def test_a_link_slower_than_compute_sets_the_pace():
    recipe, member = edge("replicas.edge.link.mbps=1", "replicas.edge.link.latency_ms=0.0")
    crossing = inner_step_bytes(recipe, member)
    link = (crossing["activations"] + crossing["tokens"]) / 3 * 8 / 1e6  # all micro-batches, one way
    compute = 6 * recipe.model.num_parameters * 32 * 128 / 4 / 0.01e12
    assert inner_step_seconds(recipe, member, 0.0) == pytest.approx(link + 3 * (compute + 2 * link) / 16)


def test_latency_is_paid_there_and_back_once_per_stage():
    recipe, member = edge()
    _, near = edge("replicas.edge.link.latency_ms=0.0")
    far = inner_step_seconds(recipe, member, 0.0)
    assert far - inner_step_seconds(recipe, near, 0.0) == pytest.approx(3 * 2 * 0.020)


def test_measured_time_stands_in_where_no_rate_is_given():
    recipe = parse_recipe(TEXT, ["replicas.rack.tflops=0"])
    assert inner_step_seconds(recipe, recipe.fleet()[0], 1.5) == 1.5


def test_a_round_is_its_slowest_replica_with_its_exchange():
    recipe = parse_recipe(TEXT)
    each = [
        10 * inner_step_seconds(recipe, member, 0.0) + exchange_seconds(recipe, member)
        for member in recipe.fleet()
    ]
    assert round_seconds(recipe, 0.0) == max(each)


def test_every_machine_of_a_replica_sends_its_own_share_over_its_own_link():
    recipe, member = edge()
    up, down = outer_bytes(recipe, member)
    assert exchange_seconds(recipe, member) == pytest.approx((up + down) / 4 * 8 / 100e6 + 2 * 0.020)


def test_one_replica_alone_exchanges_nothing():
    recipe = parse_recipe(TEXT[: TEXT.index("[[replicas]]")] + '[[replicas]]\nname = "only"\ntflops = 1.0\n')
    assert exchange_seconds(recipe, recipe.fleet()[0]) == 0
