"""Text from a stranger: small files that state gigabytes end in one line, and long honest documents pass."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from corpus_texts import contents, json_lines, make_texts

from isthmus.data import limits, parquet
from isthmus.data.corpus import open_corpus
from isthmus.data.finding import find_files
from isthmus.data.readers import parse_row
from isthmus.data.tokenizer import Encoder
from isthmus.errors import ConfigError

arrow = pytest.importorskip("pyarrow")
from pyarrow import parquet as arrow_parquet  # noqa: E402

MIB = 1 << 20
# What this process may take beyond what it has: the attacks took 8 GB and more.
READ = """
import resource, sys
from pathlib import Path
from isthmus.data.finding import find_files
from isthmus.errors import ConfigError
held = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (held + (900 << 20),) * 2)
try:
    for file in find_files(sys.argv[1:]):
        print(sum(len(text) for text in file.documents("text")))
except ConfigError as error:
    print("refused:", error)
"""


def read_in_little_memory(path):
    """What a process of at most 900 MiB says of a file; its child has a limit of its own."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    return done.stdout


def dictionary_bomb(path):
    """2,000 rows, each the same 16 MiB: 781 bytes on disk, 32 GB in memory."""
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 2000, arrow.int32()), ["a" * (16 * MIB)])
    arrow_parquet.write_table(arrow.table({"text": column}), path, compression="zstd", store_schema=False)


def row_bomb(path):
    table = arrow.table({"text": arrow.nulls(20_000_000, arrow.string())})
    arrow_parquet.write_table(table, path, compression="zstd", store_schema=False)


def line_bomb(path):
    with gzip.open(path, "wb", 9) as file:
        file.write(b'{"text": "')
        for _ in range(80):
            file.write(b"a" * MIB)
        file.write(b'"}\n')


def plain_line(path):
    with open(path, "wb") as file:
        file.truncate(10 << 30)  # a hole: 10 GiB of zeros that take no disk


def values_bomb(path):
    path.write_bytes(b'{"text": "a", "x": [' + b"[]," * (20 * MIB) + b"0]}\n")


def depth_bomb(path):
    path.write_bytes(b'{"text":' + b"[" * (5 * MIB) + b"\n")


@pytest.mark.parametrize(
    ("make", "name", "says"),
    [
        (dictionary_bomb, "a.parquet", "takes more than 768 MiB of memory"),
        (row_bomb, "a.parquet", "states 20,000,000 rows"),
        (line_bomb, "a.jsonl.gz", "decompresses to more than 250 times its size"),
        (line_bomb, "a.txt.gz", "decompresses to more than 250 times its size"),
        (plain_line, "a.jsonl", "line 1: longer than 83,886,080 bytes"),
        (values_bomb, "a.jsonl", "more than 1,000,000 JSON values in one line"),
        (depth_bomb, "a.jsonl", "line 1: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_small_file_that_states_gigabytes_is_one_line_in_little_memory(tmp_path, make, name, says):
    make(tmp_path / name)
    said = read_in_little_memory(tmp_path / name)
    assert said.startswith(f"refused: {tmp_path / name}")
    assert says in said
    assert said.count("\n") == 1


def test_a_bomb_of_zstd_is_one_line(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    with arrow.CompressedOutputStream(str(path), "zstd") as file:
        for _ in range(80):
            file.write(b'{"text": "' + b"a" * MIB + b'"}\n')
    assert path.stat().st_size < 100_000
    assert "decompresses to more than 250 times" in read_in_little_memory(path)


def test_an_honest_document_of_60_mib_is_read_whole(tmp_path):
    words = b"It was the best of times, [it was] {the} worst of times. " * (MIB // 57)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + words * 60 + b'"}\n{"text": "short"}\n')
    assert [len(text) for text in find_files([path])[0].documents("text")] == [len(words) * 60, 5]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_document_that_is_too_long_is_named(tmp_path, monkeypatch, ending):
    parquet._stop()
    for module in (limits, parquet):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 1000)
    path, texts = tmp_path / f"a{ending}", ["short", "é" * 500, "é" * 501]
    if ending == ".jsonl":
        path.write_bytes(json_lines(texts))
    else:
        arrow_parquet.write_table(arrow.table({"text": texts}), path)
    found = []
    with pytest.raises(ConfigError, match=r"a text of 1,002 bytes; a document has at most 1,000"):
        found.extend(find_files([path])[0].documents("text"))
    parquet._stop()


@pytest.mark.parametrize("line", [b'"",', b'""', b'"a"', b'\\"', b'"\\"', b'"\\', b"\\"], ids=str)
def test_a_line_of_quotes_takes_neither_memory_nor_hours(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"x": [' + b"0," * 1_000_001 + line * (30 * MIB // len(line)) + b"\n"
    )
    assert "refused" in read_in_little_memory(tmp_path / "a.jsonl")


def test_a_page_of_parquet_that_does_not_fit_is_one_line(tmp_path, monkeypatch):
    table = arrow.table({"text": ["a" * (4 * MIB)] * 64})
    options = {"use_dictionary": False, "data_page_size": 1 << 30, "compression": "zstd"}
    arrow_parquet.write_table(table, tmp_path / "a.parquet", **options)
    assert (tmp_path / "a.parquet").stat().st_size < 200_000
    parquet._stop()
    monkeypatch.setattr(parquet, "MEMORY_BYTES", 192 * MIB)
    with pytest.raises(ConfigError, match=r"a\.parquet takes more than 192 MiB of memory to read"):
        next(find_files([tmp_path / "a.parquet"])[0].documents("text"))


def test_a_small_file_may_shrink_as_much_as_it_likes(tmp_path):
    texts = [text * 300 for text in make_texts(40)]  # shrinks 200 times and is small
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines(texts), 9))
    assert list(find_files([path])[0].documents("text")) == texts


def test_commas_and_brackets_in_a_text_are_not_values():
    row = {"text": '1,2,[3],{"a"}\\",' * 200_000, "more": [1, 2, {"x": "[,"}]}
    assert parse_row(json.dumps(row).encode(), "here") == row
    with pytest.raises(ConfigError, match="here: more than 1,000,000 JSON values"):
        parse_row(b'{"x": "[,\\"[,", "y": [' + b"0," * 1_000_050 + b"0]}", "here")


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet", ".jsonl.gz", ".jsonl.zst"])
def test_a_pipe_or_a_device_as_input_is_one_line_and_not_a_wait(tmp_path, isthmus, ending):
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path = tmp_path / f"a{ending}"
        path.unlink(missing_ok=True)
        put(path)
        status, out, err = isthmus("data", "prepare", path, "--to", tmp_path / "corpus")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "not a regular file" in err
        assert not (tmp_path / "corpus").exists()


def test_parquet_is_decoded_in_a_process_that_takes_no_module_from_the_folder_one_stands_in(
    tmp_path, monkeypatch
):
    arrow_parquet.write_table(arrow.table({"text": ["a", None, "", "bé"]}), tmp_path / "a.parquet")
    (tmp_path / "pyarrow.py").write_text(f"open({str(tmp_path / 'hit')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    parquet._stop()
    assert list(find_files(["a.parquet"])[0].documents("text")) == ["a", "bé"]
    assert not (tmp_path / "hit").exists()


def test_after_a_bomb_the_next_file_is_read(tmp_path):
    dictionary_bomb(tmp_path / "a.parquet")
    arrow_parquet.write_table(arrow.table({"text": ["x", "y"]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="takes more than"):
        list(find_files([tmp_path / "a.parquet"])[0].documents("text"))
    assert list(find_files([tmp_path / "b.parquet"])[0].documents("text")) == ["x", "y"]


def test_a_killed_decoder_is_no_fault_of_the_file_and_what_was_prepared_is_kept(
    tmp_path, isthmus, monkeypatch
):
    table = arrow.table({"text": make_texts(200)})
    arrow_parquet.write_table(table, tmp_path / "a.parquet")
    to, small = tmp_path / "corpus", ("--vocab", 300, "--validation", 0.2, "--shard-tokens", 500)
    assert isthmus("data", "prepare", tmp_path / "a.parquet", "--to", tmp_path / "whole", *small)[0] == 0
    ask, asked = parquet.Worker.ask, []

    def killed(worker, request):
        asked.append(request)
        if sum("open" in one for one in asked) == 3 and "next" in request:  # the tokenizer is trained by now
            worker.process.kill()
            monkeypatch.setattr(parquet.Worker, "ask", ask)
        return ask(worker, request)

    monkeypatch.setattr(parquet.Worker, "ask", killed)
    status, _, err = isthmus("data", "prepare", tmp_path / "a.parquet", "--to", to, *small)
    assert status == 1
    assert "was killed; the same command continues" in err
    assert (to / "progress.json").exists()
    assert isthmus("data", "prepare", tmp_path / "a.parquet", "--to", to, *small)[0] == 0
    assert contents(to) == contents(tmp_path / "whole")


def test_a_long_document_and_short_ones_give_the_tokens_of_each(tmp_path, isthmus, monkeypatch):
    monkeypatch.setattr("isthmus.data.documents.AHEAD_BYTES", 1000)
    texts = [text * (60 if number % 7 == 0 else 1) for number, text in enumerate(make_texts(60))]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    small = ("--vocab", 300, "--validation", 0.2)
    assert isthmus("data", "prepare", tmp_path / "a.jsonl", "--to", tmp_path / "corpus", *small)[0] == 0
    corpus = open_corpus(tmp_path / "corpus")
    encoder = Encoder(corpus.tokenizer_path.read_bytes())
    ids = [tokens.tobytes() for tokens in encoder.encode(texts)]
    stored = np.concatenate([corpus.train.slice(0, len(corpus.train))]).astype("<u2")
    ends = np.flatnonzero(stored == corpus.end_id) + 1
    assert {part.tobytes() for part in np.split(stored, ends)[:-1]} <= set(ids)
    assert limits.MAX_DOCUMENT_BYTES < limits.MAX_LINE_BYTES
