"""Runs from Python: whatever names a recipe is taken, every round is told, and a stop loses nothing."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipes import EDGE, RACK, recipe_text

import isthmus
from isthmus.api.runs import as_recipe
from isthmus.config import load_recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.runlog import TIMING_FIELDS, Row, RunDir

ROUNDS = 4
TEXT = recipe_text(RACK + EDGE, outer={"rounds": ROUNDS})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(TEXT)
    return tmp_path


def told(rows) -> list[dict]:
    """Rows without what depends on the clock."""
    return [{key: value for key, value in row.items() if key not in TIMING_FIELDS} for row in rows]


def test_the_names_are_listed_and_found_and_import_loads_nothing_slow():
    assert set(isthmus.__all__) <= set(dir(isthmus))
    assert {"simulate", "train", "open_run", "__version__"} <= set(dir(isthmus))
    code = (
        "import sys, isthmus; before = set(sys.modules)\n"
        "for name in {*isthmus.__all__} - {'OuterSync', 'SparseLoCo'}: getattr(isthmus, name)\n"
        "print(len([m for m in before if m.startswith('isthmus')]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        isthmus.simulated  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("simulate", "train", "resume", "open_run", "plan"):
        assert inspect.getdoc(getattr(isthmus, name)), name


def test_a_recipe_is_a_path_a_name_or_itself_and_settings_apply_to_each(folder):
    ours = parse_recipe(TEXT)
    assert as_recipe("mine.toml") == as_recipe(folder / "mine.toml") == as_recipe(ours) == ours
    assert as_recipe("demo") == load_recipe("demo")
    wanted = {"outer.keep": 9, "inner.lr": 1e-2, "replicas.edge.compression": "1/2", "name": "another"}
    for given in ("mine.toml", ours):
        found = as_recipe(given, wanted)
        assert (found.outer.keep, found.inner.lr, found.name) == (9, 1e-2, "another")
        assert found.replicas[1].compression == "1/2"
        assert as_recipe(given, ["outer.keep=9"]) == as_recipe(given, "outer.keep=9")
    with pytest.raises(ConfigError, match=r'unknown key "outer\.kep"; did you mean "keep"'):
        as_recipe(ours, {"outer.kep": 9})
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        isthmus.simulate("nowhere.toml")


def test_plan_tells_what_a_run_will_take_without_running_it(folder):
    forecast = isthmus.plan("mine.toml", overrides={"outer.rounds": 7}, tflops=1.0)
    assert forecast.rounds == 7
    assert forecast.bytes["payload_up"] > 0
    assert sorted(path.name for path in folder.iterdir()) == ["mine.toml"]


def test_every_round_is_told_as_it_ends_and_equals_the_rows_of_the_results(folder):
    got: list[Row] = []
    results = isthmus.simulate("mine.toml", "run", device="cpu", quiet=True, on_round=got.append)
    assert [row.round for row in got] == list(range(ROUNDS + 1))
    assert [dict(row) for row in got] == [dict(row) for row in results.rows]
    assert isinstance(got[-1].loss_full, float)
    assert isinstance(got[-1].bytes["payload_up"], int)
    assert got[-1].loss_train is not None
    assert got[0].loss_train is None


@pytest.mark.parametrize("how", ["false", "raise"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_simulation_that_was_stopped_goes_on_as_if_it_had_not_been(folder, how, at):
    whole = isthmus.simulate("mine.toml", "whole", device="cpu", quiet=True)

    def stop(row: Row) -> bool:
        if row.round == at and how == "raise":
            raise RuntimeError("enough")
        return row.round < at

    if how == "raise":
        with pytest.raises(RuntimeError, match="enough"):
            isthmus.simulate("mine.toml", "run", device="cpu", quiet=True, on_round=stop)
    else:
        results = isthmus.simulate("mine.toml", "run", device="cpu", quiet=True, on_round=stop)
        assert results.last.round == at
    run = RunDir.open("run")
    assert (run.about.get("status"), run.about.get("error")) == ("interrupted", None)
    assert [row.round for row in run.rows()] == list(range(at + 1))
    assert run.report_path.is_file()
    got: list[Row] = []
    again = isthmus.resume("run", device="cpu", quiet=True, on_round=got.append)
    first = at + 1 if at else 0  # nothing was saved before the first round
    assert [row.round for row in got] == list(range(first, ROUNDS + 1))
    assert told(again.rows) == told(whole.rows)
    assert RunDir.open("run").about.get("status") == "finished"


def test_a_fleet_of_processes_tells_whole_rows_and_leaves_when_it_is_asked_to(folder):
    """It is resumed to its end by the same call that resumes a simulation."""
    got: list[Row] = []

    def stop(row: Row) -> bool:
        got.append(row)
        return row.round < 1

    # More rounds than can pass until the first is scored.
    long = {"outer.rounds": 500, "replicas.edge.count": 1}
    results = isthmus.train("mine.toml", "run", overrides=long, device="cpu", quiet=True, on_round=stop)
    assert [row.round for row in got] == [0, 1]
    assert all(row.loss_full is not None for row in got)
    run = RunDir.open("run")
    done = results.last.round
    assert 1 <= done < 500
    assert run.about.get("status") == "interrupted"
    again: list[Row] = []

    def stop_later(row: Row) -> bool:
        again.append(row)
        return row.round < done + 2

    isthmus.resume("run", device="cpu", quiet=True, on_round=stop_later)
    rounds = [row.round for row in again]
    assert rounds == list(range(rounds[0], done + 3))
    assert rounds[0] == done + 1  # the first run had scored all of its own before it ended


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: isthmus.simulate("demo", mode="fast"), 'mode is "fast"; it is one of auto, stacked, turns'),
        (lambda: isthmus.simulate("demo", device=0), "device is 0; it is a string such as"),
        (lambda: isthmus.train("demo", device=0), "device is 0; it is a string such as"),
        (lambda: isthmus.simulate("demo", on_round=3), "on_round is 3; it is a function"),
        (lambda: isthmus.plan("demo", tflops=float("nan")), "tflops is nan; it is 0 (not known) or more"),
        (lambda: isthmus.plan("demo", tflops=-1), "tflops is -1; it is 0 (not known) or more"),
    ],
)
def test_a_wrong_argument_is_one_line_and_starts_nothing(call, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(isthmus.ConfigError) as error:
        call()
    assert says in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_load_recipe_takes_overrides_as_a_dict_like_simulate():
    wanted = {"outer.keep": 9, "replicas.edge.compression": "1/2"}
    found = isthmus.load_recipe("demo", wanted)
    assert (found.outer.keep, str(found.replicas[1].ratio)) == (9, "1/2")
    assert found == isthmus.load_recipe("demo", [f"{key}={value}" for key, value in wanted.items()])
    assert parse_recipe(TEXT, {"name": "another"}).name == "another"


def test_results_are_shown_in_one_short_line():
    rows = [Row(round=0, loss_mixed=6.93), Row(round=1), Row(round=2, loss_mixed=4.25)]
    assert repr(isthmus.Results(Path("runs/a"), rows)) == "<Results of runs/a, 2 rounds, loss_mixed 4.2500>"
    assert repr(isthmus.Results(Path("runs/a"), rows[:2])) == "<Results of runs/a, 1 round>"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("isthmus.simulate('demo', overrides={'data.corpus': 'nowhere/'})", "there is no corpus in nowhere"),
        ("isthmus.train('demo', overrides={'data.corpus': 'nowhere/'})", "there is no corpus in nowhere"),
        ("isthmus.simulate('demo', device='tpu')", 'device is "tpu"; it is one of auto, cpu'),
        ("isthmus.train('demo', device='cuda')", "there is no CUDA device here"),
        ("main(['simulate', 'demo', '--device', 'cuda'])", "there is no CUDA device here"),
        ("main(['train', 'demo', '--set', 'data.corpus=nowhere/'])", "there is no corpus in nowhere"),
        ("main(['generate', 'demo', 'It', '--corpus', 'nowhere/'])", "there is no corpus in nowhere"),
        ("main(['eval', 'demo', '--device', 'mps:x'])", "it is one of auto, cpu"),
    ],
)
def test_a_missing_corpus_or_device_is_found_before_torch_is_loaded(call, says, tmp_path):
    code = (
        "import os, sys, isthmus; from isthmus.cli.main import main\n"
        "there = os.path.exists\n"
        "os.path.exists = lambda path: not str(path).startswith('/dev') and there(path)\n"
        f"try: {call}\n"
        "except isthmus.ConfigError as error: print(error, file=sys.stderr)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert says in done.stderr
    assert done.stdout == "False\n"
