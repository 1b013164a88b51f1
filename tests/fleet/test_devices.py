"""One real fleet of each kind and one kill, on a CPU and on a GPU: what a new torch or machine is tried with.

python3 -m pytest -m fleet_check tests/fleet         CONTRIBUTING.md, "Another torch, another machine"
"""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from faults import kills
from small_recipes import EDGE, RACK, recipe_text

from isthmus import simulate, train
from isthmus.config import parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.replay import Replay

ON_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
FLEETS = {"full": (RACK, 1), "pipelined": (EDGE, 2), "mixed": (RACK + EDGE, 3)}  # with their processes
LIMIT_SECONDS = 180.0

pytestmark = pytest.mark.fleet_check


def recipe_of(fleet: str, rounds: int = 2, inner_steps: int = 4):
    """fp32 everywhere, so that a GPU and the simulator on the CPU can be compared."""
    text = recipe_text(
        fleet,
        inner={"precision": "fp32"},
        outer={"inner_steps": inner_steps, "rounds": rounds, "keep": 64, "values": "fp32"},
        bucket={"deadline_seconds": 3600},
    )
    return parse_recipe(text, ["replicas.edge.wire=fp32"] if "edge" in fleet else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FLEETS)
def test_a_fleet_of_every_kind_trains_what_the_simulator_does(kind, device, tmp_path):
    fleet, num_processes = FLEETS[kind]
    recipe = recipe_of(fleet)
    real = train(recipe, tmp_path / "real", device=device, quiet=True)
    simulated = simulate(recipe, tmp_path / "simulated", device="cpu", quiet=True)
    assert [row.round for row in real.rows] == [0, 1, 2]
    # On a GPU other kernels round otherwise, and a last bit decides which entries TOP-kappa keeps.
    tolerance = 1e-5 if device == "cpu" else 1e-3
    for ours, theirs in zip(real.rows, simulated.rows, strict=True):
        assert ours["loss_full"] == pytest.approx(theirs["loss_full"], rel=tolerance)
    replay = Replay(open_ledger(str(tmp_path / "real" / "bucket")))
    logs = "\n".join(path.read_text() for path in (tmp_path / "real" / "logs").glob("*.log"))
    while (manifest := replay.step()) is not None:
        told = re.findall(rf"round {manifest.round}: anchor ([0-9a-f]{{16}})", logs)
        assert told == [replay.digest()[:16]] * num_processes
        assert len(manifest.entries) == recipe.num_replicas
    assert replay.round == 2


def kill_worker(run: Path, killed: list[int], over: threading.Event) -> None:
    """SIGKILL for the worker of `rack`, when its first round is done."""
    log, deadline = run / "logs" / "rack.log", time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and not over.wait(0.02):
        if not log.exists() or "round 1: anchor" not in log.read_text():
            continue
        for process in kills.processes(run):
            if process.role == "full":
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_worker_comes_back_and_the_run_has_one_history(device, tmp_path):
    recipe, run = recipe_of(RACK + EDGE, rounds=12), tmp_path / "run"
    killed: list[int] = []
    over = threading.Event()
    watcher = threading.Thread(target=kill_worker, args=(run, killed, over), daemon=True)
    watcher.start()
    try:
        train(recipe, run, device=device, quiet=True)
    finally:
        over.set()
        watcher.join()
    assert killed, "the run was over before the kill"
    log = (run / "logs" / "rack.log").read_text()
    assert "the worker ended (killed by signal 9); starting it again" in log
    assert kills.check_left_over(run) == []
    outcome = kills.Outcome([], [], 0.0, 0.0, 12, 0)
    assert kills.check_history(run, str(run / "bucket"), 12, outcome) == []
    # A slow machine may settle rounds without a replica that is silent for long; it is back for the last.
    assert "all rounds are done" in log.rpartition("starting it again")[2]
