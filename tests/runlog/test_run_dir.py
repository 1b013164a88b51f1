import json
import math
from pathlib import Path

import pytest

from isthmus.config import Recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.runlog import Row, RunDir, next_run_dir, totals

TEXT = (
    'name = "demo"\n[model]\npreset = "nano"\n[outer]\nrounds = 9\n[[replicas]]\nname = "rack"\ncount = 2\n'
)


@pytest.fixture
def recipe() -> Recipe:
    return parse_recipe(TEXT)


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "demo", recipe, {"status": "running"})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_loss_that_is_no_number_is_stored_as_valid_json(run: RunDir):
    run.append(
        {"round": 0, "loss_full": math.nan, "loss_by_kind": {"rack": math.inf}, "list": [-math.inf, 1.0]}
    )
    line = run.metrics_path.read_text()
    stored = json.loads(line, parse_constant=pytest.fail)
    assert stored == {"round": 0, "loss_full": None, "loss_by_kind": {"rack": None}, "list": [None, 1.0]}
    assert run.rows()[0].loss_full is None


@pytest.mark.parametrize("tail", [b'{"round": 2, "loss', b"{", b"\0\0\0", b"\xff\n", b'{"round": 2}'])
def test_a_torn_last_line_is_no_row_and_does_not_spoil_the_next(run: RunDir, tail: bytes):
    run.append({"round": 0})
    run.append({"round": 1})
    with open(run.metrics_path, "ab") as file:
        file.write(tail)
    assert [row["round"] for row in run.rows()] == [0, 1]
    run.truncate(1)
    run.append({"round": 2})
    assert [row["round"] for row in run.rows()] == [0, 1, 2]


def test_an_append_after_a_kill_starts_a_line_of_its_own(run: RunDir):
    run.append({"round": 0})
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"round": 1, "to')
    run.append({"round": 1, "tokens": 7})
    assert run.rows() == [Row(round=0), Row(round=1, tokens=7)]


def test_a_broken_line_in_the_middle_is_named(run: RunDir):
    run.metrics_path.write_text('{"round": 0}\nnonsense\n{"round": 2}\n')
    with pytest.raises(ConfigError, match="line 2"):
        run.rows()


def test_rows_of_other_versions_are_read_and_kept_as_they_were_written(run: RunDir):
    run.append({"round": 0, "from_tomorrow": 1})
    run.append({"round": 1, "bytes": None})
    run.append({"round": 2})
    before = run.metrics_path.read_text().splitlines()
    assert [row.bytes["control"] for row in run.rows()] == [0, 0, 0]
    run.truncate(1)
    assert run.metrics_path.read_text().splitlines() == before[:2]
    run.amend(Row(round=1, tokens=5))
    assert run.metrics_path.read_text().splitlines()[0] == before[0]
    assert run.rows()[1].tokens == 5


def test_any_row_can_be_amended_and_tidy_leaves_one_line_for_each_round(run: RunDir):
    for number in range(4):
        run.append({"round": number, "tokens": number})
    with open(run.metrics_path, "rb") as followed:  # by somebody's tail -f
        followed.read()
        run.amend(Row(round=1, tokens=5))
        run.append({"round": 4, "tokens": 4})
        run.amend(Row(round=0, tokens=7))
        assert [json.loads(line)["round"] for line in followed] == [1, 4, 0]
    amended = [Row(round=t, tokens=tokens) for t, tokens in enumerate((7, 5, 2, 3, 4))]
    assert run.rows() == amended
    run.tidy()
    lines = run.metrics_path.read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3, 4]
    assert run.rows() == amended
    before = run.metrics_path.stat().st_ino
    run.tidy()
    assert run.metrics_path.stat().st_ino == before  # there was nothing to do


def test_a_kill_while_a_row_is_amended_leaves_the_old_one(run: RunDir):
    run.append({"round": 0, "tokens": 1})
    run.append({"round": 1, "tokens": 2})
    whole = run.metrics_path.read_bytes()
    run.amend(Row(round=0, tokens=9))
    new = run.metrics_path.read_bytes()[len(whole) :]
    for cut in range(len(new)):
        run.metrics_path.write_bytes(whole + new[:cut])
        assert [row.tokens for row in run.rows()] == [1, 2]
    run.metrics_path.write_bytes(whole + new)
    assert [row.tokens for row in run.rows()] == [9, 2]


def test_truncate_drops_the_rounds_after_the_given_one(run: RunDir):
    for number in range(6):
        run.append({"round": number})
    run.truncate(3)
    assert [row["round"] for row in run.rows()] == [0, 1, 2, 3]
    assert sorted(contents(run.path)) == ["about.json", "metrics.jsonl", "recipe.toml"]


def test_create_refuses_a_run_and_leaves_it_alone(run: RunDir, recipe: Recipe):
    run.append({"round": 0})
    run.append({"round": 4})
    before = contents(run.path)
    with pytest.raises(ConfigError, match=r"already holds a run; .* --resume") as caught:
        RunDir.create(run.path, recipe, {})
    assert "\n" not in str(caught.value)
    assert contents(run.path) == before


def test_create_refuses_a_folder_of_something_else_and_leaves_it_alone(tmp_path: Path, recipe: Recipe):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        RunDir.create(tmp_path, recipe, {})
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_create_refuses_a_file_and_a_path_below_a_file(tmp_path: Path, recipe: Recipe):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match="folder"):
            RunDir.create(path, recipe, {})
    assert file.read_text() == "mine"


def test_open_says_what_is_wrong_with_a_folder_that_is_no_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path, "no readable recipe"),
        (tmp_path / "gone", "not exist"),
        (tmp_path / "file", "folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            RunDir.open(path)


def test_next_run_dir_is_the_first_that_does_not_exist(tmp_path: Path):
    names = []
    for _ in range(3):
        path = next_run_dir(tmp_path / "runs", "demo")
        path.mkdir(parents=True)
        names.append(path.name)
    assert names == ["demo", "demo-2", "demo-3"]


def test_totals_add_up_by_purpose_and_by_link():
    bytes_ = dict(activations=5, gradients=4, tokens=3, payload_up=2, payload_down=6, control=1)
    row = {"bytes": bytes_, "dense_bytes": {"stages": 90, "replicas": None}, "seconds": 1.5}
    stored = [
        {"round": 0, "seconds": 9.0},
        {"round": 1, "tokens": 8, **row},
        {"round": 2, "tokens": 16, **row},
    ]
    rows = [Row.from_dict(found) for found in stored]
    sums = totals(rows)
    assert sums["bytes"] == {key: 2 * value for key, value in bytes_.items()}
    assert sums["link_bytes"] == {"stages": 24, "replicas": 18}
    assert sums["dense_bytes"] == {"stages": 180, "replicas": 0}
    assert (sums["rounds"], sums["tokens"], sums["seconds"], sums["fleet_seconds"]) == (2, 16, 3.0, None)
    assert totals([])["rounds"] == 0
