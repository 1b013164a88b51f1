"""A measured training rate: bounded in time, with its sample, and the same as a plan counts."""

from dataclasses import replace

import pytest

from isthmus.config import parse_recipe
from isthmus.planner.plan import predict
from isthmus.planner.rate import FEWEST_STEPS, TrainingRate
from isthmus.replica import speed

TINY = """
name = "tiny"
[model]
preset = "nano"
width = 32
heads = 2
ffn = 64
context = 16
vocab = 128
[inner]
batch = 4
micro_batches = 2
[[replicas]]
name = "full"
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/4"
"""


def clock_of(*step_seconds: float):
    """A clock on which the steps take these times, the last one again and again; all else takes none."""
    now, steps = 0.0, list(step_seconds)

    def clock() -> float:
        return now

    class Replica:
        def __init__(self, *args, **kwargs):
            pass

        def inner_step(self, number):
            nonlocal now
            now += steps.pop(0) if len(steps) > 1 else steps[0]

    return clock, Replica


def rate_on(monkeypatch, seconds: float, *step_seconds: float) -> TrainingRate:
    clock, replica = clock_of(*step_seconds)
    monkeypatch.setattr(speed, "FullReplica", replica)
    return speed.training_rate(parse_recipe(TINY), "cpu", "fp32", seconds, clock=clock)


def test_steps_are_timed_until_the_time_is_over(monkeypatch):
    rate = rate_on(monkeypatch, 10.0, 5.0, 0.5)
    assert rate.steps == 10  # 5 s went into the first step, which is not counted
    assert rate.step_seconds == rate.fastest_seconds == rate.slowest_seconds == 0.5
    assert rate.warning == "" or "busy" in rate.warning


def test_a_slow_machine_gets_five_steps_or_three_times_the_time(monkeypatch):
    five = rate_on(monkeypatch, 4.0, 1.0, 1.5)
    assert five.steps == FEWEST_STEPS
    few = replace(rate_on(monkeypatch, 4.0, 4.0, 5.0), others_cores=0.0)  # however busy we are here
    assert few.steps == 1  # a second one would end after 14 s
    assert "only 1 step fitted" in few.warning
    assert "--seconds" in few.warning


def test_a_wide_spread_is_said(monkeypatch):
    rate = replace(rate_on(monkeypatch, 4.0, 0.1, 0.1, 0.1, 0.9), others_cores=0.0)
    assert (rate.fastest_seconds, rate.slowest_seconds) == (pytest.approx(0.1), pytest.approx(0.9))
    assert "9.0 x the fastest" in rate.warning
    assert "0.1 to 0.9 s each" in rate.sample


def test_a_machine_is_busy_where_others_take_the_cores_that_it_trains_on(monkeypatch):
    rate = replace(rate_on(monkeypatch, 4.0, 0.1), host_cores=4, threads=4)
    assert not replace(rate, others_cores=0.5).busy
    assert replace(rate, others_cores=1.5).busy
    assert not replace(rate, others_cores=1.5, threads=2).busy  # two cores are free
    assert not replace(rate, others_cores=None).busy  # not known
    busy = replace(rate, others_cores=1.5)
    assert "the machine is busy" in busy.warning
    assert "others used 1.5 of 4 cores" in busy.sample


def test_a_fleet_on_this_machine_is_planned_with_the_rate_of_this_machine(monkeypatch):
    recipe = parse_recipe(TINY)
    monkeypatch.setattr(speed, "usable_cores", lambda: 1)
    here, rate = speed.measured_here(recipe, 0.05)
    assert rate.sequences == recipe.inner.batch
    # Three processes on one core: each has a third of it, and the full replica the rest when the stages,
    # which have a quarter of the work each, are done.
    rack, edge = (r.tflops for r in here.replicas)
    assert (rack, edge) == tuple(float(f"{rate.tflops / n:.3g}") for n in (2, 3))
    assert predict(here).kinds[0].step.seconds == pytest.approx(2 * rate.step_seconds, rel=0.01)
    assert replace(here, replicas=recipe.replicas) == recipe
