"""A run directory by a stranger: nothing outside is read, nothing without end is built, nothing breaks."""

import json
import os
import shutil
from pathlib import Path

import pytest
from made import MARKUP, SECRET, hostile, small

from isthmus.config import dump_recipe
from isthmus.errors import ConfigError
from isthmus.page.read import Folder, FolderBucket, JsonLines, resolved_recipe
from isthmus.page.source import RunSource, open_source
from isthmus.page.state import StateBuilder
from isthmus.runlog.clean import clean_rows, number, text
from isthmus.store.retry import StoreRefused


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run" / "inner").mkdir(parents=True)
    (tmp_path / "run" / "here.txt").write_text("here")
    (tmp_path / "outside.txt").write_text(SECRET)
    return tmp_path / "run"


def test_files_inside_are_read_and_so_are_links_that_stay_inside(folder):
    (folder / "inner" / "again").symlink_to(folder / "here.txt")
    assert Folder(folder).read("here.txt", 10) == b"here"
    assert Folder(folder).read("inner/again", 10) == b"here"
    assert Folder(folder).read("absent", 10) is None
    assert Folder(folder).read("here.txt/below", 10) is None


@pytest.mark.parametrize("way", ["file", "parent", "chain", "loop"])
def test_no_link_leads_out(folder, way):
    if way == "file":
        (folder / "bad").symlink_to(folder.parent / "outside.txt")
    elif way == "parent":
        (folder / "up").symlink_to(folder.parent)
    elif way == "chain":
        (folder / "inner" / "one").symlink_to("../../outside.txt")
        (folder / "bad").symlink_to("inner/one")
    else:
        (folder / "bad").symlink_to("bad")
    name = "up/outside.txt" if way == "parent" else "bad"
    with pytest.raises(StoreRefused, match=r"symbolic link|cannot be"):
        Folder(folder).read(name, 100)
    with pytest.raises(StoreRefused):
        FolderBucket(folder).get(name, max_bytes=100)


def test_a_pipe_a_folder_and_a_file_too_large_are_refused_at_once(folder):
    os.mkfifo(folder / "pipe")
    for name in ("pipe", "inner"):
        with pytest.raises(StoreRefused, match="not a regular file"):
            Folder(folder).read(name, 100)
    with open(folder / "giant", "wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
        file.seek(0, os.SEEK_END)
        file.write(b"\nend\n")
    with pytest.raises(StoreRefused, match="at most 100"):
        Folder(folder).read("giant", 100)
    assert Folder(folder).read("giant", 5, start=1 << 40) == b"\nend\n"


@pytest.mark.parametrize(
    "key", ["../outside.txt", "/etc/passwd", "a//b", "members/../../x", "", "a" * 800, "a\0b"]
)
def test_a_bucket_in_a_folder_takes_keys_and_no_paths(folder, key):
    with pytest.raises(StoreRefused):
        FolderBucket(folder).get(key, max_bytes=10)
    with pytest.raises(StoreRefused):
        FolderBucket(folder).head(key)


def test_lines_that_are_no_json_are_counted_and_a_torn_end_is_not():
    lines = JsonLines(b'{"round": 1}\nnope\n\n[1]\n{"round"', whole=True)
    assert (list(lines), lines.broken) == ([{"round": 1}, [1]], 1)
    lines = JsonLines(b'und": 1}\n{"round": 2}\n', whole=False)
    assert (list(lines), lines.broken) == ([{"round": 2}], 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count = 2", "count = 1000000000"),
        ("stages = 2", "stages = 100000"),
        ("layers = 2", "layers = 1000000000"),
        ("micro_batches = 2", "micro_batches = 100000000"),
    ],
)
def test_a_recipe_of_a_billion_is_refused_before_anything_is_built(old, new):
    with pytest.raises(ConfigError, match="it must be at most"):
        resolved_recipe(dump_recipe(small()).replace(old, new), "recipe.toml")


def test_a_recipe_without_bottom_is_refused_in_words():
    with pytest.raises(ConfigError):
        resolved_recipe("a = " + "[" * 50_000, "recipe.toml")


def test_numbers_that_break_a_scale_are_left_out_and_others_are_not():
    assert [number(x) for x in (1, -2.5, 0, 1e15)] == [1, -2.5, 0, 1e15]
    assert [number(x) for x in (1e308, -1e16, 10**400, float("nan"), True, "5", None, [])] == [None] * 8


def test_text_is_one_short_printable_line():
    assert text("a\x00b\n c\x1b[31m") == r"a\x00b c\x1b[31m"
    assert len(text("x" * 10_000)) == 300
    assert text(MARKUP) == MARKUP  # letters: it is the page that must not take it for more


def test_rows_of_a_real_run_pass_unchanged(run):
    rows, strange = clean_rows(run.rows(), run.recipe)
    assert strange == 0
    assert rows == run.rows()


def test_a_hostile_folder_gives_a_state_that_is_json_and_holds_nothing_from_outside(tmp_path):
    source = RunSource(hostile(tmp_path / "run"))
    state = StateBuilder().build(source.look())
    text = json.dumps(state, allow_nan=False)
    assert SECRET not in text
    assert any("leads out of the folder" in problem for problem in state["problems"])
    assert any("not rows of a run" in problem for problem in state["problems"])
    assert [line["points"] for line in state["charts"][0]["series"] if line["name"] == "full"] == [
        [[2000, 4.5], [3000, 4.25]]
    ]
    assert state["run"]["status"] == MARKUP
    assert len(text) < 100_000


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl", "about.json"])
def test_each_file_of_a_run_that_leads_out_is_named_and_not_read(run, tmp_path, name):
    path, outside = shutil.copytree(run.path, tmp_path / "run"), tmp_path / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    if name == "recipe.toml":
        with pytest.raises(ConfigError, match="leads out of the folder"):
            open_source(str(path))
        return
    state = StateBuilder().build(open_source(str(path)).look())
    assert any(name in problem and "leads out" in problem for problem in state["problems"])


def test_a_bucket_whose_heartbeat_leads_out_reads_nothing_there(tmp_path, monkeypatch):
    from isthmus.runtime.create import create

    create(small(), str(tmp_path / "bucket"), tmp_path / "keys")
    (tmp_path / "secret").write_text(SECRET)
    folder = tmp_path / "bucket" / "members" / "rack-0"
    folder.mkdir(parents=True)
    (folder / "live.json").symlink_to(tmp_path / "secret")
    opened = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: (opened.append(Path(path)), real(path, *rest, **more))[1]
    )
    source = open_source(str(tmp_path / "bucket"))
    state = StateBuilder().build(source.look())
    assert state["replicas"][0]["state"] == "not seen"
    # Threads that an earlier test of this process left behind may open files of their own, elsewhere.
    here = [path for path in opened if path.is_relative_to(tmp_path)]
    assert here
    assert [path for path in here if not path.resolve().is_relative_to(tmp_path / "bucket")] == []
