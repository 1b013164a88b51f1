"""Inputs as people have them: bad files are one list, what is not read is counted, marks are no text."""

import gzip
import json
import os
from pathlib import Path

import pytest
from corpus_texts import contents, json_lines, make_texts, write_format

from isthmus.data.corpus import BUILTIN_FOLDER, open_corpus
from isthmus.data.finding import find_files

SMALL = ("--vocab", "300", "--validation", "0.1")
LATIN = "Größe, naïve, café. " * 20


def texts_in(path: Path) -> list[str]:
    return list(find_files([path])[0].documents("text"))


def good_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, ending in enumerate((".txt", ".jsonl", ".jsonl.gz", ".parquet")):
        write_format(folder, ending, make_texts(60, seed=number), f"good{number}")
    return folder


def add_bad_files(folder: Path) -> dict[str, str]:
    """Names, and what is said of each."""
    whole = gzip.compress(json_lines(make_texts(50)))
    bad = {
        "latin.txt": (LATIN.encode("cp1252"), "is not UTF-8 text"),
        "cut.txt.gz": (whole[:40], "cannot be read to its end"),
        "packed.jsonl.gz": (b"these bytes are not gzip", "cannot be read to its end"),
        "zstd.jsonl.zst": (b"these bytes are not zstd", "cannot be read to its end"),
        "field.jsonl": (json_lines(["a"], field="content"), "name the one with the text by --text-field"),
        "rows.parquet": (b"PAR1", "is not a whole parquet file"),
    }
    for name, (data, _) in bad.items():
        (folder / name).write_bytes(data)
    return {name: said for name, (_, said) in bad.items()}


def test_all_bad_files_are_one_list_and_nothing_is_written(tmp_path, isthmus):
    folder = good_folder(tmp_path / "in")
    bad = add_bad_files(folder)
    status, out, err = isthmus("data", "prepare", folder, "--to", tmp_path / "corpus", *SMALL)
    assert (status, out) == (2, "")
    *lines, last = err.splitlines()
    assert len(lines) == len(bad)
    for name, said in bad.items():
        assert [said in line for line in lines if name in line] == [True]
    assert last.startswith(f"isthmus: {len(bad)} of 69 files cannot be read")
    assert "--skip-bad" in last
    assert not (tmp_path / "corpus").exists()


def test_skip_bad_makes_the_corpus_of_the_good_files_and_says_what_it_left_out(tmp_path, isthmus):
    good, mixed = good_folder(tmp_path / "a" / "in"), good_folder(tmp_path / "b" / "in")
    bad = add_bad_files(mixed)
    assert isthmus("data", "prepare", good, "--to", tmp_path / "good", *SMALL)[0] == 0
    status, _, err = isthmus("data", "prepare", mixed, "--to", tmp_path / "mixed", *SMALL, "--skip-bad")
    assert status == 0
    assert f"left out {len(bad)} files that cannot be read" in err
    assert all(name in err for name in bad)
    assert contents(tmp_path / "mixed") == contents(tmp_path / "good")
    # Again: the same files are left out, so that it is the same corpus.
    assert "already" in isthmus("data", "prepare", mixed, "--to", tmp_path / "mixed", *SMALL, "--skip-bad")[2]


def test_with_skip_bad_a_bad_line_is_left_out_and_the_others_are_kept(tmp_path, isthmus):
    texts = make_texts(120)
    rows = json_lines(texts).splitlines(keepends=True)
    good, mixed = tmp_path / "good.jsonl", tmp_path / "mixed.jsonl"
    good.write_bytes(b"".join(rows))
    mixed.write_bytes(b"{early\n" + b"".join(rows[:70]) + b'{"text": 5}\n' + b"".join(rows[70:]) + b"late\n")
    for path, more in ((good, ()), (mixed, ("--skip-bad",))):
        status, _, err = isthmus("data", "prepare", path, "--to", tmp_path / path.stem, *SMALL, *more)
        assert status == 0
    assert "3 faults" in err
    assert all(f"mixed.jsonl, line {number}: " in err for number in (1, 72, 123))
    shards = [
        {name: data for name, data in contents(tmp_path / stem).items() if name.endswith(".bin")}
        for stem in ("good", "mixed")
    ]
    assert shards[0] == shards[1]


def test_with_skip_bad_a_text_that_breaks_late_is_kept_up_to_there(tmp_path, monkeypatch, isthmus):
    """Also where it is continued: what is left out is the same at every reading."""
    monkeypatch.setattr("isthmus.data.survey.HEAD_BYTES", 1000)
    texts = make_texts(4000)
    data = gzip.compress(json_lines(texts))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(data[:-2000])
    command = ("data", "prepare", path, "--skip-bad", *SMALL, "--to")
    status, _, err = isthmus(*command, tmp_path / "whole")
    assert status == 0
    assert "cannot be read to its end" in err
    manifest = open_corpus(tmp_path / "whole").manifest
    assert 1000 < manifest.train.documents + manifest.validation.documents < 4000

    monkeypatch.setattr("isthmus.data.documents.BATCH_DOCUMENTS", 500)
    monkeypatch.setattr("isthmus.data.prepare.CHECKPOINT_TEXT_BYTES", 1)
    fault = lambda **_: (_ for _ in ()).throw(OSError(28, "disk full"))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("isthmus.data.prepare.Manifest", fault)
        assert isthmus(*command, tmp_path / "killed")[0] == 1
    assert isthmus(*command, tmp_path / "killed")[0] == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_every_wrong_name_is_listed(tmp_path, isthmus):
    (tmp_path / "a.csv").write_text("a,b")
    paths = (tmp_path / "a.csv", tmp_path / "none.txt", tmp_path / "none.jsonl")
    status, _, err = isthmus("data", "prepare", *paths, "--to", tmp_path / "corpus", "--skip-bad")
    assert status == 2
    assert err.count("\n") == 4
    assert all(path.name in err for path in paths)


@pytest.mark.parametrize(("codec", "advice"), [("utf-16", "utf-16"), ("cp1252", "cp1252")])
def test_a_text_that_is_not_utf8_is_refused_with_the_cure_that_its_mark_tells(
    codec, advice, tmp_path, isthmus
):
    (tmp_path / "a.txt").write_bytes("Zoë and a few words".encode(codec))
    status, _, err = isthmus("data", "prepare", tmp_path / "a.txt", "--to", tmp_path / "c")
    assert status == 2
    assert f"a.txt is not UTF-8 text (invalid {'start' if codec == 'utf-16' else 'continuation'} byte)" in err
    assert f"convert it, for example with iconv -f {advice} -t utf-8" in err


def test_a_byte_order_mark_is_no_text_and_makes_another_fingerprint(tmp_path):
    (tmp_path / "plain.txt").write_text("a text")
    (tmp_path / "marked.txt").write_text("a text", encoding="utf-8-sig")
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress("a text".encode("utf-8-sig")))
    (tmp_path / "marked.jsonl").write_text('{"text": "a text"}\n', encoding="utf-8-sig")
    for name in ("plain.txt", "marked.txt", "packed.txt.gz", "marked.jsonl"):
        assert texts_in(tmp_path / name) == ["a text"]
    marks = [file.describe().get("mark") for file in find_files([tmp_path])]
    # marked.jsonl, marked.txt, packed.txt.gz, plain.txt: only texts were read otherwise before.
    assert marks == [None, "left out", "left out", None]


def test_links_in_a_folder_give_their_text_once_and_what_they_hide_is_counted(tmp_path, isthmus):
    folder, outside = tmp_path / "texts", tmp_path / "outside"
    for place in (folder, outside):
        place.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"words of the day {number}. " * 20)
    (outside / "far.txt").write_text("far away")
    (folder / "0-again.txt").symlink_to("9.txt")  # which comes later
    (folder / "far-1.txt").symlink_to(outside / "far.txt")
    (folder / "far-2.txt").symlink_to(outside / "far.txt")
    (folder / "gone.txt").symlink_to("nowhere.txt")
    (folder / "itself.txt").symlink_to("itself.txt")
    (folder / "more").symlink_to(outside)
    (folder / "around").symlink_to("..")
    os.mkfifo(folder / "pipe.txt")
    found = [file.path.name for file in find_files([folder])]
    assert sorted(found) == sorted([*(f"{number}.txt" for number in range(40)), "far-1.txt"])
    status, _, err = isthmus("data", "prepare", folder, "--to", tmp_path / "c", "--vocab", 300)
    assert status == 0
    [line] = [line for line in err.splitlines() if line.startswith("left out: ")]
    assert set(line.removeprefix("left out: ").split(", ")) == {
        "6 link(s) to a folder",
        "to nothing",
        "or to text that is here already",
        "1 .txt",
    }


def test_hidden_files_and_other_kinds_in_a_folder_are_left_out_and_counted(tmp_path, isthmus):
    folder = good_folder(tmp_path / "in")
    for name in ("._a.txt", ".git/config.txt", "b/.c/d.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("hidden words")
    for name in ("a.csv", "b.CSV", "c.html", "LICENSE"):
        (folder / name).write_text("other words")
    status, _, err = isthmus("data", "prepare", folder, "--to", tmp_path / "corpus", *SMALL)
    assert status == 0
    [line] = [line for line in err.splitlines() if line.startswith("left out")]
    for part in (
        "3 hidden",
        "2 .csv (write them as .jsonl or .parquet)",
        "1 .html (save their text as .txt)",
    ):
        assert part in line
    names = {source["name"] for source in open_corpus(tmp_path / "corpus").manifest.sources}
    assert len(names) == 63
    assert not any("/." in name for name in names)
    # A hidden file that is named is wanted.
    assert texts_in(folder / "._a.txt") == ["hidden words"]


def test_markdown_is_plain_text_and_the_readme_of_data_is_not_a_document(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "guide.md"):
        (tmp_path / "docs" / name).write_text(f"# {name}\n")
    (tmp_path / "docs" / "a.txt").write_text("a")
    assert [file.path.name for file in find_files([tmp_path / "docs"])] == ["README.md", "a.txt", "guide.md"]
    assert texts_in(tmp_path / "docs" / "guide.md") == ["# guide.md\n"]
    (tmp_path / "docs" / "b.jsonl").write_text('{"text": "b"}\n')
    assert [file.path.name for file in find_files([tmp_path / "docs"])] == ["a.txt", "b.jsonl", "guide.md"]


def test_the_inputs_of_older_versions_give_the_same_corpus(tmp_path, isthmus):
    """Recorded with version 0.2 before files were surveyed: runs and results refer to these digests."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(json_lines(make_texts(300)))
    (folder / "b.txt").write_bytes("\n\n".join(make_texts(900, seed=1)).encode())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(make_texts(30, seed=2)))
    given = ("--tokenizer", BUILTIN_FOLDER / "tokenizer.json", "--validation", 0.05)
    status, _, err = isthmus("data", "prepare", folder, "--to", tmp_path / "corpus", *given)
    assert status == 0
    assert "1 file without any text: in/empty.txt" in err
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.manifest.fingerprint == "636d2a165f705a01dc8a95d6460841afd2003a1728197645fbde2ba79ba09570"
    assert corpus.sha256 == "7eee0f6aa4eed7d3497c61c9dcfeb8d0ba290fb725d1f103a52a95f9ecf18943"


def test_a_tokenizer_may_be_a_folder_and_a_sentencepiece_model_is_answered_with_the_cure(tmp_path, isthmus):
    (tmp_path / "in.jsonl").write_bytes(json_lines(make_texts(100)))
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    command = ("data", "prepare", tmp_path / "in.jsonl", "--to", tmp_path / "corpus", "--tokenizer")
    for given in (tmp_path, tmp_path / "tokenizer.model"):
        status, _, err = isthmus(*command, given)
        assert (status, err.count("\n")) == (2, 1)
        assert "write a tokenizer.json of it with transformers" in err
        assert not (tmp_path / "corpus").exists()
    assert isthmus(*command, BUILTIN_FOLDER)[0] == 0
    assert open_corpus(tmp_path / "corpus").vocab_size == 1024


@pytest.mark.parametrize("ending", [".jsonl.gz", ".parquet"])
def test_ones_own_text_has_no_limits(tmp_path, ending):
    """A document of 90 MiB, which packs 500 times, and a line of a million values."""
    words = "It was the best of times, [it was] {the} worst. " * 2_000_000
    path = write_format(tmp_path, ending, [words, "short"])
    assert [len(text) for text in texts_in(path)] == [len(words), 5]
    row = {"text": "a", "more": [0] * 1_100_000}
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    assert texts_in(tmp_path / "b.jsonl") == ["a"]
