"""Preparing a corpus: the same text gives the same bytes, killed or not; bad input leaves nothing."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from corpus_texts import contents, json_lines, make_texts, write_format
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data import corpus as corpus_module
from isthmus.data.corpus import open_corpus
from isthmus.data.tokenizer import Encoder
from isthmus.files import replacing


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json_lines(make_texts(200)))
    return path


SMALL = ("--vocab", "300", "--validation", "0.1")


@given(text=st.text(max_size=300))
def test_decoding_gives_the_text_back(text):
    encoder = Encoder((corpus_module.BUILTIN_FOLDER / "tokenizer.json").read_bytes())
    [ids] = encoder.encode([text])
    assert ids[-1] == encoder.end_id == 0
    assert encoder.end_id not in ids[:-1]
    assert encoder.tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_text_that_mentions_the_end_token_does_not_end_there():
    encoder = Encoder((corpus_module.BUILTIN_FOLDER / "tokenizer.json").read_bytes())
    [ids] = encoder.encode(["before<|endoftext|>after"])
    assert (ids == 0).sum() == 1
    assert encoder.tokenizer.decode(ids[:-1].tolist()) == "before<|endoftext|>after"


def test_a_very_long_document_is_encoded_in_pieces_and_stays_one_document(monkeypatch):
    text = "\n\n".join(make_texts(300))
    encoder = Encoder((corpus_module.BUILTIN_FOLDER / "tokenizer.json").read_bytes())
    monkeypatch.setattr("isthmus.data.tokenizer.PIECE_CHARACTERS", 1000)
    [ids] = encoder.encode([text])
    assert (ids == 0).sum() == 1
    assert encoder.tokenizer.decode(ids[:-1].tolist()) == text


def test_held_out_documents_follow_their_text_and_the_seed(tmp_path, isthmus):
    texts = make_texts(300)
    shuffled = random.Random(1).sample(texts, len(texts))

    def held_out(name: str, texts: list[str], seed: int) -> set[str]:
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(json_lines(texts))
        folder = tmp_path / name
        assert isthmus("data", "prepare", path, "--to", folder, *SMALL, "--seed", seed)[0] == 0
        corpus = open_corpus(folder)
        decode = Encoder(corpus.tokenizer_path.read_bytes()).tokenizer.decode
        tokens = corpus.validation.slice(0, len(corpus.validation))
        parts = np.split(tokens, np.flatnonzero(tokens == 0) + 1)[:-1]
        return {decode(part[:-1].tolist()) for part in parts}

    first = held_out("a", texts, 0)
    assert held_out("b", shuffled, 0) == first
    assert held_out("c", texts, 1) != first
    assert 10 <= len(first) <= 60


def test_validation_files_inside_an_input_folder_are_not_trained_on(tmp_path, isthmus):
    folder = tmp_path / "in"
    folder.mkdir()
    write_format(folder, ".jsonl", make_texts(50), "train")
    held_out = write_format(folder, ".jsonl.gz", make_texts(9, seed=9), "validation")
    to = tmp_path / "corpus"
    assert (
        isthmus("data", "prepare", folder, "--validation-from", held_out, "--vocab", 300, "--to", to)[0] == 0
    )
    manifest = open_corpus(to).manifest
    assert (manifest.train.documents, manifest.validation.documents) == (50, 9)
    assert [source["name"] for source in manifest.sources] == ["in/train.jsonl"]
    assert str(tmp_path) not in (to / "manifest.json").read_text()


def test_limit_bytes_stops_after_the_document_that_reaches_it(texts, tmp_path, isthmus):
    sizes = np.cumsum([len(text.encode()) for text in make_texts(200)])
    arguments = ("--to", tmp_path / "corpus", *SMALL, "--limit-bytes", 5000)
    assert isthmus("data", "prepare", texts, *arguments)[0] == 0
    manifest = open_corpus(tmp_path / "corpus").manifest
    read = manifest.train.bytes + manifest.validation.bytes
    assert read == sizes[np.searchsorted(sizes, 5000)]


def test_large_vocabularies_take_four_bytes(texts, tmp_path, isthmus):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000, "?": 70_001}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    arguments = ("--tokenizer", tmp_path / "words.json", "--validation", 0.1, "--to", tmp_path / "corpus")
    assert isthmus("data", "prepare", texts, *arguments)[0] == 0
    corpus = open_corpus(tmp_path / "corpus")
    assert (corpus.manifest.dtype, corpus.vocab_size, corpus.end_id) == ("uint32", 70_002, 70_000)
    tokens = corpus.train.slice(0, len(corpus.train))
    assert set(tokens) == {70_000, 70_001}


def test_the_same_command_again_does_nothing_and_another_one_is_refused(texts, tmp_path, isthmus):
    to = tmp_path / "corpus"
    assert isthmus("data", "prepare", texts, "--to", to, *SMALL)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in to.iterdir()}
    status, out, err = isthmus("data", "prepare", texts, "--to", to, *SMALL)
    assert status == 0
    assert "already" in err
    assert "train" in out
    status, _, err = isthmus("data", "prepare", texts, "--to", to, *SMALL, "--seed", 1)
    assert status == 2
    assert "--overwrite" in err
    assert {path: path.stat().st_mtime_ns for path in to.iterdir()} == before
    assert isthmus("data", "prepare", texts, "--to", to, *SMALL, "--seed", 1, "--overwrite")[0] == 0
    assert open_corpus(to).manifest.arguments["seed"] == 1


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        (b'{"text": "a"}\n{"text": \n', (), "in.jsonl, line 2: not JSON"),
        (b'{"text": "a"}\n\xff\xfe\n', (), "in.jsonl, line 2: not JSON"),
        (b'["a"]\n', (), "in.jsonl, line 1: not a JSON object"),
        (b'{"content": "a"}\n', (), "it has: content); name the one with the text by --text-field"),
        (b'{"text": 5}\n', (), "field 'text' holds int"),
        (b"", (), "no documents"),
        (b'{"text": ""}\n', (), "no documents"),
        (b'{"text": "a"}\n', (), "fell to the"),
        (b'{"text": "a"}\n', ("--vocab", 100), "--vocab is 100; it must be 257"),
        (b'{"text": "a"}\n', ("--validation", 0), "--validation is 0; hold out"),
        (b'{"text": "a"}\n', ("--validation", "nan"), "--validation is nan"),
        (b'{"text": "a"}\n', ("--limit-bytes", 0), "--limit-bytes is 0"),
        (b'{"text": "a"}\n', ("--shard-tokens", 0), "--shard-tokens is 0"),
        (b'{"text": "a"}\n', ("--split", "train"), "--split names a part of a --hf dataset"),
        (b'{"text": "a"}\n', ("--hf", "some/name"), "not both"),
        (b'{"text": "a"}\n', ("--tokenizer", "none.json"), "cannot read the tokenizer none.json"),
        (b'{"text": "a"}\n', ("--validation-from", "none.txt"), "none.txt does not exist"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(content, arguments, expected, tmp_path, isthmus):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    to = tmp_path / "some" / "where"
    status, out, err = isthmus("data", "prepare", path, "--to", to, *arguments)
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("isthmus: ")]
    assert err.endswith(f"{lines[0]}\n")
    assert len(lines) == 1
    assert expected in lines[0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["none.jsonl", "in.csv", "empty", "in.json"])
def test_inputs_that_are_no_text_files_are_one_line(name, tmp_path, isthmus):
    (tmp_path / "in.csv").write_text("a,b")
    (tmp_path / "in.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    status, _, err = isthmus("data", "prepare", tmp_path / name, "--to", tmp_path / "corpus")
    assert status == 2
    assert ".jsonl.zst" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "corpus").exists()


def test_a_fault_late_in_the_text_leaves_nothing_either(texts, tmp_path, isthmus):
    texts.write_bytes(texts.read_bytes() + b"{broken\n")
    arguments = (*SMALL, "--limit-bytes", 10**6, "--shard-tokens", 500)
    status, _, err = isthmus("data", "prepare", texts, "--to", tmp_path / "corpus", *arguments)
    assert status == 2
    assert "line 201" in err
    assert list(tmp_path.iterdir()) == [texts]


def test_a_folder_of_somebody_else_is_left_alone(texts, tmp_path, isthmus):
    to = tmp_path / "theirs"
    to.mkdir()
    (to / "tokenizer.json").write_text("theirs")
    status, _, err = isthmus("data", "prepare", texts, "--to", to, *SMALL)
    assert status == 2
    assert "not empty" in err
    (to / "thesis.doc").write_text("theirs")
    status, _, err = isthmus("data", "prepare", texts, "--to", to, *SMALL, "--overwrite")
    assert status == 2
    assert "thesis.doc" in err
    assert contents(to) == {"tokenizer.json": b"theirs", "thesis.doc": b"theirs"}
    status, _, err = isthmus("data", "prepare", texts, "--to", texts, *SMALL)
    assert status == 2
    assert "is a file" in err


def command(texts: Path, to: Path) -> list[str]:
    # Tiny batches in the child, so that a small text passes through many checkpoints.
    code = (
        "import sys, isthmus.data.documents as d; d.BATCH_DOCUMENTS = 3; "
        "from isthmus.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["data", "prepare", texts, "--to", to, *SMALL, "--shard-tokens", 700]
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.mark.soak
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path):
    source = write_format(tmp_path, ".jsonl.gz", make_texts(600))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    begin = time.monotonic()
    subprocess.run(command(source, whole), check=True, capture_output=True)
    seconds = time.monotonic() - begin
    rng = random.Random(os.getpid())
    num_kills = 0
    for attempt in range(12):
        child = subprocess.Popen(command(source, killed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            child.wait((rng.uniform(0.2, 0.8) if attempt else 0.1) * seconds)  # the first kill is certain
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            num_kills += 1
        assert "Traceback" not in child.communicate()[1].decode()
        assert child.returncode in (0, -signal.SIGKILL)
        # Whatever has a final name is already whole.
        for path in killed.glob("*.bin"):
            assert path.read_bytes() == (whole / path.name).read_bytes()
        if child.returncode == 0:
            break
    subprocess.run(command(source, killed), check=True, capture_output=True)
    assert num_kills > 0
    assert contents(killed) == contents(whole)


@pytest.mark.parametrize("survivor", range(12))
def test_stopped_at_every_kind_of_write_it_ends_with_the_same_bytes(
    survivor, texts, tmp_path, isthmus, monkeypatch
):
    """The kills that chance rarely finds: between any two renames, journals included."""

    class Killed(BaseException):
        pass

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    monkeypatch.setattr("isthmus.data.documents.BATCH_DOCUMENTS", 20)
    arguments = (*SMALL, "--shard-tokens", 900)
    assert isthmus("data", "prepare", texts, "--to", whole, *arguments)[0] == 0
    rename, renamed = os.replace, []

    def replace(source, target):
        if len(renamed) == survivor:
            raise Killed
        renamed.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        isthmus("data", "prepare", texts, "--to", killed, *arguments)
    monkeypatch.setattr(os, "replace", rename)
    assert not (killed / "manifest.json").exists()
    assert isthmus("data", "prepare", texts, "--to", killed, *arguments)[0] == 0
    assert contents(killed) == contents(whole)


def test_what_a_kill_left_of_a_file_being_replaced_goes(texts, tmp_path, isthmus):
    to = tmp_path / "corpus"
    to.mkdir()
    killed = replacing(to / "progress.json")
    killed.__enter__().write(b"half a jour")
    assert len(list(to.iterdir())) == 1
    assert isthmus("data", "prepare", texts, "--to", to, *SMALL)[0] == 0
    assert isthmus("data", "prepare", texts, "--to", tmp_path / "whole", *SMALL)[0] == 0
    assert contents(to) == contents(tmp_path / "whole")


def test_unfinished_work_is_named_and_refuses_other_arguments(texts, tmp_path, isthmus, monkeypatch):
    to = tmp_path / "corpus"
    monkeypatch.setattr(
        "isthmus.data.prepare.Work.encode", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full"))
    )
    status, _, err = isthmus("data", "prepare", texts, "--to", to, *SMALL)
    assert status == 1
    assert "; make room there, then the same command continues" in err
    monkeypatch.undo()
    assert "unfinished" in isthmus("data", "show", to)[2]
    status, _, err = isthmus("data", "prepare", texts, "--to", to, *SMALL, "--seed", 5)
    assert status == 2
    assert "unfinished corpus with other" in err
    assert isthmus("data", "prepare", texts, "--to", to, *SMALL)[0] == 0


def test_damaged_unfinished_shards_are_made_again(texts, tmp_path, isthmus, monkeypatch):
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    monkeypatch.setattr("isthmus.data.documents.BATCH_DOCUMENTS", 20)
    arguments = (*SMALL, "--shard-tokens", 900)
    assert isthmus("data", "prepare", texts, "--to", whole, *arguments)[0] == 0
    monkeypatch.setattr(
        "isthmus.data.prepare.Manifest", lambda **_: (_ for _ in ()).throw(OSError(5, "pulled"))
    )
    assert isthmus("data", "prepare", texts, "--to", damaged, *arguments)[0] == 1
    monkeypatch.undo()
    (damaged / "train-00001.bin").write_bytes(b"short")
    assert isthmus("data", "prepare", texts, "--to", damaged, *arguments)[0] == 0
    assert contents(damaged) == contents(whole)


def test_two_processes_do_not_write_to_one_folder(texts, tmp_path, isthmus):
    from isthmus.data.corpus_folder import locked

    with locked(tmp_path / "corpus"):
        status, _, err = isthmus("data", "prepare", texts, "--to", tmp_path / "corpus", *SMALL)
    assert status == 2
    assert "another process" in err
