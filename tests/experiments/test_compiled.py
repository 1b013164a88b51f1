"""Many runs in one process are fast only if the second of them compiles nothing: the budget rests on it."""

import torch
from torch._dynamo.utils import counters

from experiments.tables import pick_scale
from experiments.work import all_runs, pick_tables
from isthmus.data.corpus import open_corpus
from isthmus.model.parts import parts
from isthmus.planner.memory import SimulatorPlan
from isthmus.replica.picks import pick_device
from isthmus.simulator.fleet import SimulatedFleet

SCALE = pick_scale("toy")


def test_runs_of_one_size_compile_once_whatever_their_boundaries(monkeypatch):
    # What is traced anew is decided before any code is made of it, so none is made here.
    compile, plain = torch.compile, ("dynamic", "fullgraph")
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, **how: compile(f, backend="eager", **{k: v for k, v in how.items() if k in plain}),
    )
    parts.cache_clear()
    runs = all_runs(pick_tables(["all"], SCALE), SCALE, "builtin:sample", [])
    by_name = {(run.row.name, run.seed): run for run in runs}
    corpus = open_corpus("builtin:sample")

    def new_graphs(name, seed):
        recipe = by_name[name, seed].recipe
        before = counters["stats"]["unique_graphs"]
        plan = SimulatorPlan(recipe.num_replicas, 1, False, 0)
        fleet = SimulatedFleet(recipe, corpus, pick_device("cpu"), "fp32", plan, True)
        for round_index in range(2):
            fleet.apply(round_index + 1, fleet.train_round(round_index, lambda h: None))
        return counters["stats"]["unique_graphs"] - before

    assert new_graphs("het-8", 0) == 2  # a layer, and the head with its loss
    for name, seed in (("het-8", 1), ("het-8-frozen", 0), ("het-8-projected", 0), ("het-8-h4", 0)):
        assert by_name[name, seed].signature == by_name["het-8", 0].signature
        assert new_graphs(name, seed) == 0, name
    assert by_name["het-96", 0].signature != by_name["het-8", 0].signature
    assert new_graphs("het-96", 0) == 0  # boundaries lie between the compiled parts
    assert new_graphs("het-8-2bit", 0) == 0
    parts.cache_clear()
