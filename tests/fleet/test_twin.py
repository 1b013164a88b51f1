"""The twin: `simulate` and `train` of one recipe and seed are the same run, and its bytes are those
predicted.

One real run per recipe serves all its tests: starting its processes is most of the time they take.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from small_recipes import pipelined, recipe_text, replicas
from torch import Tensor

from isthmus import simulate
from isthmus.config import Recipe, parse_recipe
from isthmus.layout.traffic import round_bytes
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.replay import Replay
from isthmus.runlog import totals
from isthmus.runtime.train import train
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.store.objects import open_store

pytestmark = pytest.mark.soak

ROUNDS = 3
RUN = recipe_text(
    name="twin",
    seed=3,
    model={"width": 64, "ffn": 96, "context": 32},
    inner={"lr": 4e-3, "warmup_steps": 4},
    outer={"inner_steps": 4, "rounds": ROUNDS, "keep": 64, "values": "fp32"},
    bucket={"anchor_every": 2, "deadline_seconds": 3600},
)
EDGE = pipelined("edge", stages=2, compression="1/8", wire="fp32")
FAR = pipelined("far", stages=4, compression="1/4", wire="fp32")
SMALL = replicas("rack") + EDGE
FLEET = SMALL + FAR
FP64 = ["inner.precision=fp64", "outer.values=fp64", "replicas.edge.wire=fp64", "replicas.far.wire=fp64"]
AS_SHIPPED = ["outer.values=2bit", "replicas.edge.wire=bf16"]
UNEQUAL = ["replicas.rack.batch=6", "replicas.rack.micro_batches=3", "replicas.edge.batch=2"]
BEYOND = ["inner.optimizer=muon", "replicas.edge.wire=int5", *UNEQUAL]  # what the paper does not have
PROJECTED = ["subspace.weight_projection=true"]  # Table 5b: what is sent begins at P W
LEARNED = ["subspace.anchor=learned", "finish.rounds=2", "replicas.edge.wire=fp64"]
FINISHING = ["finish.rounds=2"]  # round 2 half open, round 3 open
DENSE = ["outer.method=diloco", "outer.lr=0.7", "outer.momentum=0.8"]  # every entry is sent, with momentum
EXACT = ("activations", "gradients", "tokens", "payload_up", "payload_down")


@dataclass
class Twins:
    """One recipe run both ways."""

    recipe: Recipe
    run_dir: Path
    simulated: list[dict[str, Tensor]] = field(default_factory=list)  # theta^(t) for t = 1 .. R
    real: list[dict[str, Tensor]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of the real ones
    simulated_rows: list[dict] = field(default_factory=list)
    real_rows: list[dict] = field(default_factory=list)

    def gaps(self) -> list[float]:
        return [relative(one, two) for one, two in zip(self.real, self.simulated, strict=True)]


def norm(tensors: dict[str, Tensor]) -> float:
    return sum(tensor.double().square().sum() for tensor in tensors.values()).sqrt().item()


def relative(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return norm({name: one[name] - two[name] for name in two}) / norm(two)


def copied(anchor: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in anchor.items()}


def ledger_of(run_dir: Path) -> Ledger:
    store = open_store(str(run_dir / "bucket"))
    return Ledger(store, read_run(store))


def run_both(folder: Path, settings: list[str], fleet: str = SMALL) -> Twins:
    recipe = parse_recipe(RUN + fleet, settings)
    everybody = f"bucket.quorum={recipe.num_replicas}"  # also on a machine that is busy
    recipe = parse_recipe(RUN + fleet, [*settings, everybody])
    twins = Twins(recipe, folder / "real")
    plain_apply = SimulatedFleet.apply

    def watched_apply(fleet: SimulatedFleet, *given) -> None:
        plain_apply(fleet, *given)
        twins.simulated.append(copied(fleet.anchor))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedFleet, "apply", watched_apply)
        twins.simulated_rows = simulate(recipe, folder / "simulated", device="cpu", quiet=True).rows
    threads = torch.get_num_threads()
    try:
        twins.real_rows = train(recipe, twins.run_dir, device="cpu", quiet=True).rows
    finally:
        torch.set_num_threads(threads)
    replay = Replay(ledger_of(twins.run_dir))
    while replay.step() is not None:
        twins.real.append(copied(replay.anchor))
        twins.digests.append(replay.digest())
    return twins


@pytest.fixture(scope="module")
def fp64(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("fp64"), FP64, FLEET)


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("beyond"), [*FP64[:2], *BEYOND])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("dense"), [*FP64[:3], *DENSE])


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    two = pipelined("edge", count=2, stages=2, compression="1/8", wire="fp32")
    return run_both(tmp_path_factory.mktemp("learned"), [*FP64[:2], *LEARNED], two)


@pytest.fixture(scope="module")
def as_shipped(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("as-shipped"), AS_SHIPPED)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("finished"), FINISHING)


@pytest.fixture(scope="module")
def projected(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("projected"), PROJECTED)


@pytest.mark.parametrize("twins", ["finished", "projected"])
def test_weights_after_every_round_are_the_simulators_in_float32(request, twins):
    both = request.getfixturevalue(twins)
    assert len(both.real) == len(both.simulated) == ROUNDS
    assert max(both.gaps()) < 1e-5


def test_a_run_that_ends_with_open_boundaries_scores_alike_with_and_without_them(finished):
    last, before = finished.real_rows[-1], finished.real_rows[-2]
    assert last["loss_pipelined"] == last["loss_full"]
    assert before["loss_pipelined"] != before["loss_full"]


@pytest.mark.parametrize("twins", ["fp64", "beyond", "learned", "dense"])
def test_weights_after_every_round_are_the_simulators_in_float64(request, twins):
    both = request.getfixturevalue(twins)
    assert len(both.real) == len(both.simulated) == ROUNDS
    assert max(both.gaps()) < 1e-9


def test_a_hair_apart_before_the_codec_is_a_few_entries_apart_after_it(as_shipped):
    """bf16 on the links and two bits for a value: nothing is continuous any more. A last bit decides which
    way a value is rounded, or which of two nearly equal entries is kept, and there the twins part by as much
    as is sent. No bound near 1e-5 can hold then, but they stay together almost everywhere."""
    start = Replay(ledger_of(as_shipped.run_dir)).anchor
    for real, simulated in zip(as_shipped.real, as_shipped.simulated, strict=True):
        change = {name: simulated[name] - start[name] for name in start}
        gap = {name: real[name] - simulated[name] for name in start}
        assert norm(gap) < 0.1 * norm(change)
        entries = sum(tensor.numel() for tensor in gap.values())
        sent = max(tensor.abs().max().item() for tensor in change.values())
        parted = sum((tensor.abs() > 0.01 * sent).sum().item() for tensor in gap.values())
        assert parted < 0.01 * entries


@pytest.mark.parametrize(
    ("twins", "tolerance"), [("fp64", 1e-9), ("beyond", 1e-9), ("as_shipped", 1e-2), ("finished", 1e-5)]
)
def test_losses_in_the_rows_agree(request, twins, tolerance):
    both = request.getfixturevalue(twins)
    assert [row["round"] for row in both.real_rows] == list(range(ROUNDS + 1))
    for real, simulated in zip(both.real_rows, both.simulated_rows, strict=True):
        for name in ("loss_train", "loss_full", "loss_pipelined", "loss_mixed", "grad_norm"):
            expected = simulated[name] and pytest.approx(
                simulated[name], rel=tolerance
            )  # none before round 1
            assert real[name] == expected, (real["round"], name)
        for name in ("inner_steps", "tokens", "lr", "dense_bytes"):
            assert real[name] == simulated[name]


@pytest.mark.parametrize("twins", ["fp64", "as_shipped", "beyond"])
def test_every_process_reports_the_replayed_anchor_after_every_round(request, twins):
    both = request.getfixturevalue(twins)
    processes = sum(member.config.stages for member in both.recipe.fleet())
    said: dict[tuple[str, int], str] = {}
    for path in (both.run_dir / "logs").glob("*.log"):
        for who, t, digest in re.findall(r"\[(\S+)\] round (\d+): anchor ([0-9a-f]{16})", path.read_text()):
            said[who, int(t)] = digest
    for t, digest in enumerate(both.digests, start=1):
        reported = [seen for (_, when), seen in said.items() if when == t]
        assert len(reported) == processes
        assert set(reported) == {digest[:16]}
    assert [row["anchor"] for row in both.real_rows[1:]] == both.digests


@pytest.mark.parametrize("twins", ["fp64", "as_shipped", "finished", "beyond", "learned", "dense"])
def test_bytes_that_the_processes_counted_are_those_that_traffic_predicts(request, twins):
    both = request.getfixturevalue(twins)
    counted = totals(both.real_rows)["bytes"]
    rounds = [round_bytes(both.recipe, t) for t in range(1, ROUNDS + 1)]
    assert {p: counted[p] for p in EXACT} == {p: sum(sent[p] for sent in rounds) for p in EXACT}
    assert counted["control"] > 0  # commits, manifests, heartbeats, anchors: not predicted
    assert {p: totals(both.simulated_rows)["bytes"][p] for p in EXACT} == {p: counted[p] for p in EXACT}
