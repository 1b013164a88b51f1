"""A corpus that somebody else made or touched: only its own files are read, and only our own are written."""

import json

import numpy as np
import pytest
from corpus_texts import json_lines, make_texts

from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError

SMALL = ("--validation", 0.2, "--vocab", 300, "--shard-tokens", 1000)
SECRET = bytes(range(200)) * 10  # as long as a shard of 1,000 tokens


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(json_lines(make_texts(120)))
    return tmp_path / "in.jsonl"


@pytest.fixture
def prepared(texts, tmp_path, isthmus):
    assert isthmus("data", "prepare", texts, "--to", tmp_path / "corpus", *SMALL)[0] == 0
    return tmp_path / "corpus"


def change(folder, *path, to):
    """Set one value of manifest.json, by its keys."""
    fields = part = json.loads((folder / "manifest.json").read_bytes())
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    (folder / "manifest.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "dtype", ["O", "object", "V8", "float64", "uint8", "int64", "<u2", "", 2, None, ["u2"]]
)
def test_token_ids_are_uint16_or_uint32_and_nothing_else(prepared, isthmus, dtype):
    change(prepared, "dtype", to=dtype)
    status, out, err = isthmus("data", "show", prepared)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "token ids are uint16 or uint32" in err


@pytest.mark.parametrize(
    "name", ["{secret}", "../secret", "./train-00000.bin", "train-00001.bin", "x", "", 3]
)
def test_a_shard_has_the_name_that_we_give_it_so_it_lies_in_the_folder(prepared, isthmus, name):
    secret = prepared.parent / "secret"
    secret.write_bytes(SECRET)
    change(prepared, "train", "shards", 0, "name", to=str(name).format(secret=secret) if name else name)
    status, out, err = isthmus("data", "show", prepared)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "here it is train-00000.bin" in err


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("vocab_size",), 10**30),
        (("vocab_size",), 65_537),  # more than its ids can say
        (("vocab_size",), True),
        (("end_id",), 300),
        (("end_id",), -1),
        (("end_token",), "x" * 5000),
        (("tokenizer_sha256",), "0" * 63),
        (("train", "tokens"), 0),
        (("train", "tokens"), 5),
        (("train", "bytes"), -1),
        (("train", "bytes"), 1e300),
        (("train", "shards"), {}),
        (("train", "shards", 0), "train-00000.bin"),
        (("train", "shards", 0, "tokens"), 1 << 62),
        (("train", "shards", 0, "tokens"), 999),
        (("train", "shards", 0, "sha256"), "../../x"),
        (("train",), []),
        (("sources",), [{"path": 1}]),
        (("sources",), 7),
        (("arguments",), "x"),
        (("version",), [1]),
    ],
    ids=str,
)
def test_every_field_of_a_manifest_has_its_bounds(prepared, isthmus, path, value):
    change(prepared, *path, to=value)
    status, out, err = isthmus("data", "show", prepared)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "manifest.json" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"a":' * 50_000, b"[" + b"[]," * 2_000_000, b"9" * 10_000, b"\xff\xfe"],
    ids=len,
)
def test_a_manifest_that_is_no_manifest_is_one_line(prepared, isthmus, data):
    (prepared / "manifest.json").write_bytes(data)
    status, out, err = isthmus("data", "show", prepared)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_names_in_a_manifest_reach_the_terminal_as_text(prepared, isthmus):
    change(prepared, "sources", 0, "name", to="a\x1b[2J\u202eb")
    change(prepared, "end_token", to="\x1b]0;x\x07")
    status, out, _ = isthmus("data", "show", prepared)
    assert status == 0
    assert not {"\x1b", "\u202e", "\x07"} & set(out)


def test_a_token_beyond_the_vocabulary_is_one_line_and_not_a_fault_of_the_gpu(prepared):
    shard = np.memmap(prepared / "train-00000.bin", "<u2", "r+")
    shard[:] = 300
    shard.flush()
    batches = Batches(open_corpus(prepared).train, 0, 1, 4, 32)
    with pytest.raises(ConfigError, match="holds the token 300, and its tokenizer has 300"):
        [batches.at(0, step) for step in range(batches.num_sequences // 4)]
