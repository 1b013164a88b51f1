"""`isthmus new`: a recipe like one that ships, under its own name; and the last lines of a finished run."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from small_disk import fill, small_disk

from isthmus.cli.main import build_parser
from isthmus.cli.new import FIRST
from isthmus.config import load_recipe
from isthmus.config.shipped import shipped_names, shipped_text
from isthmus.runlog import RunDir


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", shipped_names())
def test_a_new_recipe_is_the_one_it_is_like_with_the_first_keys_stated_and_explained(name, isthmus):
    status, out, _ = isthmus("new", "mine.toml", "--like", name)
    assert (status, out.splitlines()[0].split(",")[0]) == (0, "Recipe: mine.toml")
    assert load_recipe("mine.toml") == dataclasses.replace(load_recipe(name), name="mine")
    text = Path("mine.toml").read_text()
    for table, key in (first.split(".") for first in FIRST):
        assert re.search(rf"^\[{table}\]\n(?:[^\[].*\n)*?# .+\n{key} = ", text, re.MULTILINE), key
    assert re.search(r"# The fleet: .*\n(# .+\n)+\[\[replicas\]\]\n", text)
    assert max(map(len, text.split("\n"))) < 130
    # What the recipe says of itself and of its keys stays.
    assert set(re.findall(r"# .+", shipped_text(name))) <= set(re.findall(r"# .+", text))


def test_without_a_name_it_is_like_the_demo(isthmus):
    assert isthmus("new", "mine.toml", "--json") == (0, '{"recipe": "mine.toml", "like": "demo"}\n', "")
    assert load_recipe("mine.toml").model.preset == "nano"


def test_nothing_is_overwritten(isthmus):
    Path("mine.toml").write_text("my work")
    Path("lost.toml").symlink_to("nowhere.toml")
    for name in ("mine.toml", "lost.toml"):
        status, out, err = isthmus("new", name)
        assert (status, out) == (2, "")
        assert err == f"isthmus: {name} exists, and is left as it is; give another name\n"
    assert Path("mine.toml").read_text() == "my work"
    assert not Path("nowhere.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a file to write"),
        (["mine.toml", "--list"], "or --list alone"),
        (["--list", "--like", "demo"], "or --list alone"),
        (["mine"], "ends in .toml, as in mine.toml"),
        (["a b.toml"], 'name "a b": use letters'),
        (["none/mine.toml"], "cannot write none/mine.toml: No such file or directory"),
        (["mine.toml", "--like", "dmo"], 'there is no recipe "dmo"; did you mean "demo"?'),
        (["mine.toml", "--like", "../demo"], 'there is no recipe "../demo"'),
    ],
)
def test_what_cannot_be_written_is_one_line(arguments, says, isthmus, empty_folder):
    status, out, err = isthmus("new", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert not list(empty_folder.iterdir())


def test_the_list_has_every_recipe_in_one_line(isthmus):
    status, out, _ = isthmus("new", "--list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == shipped_names()
    assert all(len(line.split()) > 5 for line in out.splitlines())
    listed = json.loads(isthmus("new", "--list", "--json")[1])
    assert list(listed) == shipped_names()


TINY = (
    "--set",
    "model.layers=2",
    "--set",
    "inner.batch=2",
    "--set",
    "inner.micro_batches=1",
    "--set",
    "outer.inner_steps=1",
)
TINY += ("--set", "outer.rounds=1", "--set", "data.eval_batches=1", "--device", "cpu", "--quiet")


def test_a_finished_run_ends_with_what_can_be_done_with_it(isthmus):
    status, out, _ = isthmus("simulate", "demo", *TINY, "--run", "my run")
    assert status == 0
    last = out.splitlines()[-3:]
    shown = [shlex.split(line[line.index("isthmus ") :]) for line in re.split(r"; |\n", "\n".join(last))]
    assert [command[1] for command in shown] == ["generate", "export", "watch", "extend"]
    for command in shown:
        assert build_parser().parse_args(command[1:])
        assert command[2] == "my run"
    assert isthmus(*shown[0][1:], "--max-tokens", "2")[0] == 0
    # A simulated run is extended, too, and goes on where it ended.
    status, out, _ = isthmus("extend", "my run", "--rounds", "1")
    assert (status, "goes on from 1 to 2 rounds. The" in out) == (0, True)
    assert out.splitlines()[-1] == "Go on with: isthmus simulate --resume 'my run'"
    before = RunDir.open("my run").rows()
    assert isthmus("simulate", "--resume", "my run", "--device", "cpu", "--quiet")[0] == 0
    rows = RunDir.open("my run").rows()
    assert [row.round for row in rows] == [0, 1, 2]
    assert rows[:2] == before
    status, _, err = isthmus("extend", "my run", "--rounds", "2000000")
    assert (status, err.count("\n")) == (2, 1)


def test_a_full_disk_leaves_no_empty_file(tmp_path, isthmus):
    with small_disk(tmp_path / "disk", 1) as disk:
        fill(disk)
        status, out, err = isthmus("new", disk / "mine.toml")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "No space left on device; give another place" in err
        assert [path.name for path in disk.iterdir()] == ["ballast"]


def test_a_recipe_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "windows.toml").write_text(shipped_text("demo"), encoding="utf-8-sig")
    assert load_recipe(tmp_path / "windows.toml") == load_recipe("demo")
