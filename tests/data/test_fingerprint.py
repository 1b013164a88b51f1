"""A text of the same size is not the same text: who would train on another is refused before it trains."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from corpus_texts import json_lines, make_texts
from small_recipes import RACK, recipe_text

from isthmus.config import load_recipe
from isthmus.data import fingerprint as prints
from isthmus.data.corpus import open_corpus
from isthmus.data.push import push
from isthmus.runlog import REAL, About, RunDir
from isthmus.runtime.create import create

SETTINGS = {"model": {"vocab": 300}, "data": {"corpus": "corpus", "eval_batches": 1}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isthmus) -> Path:
    """A folder with a recipe and its corpus."""
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_bytes(json_lines(make_texts(120)))
    made = isthmus("data", "prepare", "texts.jsonl", "--to", "corpus", "--validation", 0.2, "--vocab", 300)
    assert made[0] == 0
    Path("r.toml").write_text(recipe_text(RACK, **SETTINGS))
    return tmp_path


def replace_text(folder: Path | str = "corpus") -> None:
    """The same tokens in another order, under the same name, size and mtime."""
    path = Path(folder, "train-00000.bin")
    before = path.stat()
    path.write_bytes(np.flip(np.fromfile(path, dtype="<u2")).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def found_and_stated() -> tuple[str, str]:
    corpus = open_corpus("corpus")
    return prints.fingerprint(corpus), corpus.sha256


def test_a_run_does_not_begin_on_files_that_are_not_those_of_their_manifest(isthmus):
    replace_text()
    for command in (("simulate", "r.toml"), ("train", "r.toml"), ("init", "r.toml", "bucket")):
        status, _, err = isthmus(*command)
        found, stated = found_and_stated()
        assert status == 2
        assert f"their fingerprint is {found}, and that of its manifest is {stated}" in err
        assert "copy the whole corpus again, or prepare it again" in err
    assert not Path("runs").exists()
    assert not Path("bucket", "run.json").exists()


def test_a_simulation_does_not_go_on_with_another_text(isthmus):
    assert isthmus("simulate", "r.toml", "--run", "run", "--quiet", "--device", "cpu")[0] == 0
    rows = RunDir.open("run").rows()
    again = "simulate", "--resume", "run", "--quiet"
    assert isthmus(*again)[0] == 0
    stated = open_corpus("corpus").sha256
    assert RunDir.open("run").about["corpus_sha256"] == stated
    replace_text()
    status, _, err = isthmus(*again)
    assert (status, f"and that of the run is {stated}" in err) == (2, True)
    other_corpus(isthmus)
    status, _, err = isthmus(*again)
    assert status == 2
    assert f"its fingerprint is {open_corpus('corpus').sha256}, and the run's is {stated}" in err
    assert RunDir.open("run").rows() == rows


def other_corpus(isthmus) -> None:
    """Another text in ./corpus, whole, with a manifest of its own."""
    Path("corpus").rename(f"old-{time.monotonic_ns()}")
    Path("other.jsonl").write_bytes(json_lines(make_texts(119)))
    made = isthmus(
        "data", "prepare", "other.jsonl", "--to", "corpus", "--validation", 0.2, "--tokenizer", tokenizer()
    )
    assert made[0] == 0


def tokenizer() -> Path:
    return next(Path().glob("old-*")) / "tokenizer.json"


def test_a_fleet_does_not_go_on_with_another_text(isthmus, here: Path):
    recipe = load_recipe("r.toml")
    run = RunDir.create(Path("run"), recipe, About(mode=REAL, status="interrupted", device_used="cpu"))
    create(run.recipe, str(run.path / "bucket"), run.path / "keys", ["rack"])
    stated = open_corpus("corpus").sha256
    replace_text()
    status, _, err = isthmus("train", "--resume", "run")
    assert status == 2
    assert f"their fingerprint is {prints.fingerprint(open_corpus('corpus'))}" in err
    assert f"and that of the run is {stated}" in err


def test_a_member_with_another_text_does_not_join(isthmus, here: Path, monkeypatch):
    assert isthmus("init", "r.toml", "bucket")[0] == 0
    stated = open_corpus("corpus").sha256
    friend = here / "friend"
    friend.mkdir()
    os.rename("keys/small/rack.isthmus.toml", "friend/rack.isthmus.toml")
    os.rename("corpus", "friend/corpus")
    monkeypatch.chdir(friend)
    replace_text()
    status, _, err = isthmus("join", "rack.isthmus.toml", "--device", "cpu")
    assert status == 2
    assert f"their fingerprint is {found_and_stated()[0]}, and that of the run is {stated}" in err
    assert not Path("work").exists()


def test_a_run_cannot_be_made_without_its_text(isthmus, here: Path):
    """Nothing would tell a friend's own ./corpus from the run's."""
    os.rename("corpus", "elsewhere")
    status, _, err = isthmus("init", "r.toml", "bucket")
    assert status == 2
    assert "there is no corpus in corpus on this machine" in err
    assert "isthmus data push" in err
    assert not Path("bucket").exists()


def test_a_cached_copy_that_was_replaced_is_refused_and_may_be_removed(isthmus, here: Path):
    push("corpus", f"file://{here}/bucket")
    where = f"data.corpus=file://{here}/bucket"
    fetched = open_corpus(f"file://{here}/bucket")
    assert min(len(fetched.train), len(fetched.validation)) > 0  # which fetches both
    replace_text(fetched.folder)
    status, _, err = isthmus("simulate", "r.toml", "--set", where, "--run", "run", "--quiet")
    assert (status, f"remove {fetched.folder}, and it is fetched again" in err) == (2, True)
    for path in fetched.folder.iterdir():
        path.unlink()
    fetched.folder.rmdir()
    assert isthmus("simulate", "r.toml", "--set", where, "--run", "run", "--quiet", "--device", "cpu")[0] == 0


def test_a_text_is_read_once_and_each_file_again_only_when_it_has_changed(monkeypatch):
    read, reads = prints._read, []
    monkeypatch.setattr(prints, "_read", lambda path, *rest: reads.append(path.name) or read(path, *rest))
    corpus = open_corpus("corpus")
    first = prints.fingerprint(corpus)
    assert first == corpus.sha256
    assert sorted(reads) == ["tokenizer.json", "train-00000.bin", "validation-00000.bin"]
    assert prints.fingerprint(open_corpus("corpus")) == first
    assert len(reads) == 3
    replace_text()
    assert prints.fingerprint(corpus) != first
    assert reads[3:] == ["train-00000.bin"]


def test_a_damaged_note_or_a_cache_that_cannot_be_written_only_costs_time(here: Path, monkeypatch):
    corpus = open_corpus("corpus")
    prints.check_text(corpus, "corpus")
    [note] = (here / "cache" / "texts").iterdir()
    for damage in (b"", b"[]", b"{", b'{"train-00000.bin": 1}', b"\xff", b"[" * 10**5):
        note.write_bytes(damage)
        assert prints.fingerprint(corpus) == corpus.sha256
    monkeypatch.setenv("ISTHMUS_CACHE", str(here / "r.toml"))
    assert prints.fingerprint(corpus) == corpus.sha256


def test_a_long_read_shows_its_progress(capsys, monkeypatch):
    monkeypatch.setattr(prints, "LONG_BYTES", 1)
    prints.check_text(open_corpus("corpus"), "corpus")
    assert "to compare its text" in capsys.readouterr().err
