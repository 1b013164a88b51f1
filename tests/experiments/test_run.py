"""`isthmus reproduce` as a user meets it, with two rounds of a tiny fleet."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from regime_lines import all_trials, regime_line

from experiments.catalog import rows_of
from experiments.lines import append, read
from experiments.tables import pick_scale, recipe_of
from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.simulator.run import simulate

ROOT = Path(__file__).parents[2]
TOY = ["--scale", "toy", "--corpus", "builtin:sample", "--device", "cpu", "--commit", "c0ffee"]
SCALE = pick_scale("toy")


def lines_in(folder):
    return {(line["row"], line["seed"]): line for line in read(folder, SCALE)}


def test_rows_are_run_once_and_score_as_the_simulator_scores_them(tmp_path, capfd):
    folder = tmp_path / "found"
    command = ["reproduce", "1", *TOY, "--only", "het-8", "--seeds", "0,1", "--results", str(folder)]
    assert main([*command, "--jobs", "2"]) == 0
    out, err = capfd.readouterr()
    assert out == f"2 runs finished, 0 left, lines in {folder}/\n"
    assert "het-8 seed 1: full" in err
    found = lines_in(folder)
    assert set(found) == {("het-8", 0), ("het-8", 1)}
    assert main([*command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"finished": 0, "left": [], "faults": []}
    line = found["het-8", 1]
    assert (line["commit"], line["device"]) == ("c0ffee", "cpu")
    rows = simulate(parse_recipe(line["recipe"]), tmp_path / "run", device="cpu", quiet=True).rows
    for view in ("loss_full", "loss_pipelined", "loss_mixed"):
        assert line[view] == pytest.approx(rows[-1][view], abs=2e-6)
    assert [point[0] for point in line["curve"]] == [row["round"] for row in rows]
    assert line["loss_full"] != found["het-8", 0]["loss_full"]
    assert line["tokens"] == rows[-1]["tokens"]


def test_without_the_packages_that_only_fleets_need_a_run_goes_through(tmp_path):
    missing = ("obstore", "cryptography", "pyarrow", "rich", "matplotlib", "tensorboardX")
    for name in missing:  # a package of that name that cannot be imported
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}", "ISTHMUS_COMMIT": "c0ffee"}
    command = [sys.executable, "-m", "isthmus", "reproduce", "4", *TOY[:-2], "--only", "adamw"]
    command += ["--seeds", "0", "--results", "found"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert lines_in(tmp_path / "found")["adamw", 0]["commit"] == "c0ffee"


def test_after_a_kill_the_same_command_makes_the_rest_and_no_line_twice(tmp_path):
    command = [sys.executable, "-m", "isthmus", "reproduce", "4", *TOY, "--seeds", "0", "--results", "found"]
    command += ["--only", "adamw", "--only", "adamw-pp-8"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    first = subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 600
    while not (tmp_path / "found" / "4.jsonl").exists() and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if first.poll() is None:  # on a machine that starves this process, it may have ended by now
        os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    rows = [json.loads(text)["row"] for text in (tmp_path / "found" / "4.jsonl").read_text().splitlines()]
    assert sorted(rows) == ["adamw", "adamw-pp-8"]


def test_a_run_that_diverges_is_a_line_that_says_so(tmp_path):
    from experiments.trial import run_trial

    recipe = recipe_of(rows_of(SCALE)["adamw"], SCALE, 0, "builtin:sample", {"adamw": 1e6})
    line = run_trial("adamw", "toy", recipe, "cpu", "c0ffee")
    assert "the loss is nan" in line["failed"]
    assert line["loss_full"] is None
    append(tmp_path / "4.jsonl", line)
    assert read(tmp_path, SCALE) == [line]


def test_a_worker_that_dies_is_reported_and_what_it_had_is_left(tmp_path, capfd, monkeypatch):
    from experiments import runner

    monkeypatch.setattr(
        runner, "WORKER", (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)")
    )
    command = ["reproduce", "4", *TOY, "--seeds", "0", "--results", str(tmp_path)]
    assert main(command) == 1
    out, err = capfd.readouterr()
    assert "its worker ended with status 3" in err
    assert "0 runs finished, 2 left" in out


def test_a_limit_of_time_begins_nothing_that_would_pass_it(tmp_path, capfd):
    assert main(["reproduce", "4", *TOY, "--minutes", "0", "--results", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    assert "0 runs finished, 9 left" in out
    assert "the same command continues" in err


def test_a_dry_run_lists_what_is_missing_and_its_time(tmp_path, capsys):
    assert main(["reproduce", "all", "--dry-run", "--json", "--results", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["runs"]) > 100
    assert told["there"] == 0
    assert told["seconds"] > 60
    assert main(["reproduce", "1", "--dry-run", "--results", str(tmp_path)]) == 0
    assert "9 of 9 runs are missing" in capsys.readouterr().out


def test_a_dry_run_without_a_corpus_knows_lines_of_either_half_of_a_text(tmp_path, capsys):
    for entry in (*all_trials(), regime_line("dense", 0, 3.0), regime_line("dense-again", 1, 3.0)):
        append(tmp_path / "regime.jsonl", entry)
    command = ["reproduce", "tune-regime", "regime", "--scale", "24m-4", "--dry-run", "--json"]
    assert main([*command, "--results", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    missing = {(run["row"], run["seed"]) for run in told["runs"]}
    assert told["there"] == len(all_trials()) + 2
    assert not {row for row, _ in missing if row.startswith("trial-")}
    assert ("regime-dense", 0) not in missing
    assert {("regime-dense", 1), ("regime-dense-again", 0), ("regime-het-8", 0)} <= missing


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            [],
            "give a table: tune, tune-more, 1, 4, 2, 3, 5, aggregation, h, values, 1-star, finish, recomm",
        ),
        (["6", "--corpus", "x"], 'there is no table "6"'),
        (["1"], "--corpus is missing"),
        (["1", "--corpus", "nowhere"], "isthmus data prepare"),
        (
            ["1", "--corpus", "builtin:sample", "--only", "het-9"],
            '--only is "het-9"; these tables have dense',
        ),
        (["1", "--corpus", "builtin:sample", "--seeds", "a"], "write whole numbers as 0,1,2"),
        (["1", "--corpus", "builtin:sample", "--scale", "huge"], "it is one of 12m"),
        (["1", "--corpus", "builtin:sample", "--scale", "toy"], 'another folder than "results"'),
        (["1", "--corpus", "builtin:sample", "--jobs", "0"], "--jobs is 0"),
        (["--render"], "give --docs its folder"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
