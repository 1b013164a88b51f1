"""One real fleet of each kind with one SIGKILL: what a new torch or machine is tried with.

python3 -m pytest -m fleet_check tests/fleet         CONTRIBUTING.md, "Another torch, another machine"

Every round waits for all replicas, also for the killed one, so the fleet ends where the simulator does.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from faults import kills
from joined import LIMIT_SECONDS, Joined
from safetensors.torch import load_file
from small_recipes import EDGE, RACK, recipe_text

from isthmus import simulate, train
from isthmus.config import Recipe, parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.replay import Replay
from isthmus.runtime.create import create

ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
# With their processes, and the role of the one that is killed.
FLEETS = {"full": (RACK, 1, "full"), "pipelined": (EDGE, 2, "stage"), "mixed": (RACK + EDGE, 3, "full")}
ROUNDS = 4

pytestmark = pytest.mark.fleet_check


def recipe_of(kind: str, precision: str = "fp64") -> Recipe:
    fleet = FLEETS[kind][0]
    text = recipe_text(
        fleet,
        model={"layers": 2},
        inner={"precision": precision},
        outer={"inner_steps": 3, "rounds": ROUNDS, "keep": 64, "values": precision},
        bucket={"deadline_seconds": 3600, "quorum": fleet.count("[[")},
    )
    return parse_recipe(text, [f"replicas.edge.wire={precision}"] if "edge" in fleet else [])


@contextmanager
def kill_one(folder: Path, role: str, log: Path) -> Iterator[None]:
    """SIGKILL for one worker or stage, when the first round is done."""
    killed, over = [], threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline and not over.wait(0.02):
            if log.exists() and "round 1: anchor" in log.read_text():
                found = [process for process in kills.processes(folder) if process.role == role]
                if found:
                    os.kill(found[-1].pid, signal.SIGKILL)
                    killed.append(found[-1])
                    return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert killed, "the run was over before the kill"


def check(recipe: Recipe, url: str, logs: dict[str, str], num_processes: int, killed: str) -> Replay:
    """One history: every process of every replica said the digest that the bucket gives."""
    replay = Replay(open_ledger(url))
    while (manifest := replay.step()) is not None:
        said = [re.findall(rf"round {manifest.round}: anchor (\w{{16}})", log) for log in logs.values()]
        assert {digest for some in said for digest in some} == {replay.digest()[:16]}
        assert sum(map(len, said)) >= num_processes
        assert len(manifest.entries) == recipe.num_replicas
    assert replay.round == ROUNDS
    assert "killed by signal 9" in logs[killed]
    assert all("all rounds are done" in log for log in logs.values())
    return replay


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FLEETS)
def test_a_fleet_of_every_kind_ends_where_the_simulator_does_though_a_process_was_killed(
    kind: str, device: str, tmp_path: Path
):
    _, num_processes, role = FLEETS[kind]
    recipe = recipe_of(kind, "fp64" if device == "cpu" else "fp32")
    killed, run = ("edge" if role == "stage" else "rack"), tmp_path / "real"
    with kill_one(run, role, run / "logs" / f"{killed}.log"):
        real = train(recipe, run, device=device, quiet=True)
    assert kills.check_left_over(run) == []
    simulated = simulate(recipe, tmp_path / "simulated", device="cpu", quiet=True)
    assert [row.round for row in real.rows] == list(range(ROUNDS + 1))
    # On a GPU other kernels round otherwise, and a last bit decides which entries TOP-kappa keeps.
    tolerance = 1e-12 if device == "cpu" else 1e-3
    for ours, theirs in zip(real.rows, simulated.rows, strict=True):
        assert ours["loss_full"] == pytest.approx(theirs["loss_full"], rel=tolerance)
    logs = {path.stem: path.read_text() for path in (run / "logs").glob("*.log")}
    check(recipe, str(run / "bucket"), logs, num_processes, killed)


def test_a_mixed_fleet_over_s3_ends_where_the_simulator_does_though_a_process_was_killed(
    moto_url: str, tmp_path: Path
):
    """Its store looks whether a key is there and then writes it, in two steps: only one replica closes."""
    recipe = recipe_of("mixed")
    create(recipe, moto_url, tmp_path / "keys", ["rack"])
    fleet = Joined(tmp_path, moto_url)
    with kill_one(tmp_path, "stage", tmp_path / "edge.log"):
        for name in ("rack", "edge"):
            fleet.join(name)
        statuses = [process.wait(LIMIT_SECONDS) for process in fleet.running.values()]
    fleet.stop()
    assert statuses == [0, 0]
    logs = {name: fleet.log(name) for name in fleet.running}
    replay = check(recipe, moto_url, logs, 3, "edge")
    simulate(recipe, tmp_path / "simulated", device="cpu", quiet=True)
    expected = load_file(tmp_path / "simulated" / "model.safetensors")
    for name, tensor in replay.anchor.items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=0, atol=1e-6)
