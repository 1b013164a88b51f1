"""The figures of a process: its clock runs while it computes, and its bytes are those of its links."""

import pytest
import torch
from test_stage import RECIPE, batches_of

from isthmus.config import parse_recipe
from isthmus.layout.traffic import inner_step_bytes
from isthmus.replica import clock as clock_module
from isthmus.replica.clock import Clock
from isthmus.replica.full import FullReplica
from isthmus.replica.meter import Meter
from isthmus.replica.pipelined import PipelinedReplica

CPU = torch.device("cpu")


class Ticks:
    """A time that moves by one second whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def test_a_clock_adds_up_its_blocks_also_those_that_fail(monkeypatch):
    monkeypatch.setattr(clock_module, "time", Ticks())
    clock = Clock(CPU)
    with clock:
        pass
    with pytest.raises(ValueError, match="broken"), clock:
        raise ValueError("broken")
    assert clock.pop() == 2.0
    assert clock.pop() == 0.0


def test_a_pipelined_replica_counts_its_compute_and_its_bytes_in_both_directions(monkeypatch):
    recipe = parse_recipe(RECIPE, ["inner.backward=split"])
    member = recipe.fleet()[1]
    replica = PipelinedReplica.in_one_process(recipe, member, batches_of(recipe), precision="fp64")
    meter = Meter(replica, CPU)
    monkeypatch.setattr(clock_module, "time", Ticks())
    replica.inner_step(0)
    meter.step()
    round_trip, figures = meter.pop(replica.pop_counts())
    sent = inner_step_bytes(recipe, member)
    # At each of four stages: a forward and a backward of four micro-batches, and a norm; then one update.
    assert figures["compute_seconds"] == 4 * (4 + 4 + 1) + 1
    assert figures["forth_bytes"] == sent["activations"] + sent["tokens"]
    assert figures["back_bytes"] == sent["gradients"]
    assert figures["peak_bytes"] > 0
    assert round_trip == round(replica.round_trip_seconds, 5)
    round_trip, figures = meter.pop(replica.pop_counts())
    assert round_trip is None
    assert figures["compute_seconds"] == figures["forth_bytes"] == figures["back_bytes"] == 0


def test_a_full_replica_computes_for_all_of_an_inner_step_and_has_no_links(monkeypatch):
    recipe = parse_recipe(RECIPE)
    replica = FullReplica(recipe, recipe.fleet()[0], batches_of(recipe), precision="fp64")
    meter = Meter(replica, CPU)
    monkeypatch.setattr(clock_module, "time", Ticks())
    for step in range(3):
        replica.inner_step(step)
        meter.step()
    round_trip, figures = meter.pop(replica.pop_counts())
    assert round_trip is None
    assert figures["compute_seconds"] == 3
    assert figures["forth_bytes"] == figures["back_bytes"] == 0
