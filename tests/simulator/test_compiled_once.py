"""Many runs in one process are fast only if the second compiles nothing: a sweep's time rests on it."""

import torch
from torch._dynamo.utils import counters

from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.model.parts import parts
from isthmus.planner.memory import SimulatorPlan
from isthmus.replica.picks import pick_device
from isthmus.simulator.fleet import SimulatedFleet

HALF = """
name = "half"
[model]
preset = "nano"
context = 32
[inner]
batch = 2
micro_batches = 1
[outer]
inner_steps = 2
rounds = 2
[[replicas]]
name = "rack"
count = 4
[[replicas]]
name = "edge"
kind = "pipelined"
count = 4
stages = 4
compression = "1/8"
"""
OTHERS = (
    "seed=1",
    "subspace.adaptation=false",
    "subspace.weight_projection=true",
    "outer.inner_steps=4",
    "outer.values=2bit",
    "replicas.edge.compression=1/96",  # boundaries lie between the compiled parts
)


def test_runs_of_one_size_compile_once_whatever_their_boundaries(monkeypatch):
    # What is traced anew is decided before any code is made of it, so none is made here.
    compile, plain = torch.compile, ("dynamic", "fullgraph")
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, **how: compile(f, backend="eager", **{k: v for k, v in how.items() if k in plain}),
    )
    parts.cache_clear()
    corpus = open_corpus("builtin:sample")

    def new_graphs(*settings):
        recipe = parse_recipe(HALF, settings)
        before = counters["stats"]["unique_graphs"]
        plan = SimulatorPlan(recipe.num_replicas, 1, False, 0)
        fleet = SimulatedFleet(recipe, corpus, pick_device("cpu"), "fp32", plan, True)
        for round_index in range(2):
            fleet.apply(round_index + 1, fleet.train_round(round_index, lambda h: None))
        return counters["stats"]["unique_graphs"] - before

    assert new_graphs() == 2  # a layer, and the head with its loss
    for setting in OTHERS:
        assert new_graphs(setting) == 0, setting
    parts.cache_clear()
