"""W&B gets every round once, with the values of its row; its faults are not the run's.

The package is a double that writes down what it is told; where the real one is installed, it is tried too.
"""

import json
import sys

import pytest
from small_recipes import EDGE, RACK, recipe_text

import isthmus
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.page.loggers import LoggedRows, check_loggers
from isthmus.page.tensorboard import scalars
from isthmus.runlog import Row, RunDir

ROUNDS = 3
TEXT = recipe_text(RACK + EDGE, outer={"rounds": ROUNDS})
QUIET = {"device": "cpu", "quiet": True}

WANDB = """
import json, os
def tell(*what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class Settings:
    def __init__(self, **settings): self.settings = settings
class Run:
    def define_metric(self, name, step_metric=None): pass
    def log(self, values):
        if values["round"] == int(os.environ.get("FAILS_AT", -1)):
            raise OSError("the server is gone\\nand more")
        tell("log", values)
    def finish(self, exit_code): tell("finish", exit_code)
def init(id, project, name, config, settings, **rest):
    if os.environ.get("FAILS"):
        raise RuntimeError("no API key configured\\nand a page of advice")
    tell("init", id, project, name, config["outer"]["rounds"], rest["resume"])
    return Run()
"""


@pytest.fixture
def services(tmp_path, monkeypatch):
    """The package as a double; services() -> what it was told so far."""
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(WANDB)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    for name in ("WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mine.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    yield lambda: [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def logged(told: list) -> list[dict]:
    return [values for what, *rest in told if what == "log" for values in rest]


def test_it_gets_every_round_once_with_the_values_of_its_row(services, request):
    command = request.getfixturevalue("isthmus")
    settings = ("--log", "wandb", "--log", "wandb", "--device", "cpu", "--quiet")
    assert command("simulate", "mine.toml", "--run", "run", *settings)[0] == 0
    rows, told = RunDir.open("run").rows(), services()
    assert logged(told) == [{"round": row.round, **dict(scalars(row))} for row in rows]
    assert logged(told)[-1].keys() >= {"held-out/mixed", "train/edge", "bytes/payload_up"}
    about = RunDir.open("run").about
    assert ["init", about.get("wandb_run"), "isthmus", "run", ROUNDS, "allow"] in told
    assert ["finish", 0] in told


def test_a_resumed_run_goes_on_where_it_was_logged_and_one_that_was_not_is_logged_from_its_start(services):
    stop = {"on_round": lambda row: row.round < 1}
    isthmus.simulate("mine.toml", "run", log="wandb", **stop, **QUIET)
    isthmus.resume("run", log="wandb", **QUIET)
    told = services()
    assert [values["round"] for values in logged(told)] == list(range(ROUNDS + 1))
    assert len({words[1] for words in told if words[0] == "init"}) == 1
    isthmus.simulate("mine.toml", "later", **stop, **QUIET)
    isthmus.resume("later", log="wandb", **QUIET)
    assert [values["round"] for values in logged(services()[len(told) :])] == list(range(ROUNDS + 1))


def test_a_logger_that_fails_ends_the_logging_by_one_line_and_not_the_run(services, monkeypatch, capsys):
    monkeypatch.setenv("FAILS_AT", "1")
    results = isthmus.simulate("mine.toml", "run", log="wandb", **QUIET)
    assert results.last.round == ROUNDS
    assert RunDir.open("run").about.get("status") == "finished"
    said = "isthmus: --log wandb: the server is gone; the run goes on without it\n"
    assert capsys.readouterr().err == said
    assert [values["round"] for values in logged(services())] == [0]


def test_settings_that_will_not_do_are_one_line_before_anything_trains(services, monkeypatch, request):
    command = request.getfixturevalue("isthmus")
    monkeypatch.setenv("FAILS", "1")
    status, out, err = command("simulate", "mine.toml", "--log", "wandb", "--device", "cpu", "--quiet")
    assert (status, out, err) == (2, "", "isthmus: --log wandb: no API key configured\n")
    assert RunDir.open("runs/small").rows() == []


def test_a_package_that_is_not_installed_is_said_with_its_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # as W&B leaves behind where it ran
    with pytest.raises(
        ConfigError, match=r"--log wandb needs its package: pip install wandb, or isthmus\[wandb\]"
    ):
        check_loggers(["wandb"])
    for name, words in (("wandbs", 'did you mean "wandb"'), ("mlflow", "no --log mlflow any more")):
        with pytest.raises(ConfigError, match=words):
            isthmus.simulate("demo", tmp_path / "run", log=name)
    assert not (tmp_path / "run").exists()


def test_a_watched_run_is_logged_once_and_its_losses_when_they_come(services):
    recipe = parse_recipe(TEXT)
    follower = LoggedRows("s3://my-runs/first/", recipe)
    first, second = Row(round=0, loss_full=5.0), Row(round=1, loss_train=4.5)
    follower.add([first, second])
    follower.add([first, second])
    second.loss_full = 4.0
    follower.add([first, second, Row(round=ROUNDS, loss_full=3.0)])
    follower.close()
    told = services()
    assert told[0][2:4] == ["isthmus", "first"]
    values = [
        {key: entry[key] for key in entry if key in ("round", "held-out/full", "train/all")}
        for entry in logged(told)
    ]
    assert values == [
        {"round": 0, "held-out/full": 5.0},
        {"round": 1, "train/all": 4.5},
        {"round": 1, "held-out/full": 4.0},
        {"round": ROUNDS, "held-out/full": 3.0},
    ]
    assert told[-1] == ["finish", 0]


def test_the_real_wandb_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    isthmus.simulate(parse_recipe(TEXT), tmp_path / "run", log="wandb", **QUIET)
    known = RunDir.open(tmp_path / "run").about.get("wandb_run")
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{known}/run-{known}.wandb")
    stored = file.read_bytes()
    assert stored.count(b"held-out/mixed") >= ROUNDS
    assert b"inner_steps" in stored  # the recipe
