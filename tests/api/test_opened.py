"""A run by its folder or its bucket: the same rows, the same settings, the same weights."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from small_recipes import EDGE, RACK, recipe_text

import isthmus
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.model.llama import init_params
from isthmus.runlog import Row
from isthmus.runlog.results import to_frame
from isthmus.store.objects import open_store

ROUNDS = 3
RECIPE = parse_recipe(recipe_text(RACK + EDGE, outer={"rounds": ROUNDS}, bucket={"anchor_every": 2}))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Path:
    """A finished run of real processes, with its bucket."""
    path = tmp_path_factory.mktemp("opened") / "run"
    isthmus.train(RECIPE, path, device="cpu", quiet=True)
    return path


@pytest.fixture(scope="module")
def simulation(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("opened") / "run"
    isthmus.simulate(RECIPE, path, device="cpu", quiet=True, on_round=lambda row: row.round < 2)
    return path


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_folder_and_bucket_tell_the_same_run(fleet):
    folder, bucket = isthmus.open_run(fleet), isthmus.open_run(str(fleet / "bucket"))
    by_url = isthmus.open_run((fleet / "bucket").resolve().as_uri())
    for run in (folder, bucket, by_url):
        assert (run.rounds, run.status, run.recipe) == (ROUNDS, "finished", RECIPE)
        assert run.config["outer"]["rounds"] == ROUNDS
        assert [row.round for row in run.rows] == list(range(ROUNDS + 1))
        assert "trained a model of" in run.summary()
        assert str(run.where) in repr(run)
    for ours, theirs in zip(folder.rows, bucket.rows, strict=True):
        assert (ours.tokens, ours.loss_train, ours.bytes) == (theirs.tokens, theirs.loss_train, theirs.bytes)


def test_a_bucket_of_s3_is_opened_and_compared_by_its_url(fleet, simulation, moto_url, request):
    """Its address is printed as it was given."""
    isthmus_command = request.getfixturevalue("isthmus")  # whose name is the package's
    store = open_store(moto_url)
    for path in (fleet / "bucket").rglob("*"):
        if path.is_file():
            store.put(path.relative_to(fleet / "bucket").as_posix(), path.read_bytes())
    run = isthmus.open_run(moto_url)
    assert (run.where, run.rounds, run.recipe) == (moto_url, ROUNDS, RECIPE)
    assert same(run.weights(1), isthmus.open_run(fleet).weights(1))
    status, out, _ = isthmus_command("compare", simulation, moto_url, "--json")
    assert status == 0
    assert [entry["run"] for entry in json.loads(out)["runs"]] == [str(simulation), moto_url]
    status, out, _ = isthmus_command("compare", moto_url, fleet / "bucket", "--plot", fleet / "both.svg")
    assert status == 0
    assert "Plot of loss_train" in out  # nobody has scored it
    assert moto_url.rpartition("/")[2] in out
    assert "<svg" in (fleet / "both.svg").read_text()


def test_weights_are_those_of_the_round_that_was_asked_for(fleet):
    folder, bucket = isthmus.open_run(fleet), isthmus.open_run(fleet / "bucket")
    assert same(folder.weights(), bucket.weights())
    assert same(folder.weights(1), bucket.weights(1))
    assert not same(bucket.weights(1), bucket.weights(ROUNDS))
    first = init_params(RECIPE.model, RECIPE.seed)
    assert same(bucket.weights(0), {name: tensor.float() for name, tensor in first.items()})
    with pytest.raises(ConfigError, match="round 4 is not settled; this run has the rounds 0 to 3"):
        bucket.weights(ROUNDS + 1)


def test_a_simulation_has_its_newest_weights_and_goes_on_to_be_read(simulation):
    run = isthmus.open_run(simulation)
    assert (run.rounds, run.status) == (2, "interrupted")
    assert set(run.weights()) == set(RECIPE.model.shapes())
    assert same(run.weights(), run.weights(2))
    with pytest.raises(ConfigError, match="keeps its newest weights only, of round 2"):
        run.weights(1)
    isthmus.resume(simulation, device="cpu", quiet=True)
    assert run.rounds == 2
    run.refresh()
    assert (run.rounds, run.status) == (ROUNDS, "finished")


def test_what_is_no_run_is_said_in_one_line(tmp_path):
    for given in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match="such as runs/demo"):
            isthmus.open_run(given)


ROWS = [
    Row(round=0, loss_full=5.0),
    Row(
        round=1, tokens=64, loss_full=4.0, loss_train=4.5, train_by_kind={"rack": 4.5}, contributors=["rack"]
    ),
]


def test_a_frame_has_the_round_as_its_index_and_tables_as_columns(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = isthmus.Results(tmp_path, ROWS).to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == [0, 1]
    assert list(frame.loss_full) == [5.0, 4.0]
    assert math.isnan(frame.loss_train[0])
    assert frame["train_by_kind.rack"][1] == 4.5
    assert frame["bytes.payload_up"].sum() == 0
    assert frame.contributors[1] == ["rack"]
    assert len(to_frame([])) == 0


def test_a_frame_without_pandas_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="to_frame needs pandas: pip install pandas"):
        isthmus.Results(tmp_path, ROWS).to_frame()
