"""Every input format gives the same tokens, and damaged ones are refused by name."""

import io
import json
import sys
import types

import pytest
from corpus_texts import contents, json_lines, make_texts, pack, write_format

from isthmus.data import streams
from isthmus.data.finding import find_files
from isthmus.data.readers import END_OF_TEXT, FORMATS, cut, split_text
from isthmus.errors import ConfigError

TEXTS = make_texts(60)
OPTIONS = ("--vocab", 300, "--validation", 0.2, "--seed", 3)


def shards(folder):
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    from isthmus.cli.main import main

    folder = tmp_path_factory.mktemp("reference")
    (folder / "part.jsonl").write_bytes(json_lines(TEXTS))
    arguments = ["data", "prepare", folder / "part.jsonl", "--to", folder / "corpus", *OPTIONS]
    assert main([str(argument) for argument in arguments]) == 0
    return shards(folder / "corpus")


@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_gives_the_same_tokens(ending, tmp_path, isthmus, reference):
    path = write_format(tmp_path, ending, TEXTS)
    assert isthmus("data", "prepare", path, "--to", tmp_path / "corpus", *OPTIONS)[0] == 0
    assert shards(tmp_path / "corpus") == reference


@pytest.mark.parametrize("ending", [".jsonl.gz", ".parquet"])
def test_several_files_or_their_folder_give_the_same_tokens(ending, tmp_path, isthmus, reference):
    folder = tmp_path / "parts"
    folder.mkdir()
    paths = [write_format(folder, ending, TEXTS[20 * n : 20 * n + 20], f"part-{n}") for n in range(3)]
    (folder / "README.md").write_text("not a document")
    assert isthmus("data", "prepare", *paths, "--to", tmp_path / "a", *OPTIONS)[0] == 0
    assert isthmus("data", "prepare", folder, "--to", tmp_path / "b", *OPTIONS)[0] == 0
    assert shards(tmp_path / "a") == shards(tmp_path / "b") == reference


@pytest.mark.parametrize("ending", [".jsonl.zst", ".parquet"])
def test_a_format_that_needs_pyarrow_says_so_where_it_is_missing(ending, tmp_path, monkeypatch):
    path = write_format(tmp_path, ending, TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        list(find_files([path])[0].documents("text"))


def test_zstd_with_a_window_of_32_mib_is_read():
    import pyarrow

    data = b"a line of text\n" * 3_000_000
    compressed = pyarrow.Codec("zstd", 20).compress(data, asbytes=True)
    assert 10 + (compressed[5] >> 3) == 25  # log2 of the window, in the frame's header
    assert streams.open_zstd(io.BytesIO(compressed)).read() == data


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".txt.gz", ".parquet"])
def test_a_file_that_is_cut_off_is_refused(ending, tmp_path):
    if ending == ".txt.gz":
        path = tmp_path / "long.txt.gz"
        path.write_bytes(pack("".join(TEXTS).encode(), ending))
    else:
        path = write_format(tmp_path, ending, TEXTS)
    whole = path.read_bytes()
    for missing in (1, 9, len(whole) // 2):
        path.write_bytes(whole[:-missing])
        with pytest.raises(ConfigError, match=path.name):
            list(find_files([path])[0].documents("text"))


def test_long_text_is_cut_at_blank_lines_and_loses_nothing():
    text = "\n\n".join(make_texts(2000))
    for size in (100, 33_000, 1 << 20):
        documents = list(split_text(text[start : start + size] for start in range(0, len(text), size)))
        assert "".join(documents) == text
        assert documents == list(cut(text))
        assert all(document.endswith("\n\n") for document in documents[:-1])
        assert max(map(len, documents)) <= 32_000
    assert list(cut("x" * 70_000)) == ["x" * 32_000, "x" * 32_000, "x" * 6_000]


def test_text_is_parted_at_the_end_token_wherever_chunks_fall():
    text = f"one\n{END_OF_TEXT}\ntwo\n\nmore\n{END_OF_TEXT}\nthree\n{END_OF_TEXT}\n"
    for size in range(1, 40):
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        assert [document for document in split_text(chunks) if document] == ["one", "two\n\nmore", "three"]


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83e\\udd86"}\n')
    assert list(find_files([tmp_path / "a.jsonl"])[0].documents("text")) == ["a\ufffd b", "🦆"]


def test_empty_documents_and_blank_lines_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": ""}\n{"text": null}\n  \n{"text": "a"}\n')
    assert list(find_files([tmp_path / "a.jsonl"])[0].documents("text")) == ["a"]


class FakeHub(types.ModuleType):
    """Stands for the `datasets` package: a stream of rows, and a record of what was asked for."""

    def __init__(self, rows):
        super().__init__("datasets")
        self.rows, self.asked = rows, []

    def load_dataset(self, name, config=None, *, split, streaming):
        self.asked.append((name, config, split, streaming))
        if isinstance(self.rows, Exception):
            raise self.rows
        return iter(self.rows)


def test_a_hugging_face_dataset_gives_the_same_tokens(tmp_path, isthmus, monkeypatch, reference):
    hub = FakeHub([{"text": text, "url": "x"} for text in TEXTS])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    arguments = ("--hf", "allenai/c4:en", "--split", "train", "--to", tmp_path / "corpus")
    assert isthmus("data", "prepare", *arguments, *OPTIONS)[0] == 0
    assert shards(tmp_path / "corpus") == reference
    assert set(hub.asked) == {("allenai/c4", "en", "train", True)}
    manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_bytes())
    assert manifest["sources"] == [{"name": "hf:allenai/c4:en/train"}]


@pytest.mark.parametrize(
    ("hub", "expected"),
    [
        (None, "pip install 'isthmus[hf]'"),
        (
            FakeHub(ConnectionError("no route\nto the hub")),
            "cannot open hf:some/name/train: ConnectionError: no route",
        ),
        (FakeHub([{"content": "a"}]), "no field 'text' (it has: content)"),
        (FakeHub([]), "no documents"),
    ],
)
def test_a_hugging_face_dataset_that_cannot_be_read_is_one_line(
    hub, expected, tmp_path, isthmus, monkeypatch
):
    monkeypatch.setitem(sys.modules, "datasets", hub)
    status, _, err = isthmus("data", "prepare", "--hf", "some/name", "--to", tmp_path / "corpus")
    assert status == 2
    assert expected in err
    assert err.count("\n") == 1
    assert not (tmp_path / "corpus").exists()


def test_a_stream_that_breaks_off_keeps_what_is_done(tmp_path, isthmus, monkeypatch, reference):
    def breaking():
        yield from ({"text": text} for text in TEXTS[:40])
        raise TimeoutError("the hub went away")

    class Rows:
        broken = False

        def __iter__(self):
            return breaking() if self.broken else iter([{"text": text} for text in TEXTS])

    rows = Rows()
    hub = FakeHub(rows)
    hub.load_dataset = lambda *_, **__: rows
    monkeypatch.setitem(sys.modules, "datasets", hub)
    arguments = ("data", "prepare", "--hf", "some/name", "--to", tmp_path / "corpus", *OPTIONS)
    rows.broken = True
    status, _, err = isthmus(*arguments)
    assert status == 1
    assert "broke off after 40 documents" in err
    rows.broken = False
    assert isthmus(*arguments)[0] == 0
    assert shards(tmp_path / "corpus") == reference
