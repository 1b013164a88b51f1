"""Steps and evaluations that a GPU launches as one graph do what they did launched one by one."""

import pytest
import torch
from small_recipes import pipelined, recipe_text, replicas

from isthmus import gpu
from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.outer.rounds import run_rounds
from isthmus.planner.memory import SimulatorPlan
from isthmus.simulator.exchange import ExchangingFleet, LocalExchange
from isthmus.simulator.fleet import SimulatedFleet

MIXED = replicas("rack", count=2) + pipelined("edge", count=2, stages=2, compression="1/4")
TEXT = recipe_text(
    MIXED, inner={"lr": 1e-2, "warmup_steps": 12, "precision": "bf16"}, outer={"inner_steps": 4, "rounds": 6}
)


class Counted(gpu.Replayed):
    """A stand-in for the graph: calls the work, and notes when a real one would have replayed it."""

    replays = 0

    def __call__(self, *inputs):
        self.calls += 1
        Counted.replays += self.calls > self.WARM
        return self.work(*inputs)


def run(device: str, *overrides: str) -> tuple[SimulatedFleet, list[dict]]:
    recipe = parse_recipe(TEXT, overrides)
    plan = SimulatorPlan(recipe.num_replicas, 1, False, 0)
    fleet = SimulatedFleet(
        recipe, open_corpus(recipe.data.corpus), torch.device(device), "bf16", plan, compiled=device == "cuda"
    )
    scores = []
    rounds = range(1, recipe.outer.rounds + 1)
    exchanging = ExchangingFleet(fleet, LocalExchange(recipe))
    run_rounds(exchanging, rounds, lambda h: None, lambda t, s: scores.append(fleet.evaluate()))
    return fleet, scores


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Rounds that open: other forwards, so another recording. A few bits: kernels of our own, forward and back.
@pytest.mark.parametrize(("finish", "wire"), [(0, "bf16"), (3, "bf16"), (3, "int5")])
def test_replayed_steps_train_the_same_model(monkeypatch, finish, wire):
    overrides = [f"finish.rounds={finish}", f"replicas.edge.wire={wire}"]
    recorded, its_scores = run("cuda", *overrides)
    assert recorded.recorded
    assert recorded.stacks[0]._work.graph is not None
    assert len(recorded.scorer.recordings) == 1 + bool(finish)
    monkeypatch.setattr(gpu, "Replayed", Counted)
    plain, scores = run("cuda", *overrides)
    assert Counted.replays > 20
    start = run("cuda", *overrides, "outer.rounds=1", "finish.rounds=0", "inner.lr=1e-9")[0].anchor
    gap = sum((recorded.anchor[n] - plain.anchor[n]).square().sum() for n in start)
    moved = sum((plain.anchor[n] - start[n]).square().sum() for n in start)
    # Sums by atomics differ in their last bits, and ties of top-k with them; a learning rate, a batch or a
    # table that was recorded with the step would part the two for good.
    assert (gap / moved).sqrt() < 0.1
    for one, other in zip(its_scores, scores, strict=True):
        assert one["loss_mixed"] == pytest.approx(other["loss_mixed"], rel=5e-3)
        assert one["loss_pipelined"] == pytest.approx(other["loss_pipelined"], rel=5e-3)
    assert scores[-1]["loss_full"] < 0.97 * scores[0]["loss_full"]  # and they train
    if finish:
        # All d cross then: on a wire of few bits they are still rounded.
        exact = 0.0 if wire == "bf16" else 1e-3
        assert its_scores[-1]["loss_full"] == pytest.approx(its_scores[-1]["loss_pipelined"], rel=exact)


def test_the_host_stays_a_few_steps_ahead(monkeypatch):
    waiting = []

    class Event:
        def __init__(self, blocking):
            assert blocking  # a thread that spins would take a core from the one that reads ahead

        def record(self):
            waiting.append(self)

        def synchronize(self):
            assert waiting.pop(0) is self  # in order, each once

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pace = gpu.Pace(torch.device("cuda"))
    for _ in range(20):
        pace.launched()
        assert len(waiting) <= gpu.Pace.LEAD
    assert len(waiting) == gpu.Pace.LEAD
    gpu.Pace(torch.device("cpu")).launched()
    assert len(waiting) == gpu.Pace.LEAD


def test_where_no_graph_can_be_recorded_work_goes_on_one_by_one(monkeypatch):
    class Refusing:
        def __init__(self, graph, capture_error_mode):
            pass

        def __enter__(self):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        def __exit__(self, *exception):
            pass

    before = object()
    streams = []
    monkeypatch.setattr(gpu.Replayed, "refused", False)  # and as it was, after this test
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: before)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    seen = []

    def work(x):
        seen.append(x)
        return (x + 1,)

    replayed = gpu.Replayed(work)
    for number in range(gpu.Replayed.WARM):
        replayed(torch.tensor(number))
    with pytest.warns(UserWarning, match="not permitted when stream is capturing$"):
        assert replayed(torch.tensor(10))[0] == 11
    assert replayed(torch.tensor(20))[0] == 21  # and no other recording is tried
    assert [x.item() for x in seen] == [*range(gpu.Replayed.WARM), 10, 20]
    assert streams == [before]
    other = gpu.Replayed(work)
    for number in range(gpu.Replayed.WARM + 1):  # no other recording is tried, and no other warning given
        assert other(torch.tensor(number))[0] == number + 1
    assert streams == [before]


def test_nothing_is_recorded_on_a_cpu():
    fleet, scores = run("cpu")
    assert not fleet.recorded
    assert not fleet.scorer.recordings
    assert scores[-1]["loss_full"] < scores[0]["loss_full"]
