"""A corpus that does not fit on its disk: one line, early where it can be told, and nothing is lost."""

import pytest
from corpus_texts import contents, json_lines, make_texts
from small_disk import fill, small_disk

from isthmus import disk
from isthmus.data import prepare
from isthmus.data.corpus import open_corpus

SMALL = ("--vocab", "300", "--validation", "0.1")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines(make_texts(200)))
    return path


def test_too_little_room_is_told_before_anything_is_made(texts, tmp_path, isthmus, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    to = tmp_path / "new" / "corpus"
    status, out, err = isthmus("data", "prepare", texts, "--to", to, *SMALL)
    assert (status, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith(f"isthmus: the disk of {to} has 1.0 kB free, and a corpus of ")
    assert "at the very least, needs " in line
    assert not to.parent.exists()


def test_a_corpus_that_is_there_needs_no_room_and_none_is_lost_to_overwrite(
    texts, tmp_path, isthmus, monkeypatch
):
    to = tmp_path / "corpus"
    assert isthmus("data", "prepare", texts, "--to", to, *SMALL)[0] == 0
    before = contents(to)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    assert isthmus("data", "prepare", texts, "--to", to, *SMALL)[0] == 0
    status, _, err = isthmus("data", "prepare", texts, "--to", to, *SMALL, "--seed", 1, "--overwrite")
    assert status == 2
    assert "1.0 kB free" in err
    assert contents(to) == before


def test_a_disk_that_fills_on_the_way_is_one_line_and_the_same_command_continues(
    texts, tmp_path, isthmus, monkeypatch
):
    monkeypatch.setattr("isthmus.data.documents.BATCH_DOCUMENTS", 20)
    monkeypatch.setattr(prepare, "CHECKPOINT_TEXT_BYTES", 1)
    monkeypatch.setattr(prepare, "check_before", lambda *_: None)
    words = (*SMALL, "--shard-tokens", 4000)
    assert isthmus("data", "prepare", texts, "--to", tmp_path / "whole", *words)[0] == 0
    with small_disk(tmp_path / "disk", 1) as folder:
        ballast = fill(folder, 40_000)
        status, out, err = isthmus("data", "prepare", texts, "--to", folder / "corpus", *words)
        assert (status, out) == (1, "")
        line = err.splitlines()[-1]
        assert line.startswith(f"isthmus: the disk of {folder}/corpus is full (")
        assert line.endswith("make room there, then the same command continues")
        assert "Traceback" not in err
        assert "unfinished" in isthmus("data", "show", folder / "corpus")[2]  # and not a corpus
        ballast.unlink()
        assert isthmus("data", "prepare", texts, "--to", folder / "corpus", *words)[0] == 0
        open_corpus(folder / "corpus").verify()
        assert contents(folder / "corpus") == contents(tmp_path / "whole")
