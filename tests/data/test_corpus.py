"""Opening a corpus: what is whole opens, what is not is refused by name, the builtin sample needs nothing."""

import hashlib
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from corpus_texts import json_lines, make_texts

from isthmus.data.corpus import BUILTIN_FOLDER, open_corpus
from isthmus.data.tokenizer import Encoder
from isthmus.errors import ConfigError


@pytest.fixture
def prepared(tmp_path, isthmus):
    (tmp_path / "in.jsonl").write_bytes(json_lines(make_texts(120)))
    folder = tmp_path / "corpus"
    arguments = ("--validation", 0.2, "--vocab", 300, "--shard-tokens", 1000)
    assert isthmus("data", "prepare", tmp_path / "in.jsonl", "--to", folder, *arguments)[0] == 0
    return folder


def test_an_opened_corpus_agrees_with_its_manifest(prepared):
    corpus = open_corpus(prepared)
    manifest = json.loads((prepared / "manifest.json").read_bytes())
    assert corpus.vocab_size == manifest["vocab_size"] == 300
    assert corpus.tokenizer_sha256 == hashlib.sha256(corpus.tokenizer_path.read_bytes()).hexdigest()
    for name in ("train", "validation"):
        view, split = getattr(corpus, name), manifest[name]
        assert len(view) == split["tokens"] == sum(shard["tokens"] for shard in split["shards"])
        tokens = view.slice(0, len(view))
        assert (tokens == corpus.end_id).sum() == split["documents"]
        joined = b"".join((prepared / shard["name"]).read_bytes() for shard in split["shards"])
        assert np.array_equal(np.frombuffer(joined, "<u2"), tokens)
    assert math.isclose(corpus.bytes_per_token, manifest["validation"]["bytes"] / len(corpus.validation))
    assert len(manifest["train"]["shards"]) > 2


def test_decoded_tokens_are_the_text(prepared):
    corpus = open_corpus(prepared)
    encoder = Encoder(corpus.tokenizer_path.read_bytes())
    decoded = []
    for view in (corpus.train, corpus.validation):
        tokens = view.slice(0, len(view))
        for document in np.split(tokens, np.flatnonzero(tokens == corpus.end_id) + 1)[:-1]:
            decoded.append(encoder.tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False))
    assert sorted(decoded) == sorted(make_texts(120))


def test_a_shortened_or_missing_shard_is_refused_by_name(prepared):
    shard = prepared / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"train-00001\.bin has 1,998 bytes instead of 2,000"):
        open_corpus(prepared)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"train-00001\.bin is missing"):
        open_corpus(prepared)


def test_verify_finds_one_changed_byte(prepared, isthmus):
    assert isthmus("data", "show", prepared, "--verify")[0] == 0
    shard = prepared / "validation-00000.bin"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    status, out, err = isthmus("data", "show", prepared, "--verify")
    assert (status, out) == (2, "")
    assert "validation-00000.bin differs" in err


def test_texts_in_place_of_a_corpus_are_answered_by_a_command_that_works(tmp_path, isthmus):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_bytes(json_lines(make_texts(300)))
    with pytest.raises(ConfigError, match="there is no corpus") as told:
        open_corpus(tmp_path / "texts")
    command = str(told.value).split("`")[1].split()
    status, _, err = isthmus(*command[1:], "--vocab", 300)
    assert status == 0, err
    assert len(open_corpus(command[-1]).train)


def test_the_builtin_sample_opens_and_is_small():
    corpus = open_corpus("builtin:sample")
    assert corpus.vocab_size == 1024
    assert len(corpus.train) > 400_000
    assert len(corpus.validation) > 30_000
    corpus.verify()
    assert sum(path.stat().st_size for path in BUILTIN_FOLDER.iterdir()) < 700_000


def test_the_builtin_tokens_and_tokenizer_are_what_prepare_makes_of_the_sample(tmp_path, isthmus):
    texts = [BUILTIN_FOLDER / f"{name}.jsonl.gz" for name in ("train", "validation")]
    arguments = ("--validation-from", texts[1], "--vocab", 1024, "--to", tmp_path / "sample")
    assert isthmus("data", "prepare", texts[0], *arguments)[0] == 0
    made, builtin = open_corpus(tmp_path / "sample"), open_corpus("builtin:sample")
    assert made.tokenizer_path.read_bytes() == builtin.tokenizer_path.read_bytes()
    assert made.sha256 == builtin.sha256
    for name in ("train", "validation"):
        assert getattr(made.manifest, name) == getattr(builtin.manifest, name)


def test_help_and_opening_import_nothing_heavy():
    code = (
        "import sys\nfrom isthmus.cli.main import main\n"
        "try:\n    main(['data', 'prepare', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'tokenizers', 'pyarrow', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import isthmus.data.corpus\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
