"""2N rounds = N + kill + N, bit for bit; what stops a run is named, and what was good stays on disk."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_recipes import EDGE, RACK, recipe_text

from isthmus import simulate
from isthmus.config import parse_recipe
from isthmus.errors import RunError
from isthmus.model import checkpoint
from isthmus.replica.stack import Stack
from isthmus.runlog import TIMING_FIELDS, RunDir
from isthmus.simulator import rounds as loop
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.run import resume

RECIPE = recipe_text(RACK + EDGE, outer={"inner_steps": 4, "rounds": 12, "values": "2bit"})
LIMIT_SECONDS = 300.0  # for a machine that does much else; nothing waits for it


def history(run):
    """Everything a run leaves that does not depend on the clock."""
    rows = [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in RunDir.open(run).rows()]
    weights = load_file(Path(run) / "model.safetensors")
    return rows, {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    path = tmp_path_factory.mktemp("straight") / "run"
    recipe = path.parent / "t.toml"
    recipe.write_text(RECIPE)
    subprocess.run([sys.executable, "-m", "isthmus.cli.main", "simulate", recipe, "--run", path], check=True)
    return recipe, path


@pytest.mark.soak
def test_killed_again_and_again_and_resumed_it_ends_in_the_same_bits(straight, tmp_path):
    recipe, path = straight
    run, moment = tmp_path / "run", random.Random(0)
    kills = 0
    for strikes in (True, True, True, True, False):
        state = ["--resume", str(run)] if (run / "recipe.toml").exists() else [str(recipe), "--run", str(run)]
        command = [sys.executable, "-m", "isthmus.cli.main", "simulate", "--quiet", *state]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        if strikes:  # somewhere in the rounds after its first row
            before, deadline = len(rows(run)), time.monotonic() + LIMIT_SECONDS
            while process.poll() is None and len(rows(run)) <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(moment.random() * 0.3)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        if process.wait() == 0:
            break
    assert process.returncode == 0
    assert kills >= 1
    assert history(run) == history(path)


class Killed(BaseException):
    """Stands for SIGKILL."""


POINTS = {
    "the row": (RunDir, "append"),
    "the state": (checkpoint, "save"),
    "a file of the state": (checkpoint, "save_tensors"),
    "the anchor's step": (SimulatedFleet, "apply"),
}


SHORT = parse_recipe(RECIPE, ["outer.rounds=4"])


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return simulate(SHORT, tmp_path_factory.mktemp("short") / "run", device="cpu", quiet=True).run_dir


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_ended_at_any_point_of_a_round_it_goes_on_to_the_same_bits(
    short, tmp_path, monkeypatch, point, after
):
    monkeypatch.setattr(loop, "SAVE_SHARE", 1e9)  # at every round's edge
    owner, name = POINTS[point]
    real, left = getattr(owner, name), [3]  # the third time that it comes by

    def deadly(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Killed
        result = real(*args, **kwargs)
        if left[0] == 0:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, deadly)
    with pytest.raises(Killed):
        simulate(SHORT, tmp_path / "run", device="cpu", quiet=True)
    resume(tmp_path / "run", quiet=True)
    assert history(tmp_path / "run") == history(short)


def rows(run):
    try:
        return (run / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("method", ["sparseloco", "diloco", "adamw"])
@pytest.mark.parametrize(
    "extra", [[], ["subspace.grassmann_every=4"], ["subspace.adaptation=false"], ["finish.rounds=3"]]
)
def test_every_method_resumes_from_its_state(tmp_path, monkeypatch, method, extra):
    recipe = parse_recipe(RECIPE, [f"outer.method={method}", "outer.rounds=4", *extra])
    simulate(recipe, tmp_path / "straight", device="cpu", quiet=True)

    real_save = checkpoint.save

    def save_then_stop(directory, rounds, files):
        real_save(directory, rounds, files)
        if rounds == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", save_then_stop)
    monkeypatch.setattr(loop, "SAVE_SHARE", 1e9)  # at every round's edge
    with pytest.raises(KeyboardInterrupt):
        simulate(recipe, tmp_path / "stopped", device="cpu", quiet=True)
    monkeypatch.undo()
    assert RunDir.open(tmp_path / "stopped").about["status"] == "interrupted"
    resume(tmp_path / "stopped", quiet=True)
    assert history(tmp_path / "stopped") == history(tmp_path / "straight")


def test_a_diverging_replica_is_named_with_its_step_and_learning_rate(tmp_path):
    recipe = parse_recipe(RECIPE, ["inner.lr=1e6", "inner.clip=0", "inner.warmup_steps=0"])
    with pytest.raises(
        RunError, match=r"replica rack: the loss is nan at inner step 3 .*learning rate 9.96e\+05.*Try"
    ):
        simulate(recipe, tmp_path / "run", device="cpu", quiet=True)
    about = RunDir.open(tmp_path / "run").about
    assert about["status"] == "failed"
    assert "replica rack" in about["error"]


def test_a_non_finite_loss_leaves_the_last_good_round_on_disk(tmp_path, monkeypatch):
    recipe = parse_recipe(RECIPE, ["outer.rounds=4"])
    monkeypatch.setattr(loop, "SAVE_SHARE", 1e9)
    simulate(recipe, tmp_path / "straight", device="cpu", quiet=True)
    real_step, calls = Stack.inner_step, []

    def poisoned(stack, tokens):
        calls.append(1)
        if len(calls) == 10:  # the second step of round 3
            stack.params["norm.weight"].data[1] = float("nan")
        return real_step(stack, tokens)

    monkeypatch.setattr(Stack, "inner_step", poisoned)
    with pytest.raises(RunError, match=r"replica edge: the loss is nan at inner step 10 \(round 3\)"):
        simulate(recipe, tmp_path / "run", device="cpu", quiet=True)
    run = RunDir.open(tmp_path / "run")
    assert [row["round"] for row in run.rows()] == [0, 1, 2]
    assert checkpoint.load(run.state_path)[0] == 2
    assert run.report_path.exists()
    resume(tmp_path / "run", quiet=True)  # the fault was passing: the run is whole again
    assert history(tmp_path / "run") == history(tmp_path / "straight")
