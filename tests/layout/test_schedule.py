"""Schedules as data: their order, their memory, and what they cost on a slow link."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.layout.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    deep,
    depths,
    filled,
    filled_if_it_pays,
    gpipe,
    in_flight,
    one_f_one_b,
    simulate_schedule,
)

SIZES = {"num_stages": st.integers(1, 7), "num_micro_batches": st.integers(1, 24)}
TIMES = {
    "t": st.floats(0.01, 10),
    "link": st.floats(0, 10),
    "latency": st.floats(0, 1),
    "limit": st.integers(0, 30),
}


@given(**SIZES, **TIMES)
def test_every_micro_batch_goes_forward_once_and_then_backward_once_in_order(
    num_stages, num_micro_batches, t, link, latency, limit
):
    chosen = depths(num_stages, num_micro_batches, t, link, latency, limit)
    for schedule in (
        deep(num_stages, num_micro_batches, chosen),
        one_f_one_b(num_stages, num_micro_batches),
        gpipe(num_stages, num_micro_batches),
    ):
        assert len(schedule) == num_stages
        for order in schedule:
            for kind in (Forward, Backward):
                assert [a.micro_batch for a in order if type(a) is kind] == list(range(num_micro_batches))
            for i in range(num_micro_batches):
                assert order.index(Forward(i)) < order.index(Backward(i))


@given(**SIZES, **TIMES)
def test_depths_bound_what_is_in_flight_and_do_not_increase(
    num_stages, num_micro_batches, t, link, latency, limit
):
    chosen = depths(num_stages, num_micro_batches, t, link, latency, limit)
    assert list(chosen) == sorted(chosen, reverse=True)
    assert max(chosen) <= (limit or num_micro_batches)
    assert [in_flight(order) for order in deep(num_stages, num_micro_batches, chosen)] == list(chosen)


@given(**SIZES, **TIMES)
def test_no_schedule_stops_for_ever_or_beats_the_ceiling(
    num_stages, num_micro_batches, t, link, latency, limit
):
    chosen = depths(num_stages, num_micro_batches, t, link, latency, limit)
    ceiling = num_micro_batches * t + (num_stages - 1) * (t + 2 * (link + latency))  # DESIGN: U = m t / this
    for schedule in (
        deep(num_stages, num_micro_batches, chosen),
        one_f_one_b(num_stages, num_micro_batches),
        gpipe(num_stages, num_micro_batches),
    ):
        seconds = simulate_schedule(schedule, t / 3, 2 * t / 3, link, latency)
        assert seconds >= ceiling * (1 - 1e-9)


def test_without_link_time_depths_are_1f1b_and_reach_the_bubble():
    assert depths(4, 8, 1.0, 0.0, 0.0) == (4, 3, 2, 1)
    assert deep(4, 8, depths(4, 8, 1.0, 0.0, 0.0)) == one_f_one_b(4, 8)
    assert simulate_schedule(one_f_one_b(4, 8), 1 / 3, 2 / 3, 0.0, 0.0) == pytest.approx(8 + 3)


def test_one_stage_and_one_micro_batch():
    assert one_f_one_b(1, 2) == ((Forward(0), Backward(0), Forward(1), Backward(1)),)
    assert gpipe(2, 1) == ((Forward(0), Backward(0)),) * 2
    assert depths(3, 4, 0.0, 1.0, 0.0) == (4, 4, 1)  # nothing is known of t: as deep as it goes


@pytest.mark.parametrize(("ratio", "share"), [(0.2, 0.95), (0.6, 0.95), (0.9, 0.90)])
@pytest.mark.parametrize("num_micro_batches", [16, 32])
def test_on_a_slow_link_deep_comes_near_the_ceiling_where_1f1b_and_gpipe_do_not(
    ratio, share, num_micro_batches
):
    num_stages, t = 4, 1.0
    ceiling = num_micro_batches * t + (num_stages - 1) * (t + 2 * ratio)
    slow = {
        "forward_seconds": t / 3,
        "backward_seconds": 2 * t / 3,
        "link_seconds": ratio,
        "latency_seconds": 0.0,
    }
    ours = simulate_schedule(
        deep(num_stages, num_micro_batches, depths(num_stages, num_micro_batches, t, ratio, 0.0)), **slow
    )
    assert ceiling / ours >= share
    assert ours < simulate_schedule(one_f_one_b(num_stages, num_micro_batches), **slow)
    if ratio > 0.5:
        assert ours < 0.75 * simulate_schedule(one_f_one_b(num_stages, num_micro_batches), **slow)
        assert ours < simulate_schedule(gpipe(num_stages, num_micro_batches), **slow)


@given(**SIZES, **TIMES, wrong=st.floats(0.1, 10))
def test_a_filled_schedule_splits_every_backward_within_the_same_memory_and_never_stops(
    num_stages, num_micro_batches, t, link, latency, limit, wrong
):
    whole = deep(
        num_stages, num_micro_batches, depths(num_stages, num_micro_batches, t, link, latency, limit)
    )
    split = filled(whole, t / 3, 2 * t / 3, link, latency, limit)
    for order, before in zip(split, whole, strict=True):
        for kind in (Forward, BackwardInput, BackwardWeight):
            assert [a.micro_batch for a in order if type(a) is kind] == list(range(num_micro_batches))
        for i in range(num_micro_batches):
            assert order.index(Forward(i)) < order.index(BackwardInput(i)) < order.index(BackwardWeight(i))
        assert in_flight(order) <= (limit or max(in_flight(o) for o in whole))
        assert [type(a) for a in order if type(a) is not BackwardWeight] == [
            BackwardInput if type(a) is Backward else Forward for a in before
        ]
    # Every stage still computes all there is to compute; times that were wrong change no order into a stop.
    assert simulate_schedule(split, t / 3, 2 * t / 3, link, latency) >= num_micro_batches * t * (1 - 1e-9)
    simulate_schedule(split, t / 3, 2 * t / 3, wrong * link, latency)


@pytest.mark.parametrize(("ratio", "gain"), [(0.2, 0.12), (0.6, 0.15), (0.9, 0.04)])
def test_weight_gradients_in_the_waits_shorten_the_step_where_no_whole_backward_can(ratio, gain):
    whole = deep(4, 16, depths(4, 16, 1.0, ratio, 0.0))
    times = (1 / 3, 2 / 3, ratio, 0.0)
    assert simulate_schedule(filled(whole, *times), *times) < (1 - gain) * simulate_schedule(whole, *times)
    assert (filled_if_it_pays(whole, *times) == whole) == (gain < 0.05)


@pytest.mark.parametrize("ratio", [1.5, 2.0, 4.0])
def test_a_link_slower_than_compute_is_not_warmed_up_so_deep_that_its_directions_take_turns(ratio):
    chosen = depths(4, 32, 1.0, ratio, 0.0)
    seconds = simulate_schedule(deep(4, 32, chosen), 1 / 3, 2 / 3, ratio, 0.0)
    assert seconds <= 1.02 * (32 * ratio + 3 * (1 + 2 * ratio))  # the closed formula
    deeper = simulate_schedule(deep(4, 32, [min(32, 2 * w - 1) for w in chosen]), 1 / 3, 2 / 3, ratio, 0.0)
    assert seconds < 0.9 * deeper


def test_depths_that_increase_are_refused():
    with pytest.raises(ValueError, match="never increasing"):
        deep(2, 4, [1, 2])


def test_the_slowest_stage_sets_the_pace():
    schedule = one_f_one_b(3, 64)
    even = simulate_schedule(schedule, [1, 1, 1], [2, 2, 2], 0, 0)
    assert simulate_schedule(schedule, [1, 2, 1], [2, 4, 2], 0, 0) == pytest.approx(2 * even, rel=0.05)


def test_schedules_need_no_torch():
    code = "import sys, isthmus.layout.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}).returncode == 0
