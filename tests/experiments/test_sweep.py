"""`python -m experiments sweep` with two rounds of a tiny fleet."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.lines import append, read
from experiments.rows import pick
from isthmus.config import dump_recipe, parse_recipe
from isthmus.simulator.run import simulate

ROOT = Path(__file__).parents[2]
TOY = ["--scale", "toy", "--corpus", "builtin:sample", "--device", "cpu", "--commit", "c0ffee"]


def task(recipe, folder, state=None):
    from experiments.sweep import Task

    return Task("a row", "toy", dump_recipe(recipe), "", "cpu", "c0ffee", folder / "toy.jsonl", state)


def test_a_line_has_the_losses_of_the_simulator_and_is_not_made_twice(tmp_path, capfd):
    command = ["sweep", "het-8", *TOY, "--results", str(tmp_path), "--jobs", "2"]
    assert main(command) == 0
    assert capfd.readouterr().out == f"2 runs finished, 0 left, lines in {tmp_path}/\n"
    found = {line["seed"]: line for line in read(tmp_path)}
    assert set(found) == {0, 1}
    assert main(command) == 0
    assert capfd.readouterr().out.startswith("0 runs finished, 0 left")
    line = found[1]
    assert (line["row"], line["commit"], line["device"]) == ("het-8", "c0ffee", "cpu")
    rows = simulate(parse_recipe(line["recipe"]), tmp_path / "run", device="cpu", quiet=True).rows
    for view in ("loss_full", "loss_pipelined", "loss_mixed"):
        assert line[view] == pytest.approx(rows[-1][view], abs=2e-6)
    assert [point[0] for point in line["curve"]] == [row["round"] for row in rows]
    assert line["tokens"] == rows[-1]["tokens"]


def test_after_a_kill_the_same_command_makes_the_rest_and_no_line_twice(tmp_path):
    command = [sys.executable, "-m", "experiments", "sweep", "adamw", "adamw-pp-8", *TOY]
    command += ["--results", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    first = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "toy.jsonl").exists() and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if first.poll() is None:
        os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    subprocess.run(command, env=env, check=True, capture_output=True)
    rows = [json.loads(text)["row"] for text in (tmp_path / "toy.jsonl").read_text().splitlines()]
    assert sorted(rows) == ["adamw", "adamw-pp-8"]


def test_a_run_that_was_cut_off_goes_on_from_its_state(tmp_path, monkeypatch):
    from experiments import trial

    monkeypatch.setattr(trial, "SAVE_SECONDS", 0.0)
    recipe = pick(["het-8"], "toy")[0].recipe(0, "builtin:sample")
    recipe = replace(recipe, outer=replace(recipe.outer, rounds=3))
    whole = trial.run_trial(task(recipe, tmp_path), recipe)
    real, rounds = trial.checkpoint.save, []

    def cut_off(folder, number, state):
        if number == 2:
            raise KeyboardInterrupt
        rounds.append(number)
        real(folder, number, state)

    monkeypatch.setattr(trial.checkpoint, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        trial.run_trial(task(recipe, tmp_path, tmp_path / "state"), recipe)
    assert rounds == [1]
    monkeypatch.setattr(trial.checkpoint, "save", real)
    resumed = trial.run_trial(task(recipe, tmp_path, tmp_path / "state"), recipe)
    assert resumed["curve"] == whole["curve"]


def test_a_run_that_diverges_is_a_line_that_says_so(tmp_path):
    from experiments.trial import run_trial

    recipe = pick(["adamw"], "toy")[0].recipe(0, "builtin:sample")
    recipe = replace(recipe, inner=replace(recipe.inner, lr=1e6))
    line = run_trial(task(recipe, tmp_path), recipe)
    assert "the loss is nan" in line["failed"]
    assert line["loss_full"] is None
    append(tmp_path / "toy.jsonl", line)
    assert read(tmp_path) == [line]


def test_a_limit_of_time_begins_nothing_that_would_pass_it(tmp_path, capfd):
    assert main(["sweep", *TOY, "--minutes", "0", "--results", str(tmp_path)]) == 0
    assert "0 runs finished, 4 left" in capfd.readouterr().out


def test_a_dry_run_lists_what_is_missing(capsys):
    assert main(["sweep", "1", "next", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "next-recommended seed 2" in out
    assert "\n12m" not in out  # Table 1 is recorded
    assert "18 runs are missing" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sweep", "--scale", "huge"], 'experiments: --scale is "huge"'),
        (["sweep", "het-9"], 'no row and no file "het-9"'),
        (["sweep", "1"], "--corpus is missing"),
        (["sweep", "1", "--corpus", "nowhere"], "nowhere"),
        (["sweep", "--corpus", "builtin:sample"], "give --scale"),
        (["sweep", "--scale", "toy", "--corpus", "builtin:sample"], 'another folder than "results"'),
        (["sweep", "--scale", "toy", "--jobs", "0"], "--jobs is 0"),
        (["figure", "wallclock", "--to", "figure.pdf"], r"must end in .png or .svg"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
