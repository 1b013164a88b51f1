"""How the simulator is held: by predicted memory."""

from isthmus.config import parse_recipe
from isthmus.planner.memory import plan_simulator, simulator_bytes

TEXT = """
name = "t"
[model]
preset = "178m"
[[replicas]]
name = "rack"
count = 8
"""
GIB = 2**30


def planned(gib, **how):
    recipe = parse_recipe(TEXT)
    how = {"compiled": True, "can_park": True} | how
    return recipe, plan_simulator(recipe, "bf16", int(gib * GIB), **how)


def test_everything_is_stacked_where_it_fits():
    _, plan = planned(1000)
    assert (plan.group, plan.pieces, plan.parked) == (8, 1, False)


def test_a_batch_is_cut_before_replicas_take_turns():
    _, plan = planned(139)
    assert plan.group == 8
    assert plan.pieces > 1


def test_replicas_take_turns_and_wait_on_the_host_when_nothing_else_fits():
    recipe, plan = planned(16)
    assert plan.group < 8
    assert plan.parked
    assert plan.predicted_bytes <= 16 * GIB
    unparked = simulator_bytes(recipe, "bf16", plan.group, plan.pieces, False, True)
    assert unparked > 16 * GIB


def test_the_least_that_could_work_is_named_when_nothing_fits():
    _, plan = planned(0.1)
    assert plan.predicted_bytes > 0.1 * GIB
    assert "in turns, 1 at a time" in plan.describe(8)


def test_what_the_user_asks_for_is_what_is_done():
    assert planned(1000, mode="turns")[1].group == 1
    assert planned(16, mode="stacked")[1].group == 8


def test_more_memory_never_means_more_turns():
    groups = [planned(gib)[1].group for gib in (4, 8, 16, 32, 64, 128, 256)]
    assert groups == sorted(groups)
