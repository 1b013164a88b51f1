"""W&B and MLflow get every round once, with the values of its row; their faults are not the run's.

The packages are doubles that write down what they are told; where the real ones are installed, they are
tried too.
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
MLFLOW = """
import json, os
from types import SimpleNamespace as Made
def tell(*what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class MlflowClient:
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): tell("experiment", name); return "7"
    def create_run(self, experiment, run_name):
        tell("run", experiment, run_name)
        return Made(info=Made(run_id="abc123"))
    def update_run(self, run, status): tell("update", run, status)
    def log_param(self, run, key, value): tell("param", key, value)
    def log_metric(self, run, key, value, step): tell("metric", step, key, value)
    def set_terminated(self, run, status): tell("end", run, status)
"""


@pytest.fixture
def services(tmp_path, monkeypatch):
    """Both packages as doubles; services() -> what they were told so far."""
    for name, source in (("wandb", WANDB), ("mlflow", MLFLOW)):
        package = tmp_path / "packages" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    for name in ("WANDB_PROJECT", "WANDB_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mine.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    yield lambda: [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def logged(told: list) -> list[dict]:
    return [values for what, *rest in told if what == "log" for values in rest]


def test_both_get_every_round_once_with_the_values_of_its_row(services, request):
    command = request.getfixturevalue("isthmus")
    settings = ("--log", "wandb", "--log", "mlflow", "--log", "wandb", "--device", "cpu", "--quiet")
    assert command("simulate", "mine.toml", "--run", "run", *settings)[0] == 0
    rows, told = RunDir.open("run").rows(), services()
    assert logged(told) == [{"round": row.round, **dict(scalars(row))} for row in rows]
    metrics = [tuple(rest) for what, *rest in told if what == "metric"]
    assert metrics == [(row.round, tag, value) for row in rows for tag, value in scalars(row)]
    assert {tag for _, tag, _ in metrics} >= {"held-out/mixed", "train/edge", "bytes/payload_up"}
    about = RunDir.open("run").about
    assert ["init", about.get("wandb_run"), "isthmus", "run", ROUNDS, "allow"] in told
    assert ["param", "outer.rounds", str(ROUNDS)] in told
    assert ["finish", 0] in told
    assert ["end", "abc123", "FINISHED"] in told


def test_a_resumed_run_goes_on_where_it_was_logged_and_one_that_was_not_is_logged_from_its_start(services):
    stop = {"on_round": lambda row: row.round < 1}
    isthmus.simulate("mine.toml", "run", log=["wandb", "mlflow"], **stop, **QUIET)
    isthmus.resume("run", log=["wandb", "mlflow"], **QUIET)
    told = services()
    assert [values["round"] for values in logged(told)] == list(range(ROUNDS + 1))
    assert len({words[1] for words in told if words[0] == "init"}) == 1
    assert [words for words in told if words[0] in ("run", "update", "end")] == [
        ["run", "7", "run"], ["end", "abc123", "KILLED"], ["update", "abc123", "RUNNING"],
        ["end", "abc123", "FINISHED"],
    ]  # fmt: skip
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
    with pytest.raises(
        ConfigError, match='--log is "wandbs"; it is one of wandb, mlflow; did you mean "wandb"'
    ):
        isthmus.simulate("demo", tmp_path / "run", log="wandbs")
    assert not (tmp_path / "run").exists()


def test_a_watched_run_is_logged_once_and_its_losses_when_they_come(services):
    recipe = parse_recipe(TEXT)
    follower = LoggedRows(["wandb"], "s3://my-runs/first/", recipe)
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


def test_the_real_mlflow_keeps_a_run_in_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its own default is a database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    path = tmp_path / "run"
    isthmus.simulate(parse_recipe(TEXT), path, log="mlflow", on_round=lambda row: row.round < 1, **QUIET)
    isthmus.resume(path, log="mlflow", **QUIET)
    run, client = RunDir.open(path), mlflow.MlflowClient()
    known = run.about.get("mlflow_run")
    assert isinstance(known, str)
    found = client.get_run(known)
    assert (found.info.status, found.info.run_name, found.data.params["outer.rounds"]) == (
        "FINISHED",
        "run",
        "3",
    )
    history = client.get_metric_history(known, "held-out/mixed")
    assert [(point.step, point.value) for point in history] == [
        (row.round, row.loss_mixed) for row in run.rows()
    ]
