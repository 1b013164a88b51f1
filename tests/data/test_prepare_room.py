"""A corpus that does not fit on its disk: one line, early where it can be told, and nothing is lost."""

import pytest
from corpus_texts import contents, json_lines, make_texts
from small_disk import fill, small_disk

from isthmus import disk
from isthmus.data import prepare, room
from isthmus.data.corpus import open_corpus
from isthmus.data.documents import DocumentOrder, Position
from isthmus.data.finding import find_files
from isthmus.data.room import Outlook
from isthmus.disk import DiskFull

SMALL = ("--vocab", "300", "--validation", "0.1")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines(make_texts(200)))
    return path


def order_of(texts, limit_bytes=None) -> DocumentOrder:
    return DocumentOrder(find_files([texts]), [], 0.1, 0, "text", limit_bytes)


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


def test_the_outlook_is_what_the_beginning_took_times_what_is_left(texts, tmp_path, monkeypatch):
    outlook = Outlook(tmp_path, order_of(texts))
    monkeypatch.setattr(room, "free_bytes", lambda folder: 900)
    outlook.look(100, outlook.total // 10, Position())
    assert outlook.rest == pytest.approx(900, rel=0.01)
    outlook.look(120, outlook.total // 10, Position())  # 1,080 bytes: perhaps, and not surely, too much
    with pytest.raises(
        DiskFull, match=r"has 900 B free, and the rest of this corpus needs about 1\.8 kB; make"
    ):
        outlook.look(200, outlook.total // 10, Position())
    limited = Outlook(tmp_path, order_of(texts, limit_bytes=1000))
    limited.look(200, outlook.total // 10, Position(input_bytes=500))
    assert limited.rest == 200
    outlook.look(10**9, outlook.total, Position())  # the whole input is read: nothing is left to come
    assert outlook.rest == 0


def test_a_corpus_that_will_not_fit_is_told_by_its_first_batch(texts, tmp_path, isthmus, monkeypatch):
    monkeypatch.setattr("isthmus.data.documents.BATCH_DOCUMENTS", 20)
    monkeypatch.setattr(prepare, "check_before", lambda *_: None)
    monkeypatch.setattr(room, "free_bytes", lambda folder: 500)
    looked = []
    monkeypatch.setattr(Outlook, "look", spied(Outlook.look, looked))
    assert isthmus("data", "prepare", texts, "--to", tmp_path / "a", *SMALL, "--limit-bytes", 50_000)[0] == 1
    assert len(looked) == 1
    monkeypatch.setattr(room, "free_bytes", lambda folder: 10**9)
    words = (*SMALL, "--limit-bytes", 50_000)
    assert isthmus("data", "prepare", texts, "--to", tmp_path / "a", *words)[0] == 0
    assert isthmus("data", "prepare", texts, "--to", tmp_path / "b", *words)[0] == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def spied(look, looked):
    def called(self, *arguments):
        looked.append(arguments)
        return look(self, *arguments)

    return called


def test_a_disk_that_fills_on_the_way_is_one_line_and_the_same_command_continues(
    texts, tmp_path, isthmus, monkeypatch
):
    monkeypatch.setattr("isthmus.data.documents.BATCH_DOCUMENTS", 20)
    monkeypatch.setattr(prepare, "CHECKPOINT_TEXT_BYTES", 1)
    monkeypatch.setattr(prepare, "check_before", lambda *_: None)
    monkeypatch.setattr(Outlook, "look", lambda *_: None)
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
