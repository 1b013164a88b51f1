"""tokenizer.model files: the ids of the sentencepiece package, on real text; hostile ones are one line."""

import io
import json
import struct
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.data import sentencepiece_file
from isthmus.data.corpus import BUILTIN_FOLDER, open_corpus
from isthmus.data.finding import find_files
from isthmus.data.sentencepiece_file import converted
from isthmus.data.tokenizer import Encoder
from isthmus.errors import ConfigError

PLAIN: dict[str, Any] = {}
SYMBOLS = {"user_defined_symbols": ["<sep>", "::"]}
SPACES = {"remove_extra_whitespaces": False, "split_by_whitespace": False}
NO_PREFIX = {"add_dummy_prefix": False}
ODD = [
    *("", " ", "  x", "x  ", " a  b ", "a\u2581b", "\n\nhello\n", "tab\tx", "\u00e9 e\u0301 \ufb01 \u00bd"),
    *(
        "\u65e5\u672c\u8a9e",
        "\U0001f642\U0001f642 ok",
        "a<sep>b <sep> c<sep><sep> ::x",
        "x\u00a0y",
        "\u200bz",
    ),
    *("\uff21\uff22", "na\u00efve caf\u00e9", "\u2026", "\r\nx\r\n", "a\x00b", "aaaa aaaaa", "  \n  x"),
    "<s> </s> <unk> <0x0A> a<s>b",
]


@cache
def texts(part: str) -> list[str]:
    [file] = find_files([BUILTIN_FOLDER / f"{part}.jsonl.gz"])
    return list(file.documents("text"))


@cache
def trained(kind: str, rule: str, byte_fallback: bool, options: str) -> bytes:
    package = pytest.importorskip("sentencepiece", reason="the sentencepiece package is not installed")
    lines = [line for text in texts("train")[:60] for line in text.split("\n") if line.strip()]
    out = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines[:300], "< s > </ s > unk 0x0A"]),
        model_writer=out,
        vocab_size=450,
        seed_sentencepiece_size=2000,
        model_type=kind,
        normalization_rule_name=rule,
        byte_fallback=byte_fallback,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
        **json.loads(options),
    )
    return out.getvalue()


@pytest.mark.parametrize(
    "options", [PLAIN, SYMBOLS, SPACES, NO_PREFIX], ids=["plain", "symbols", "spaces", "bare"]
)
@pytest.mark.parametrize(
    ("rule", "byte_fallback"), [("nmt_nfkc", False), ("identity", True)], ids=["replacing", "bytes"]
)
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_converted_model_gives_the_ids_of_the_package(kind, rule, byte_fallback, options):
    data = trained(kind, rule, byte_fallback, json.dumps(options))
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = Encoder(converted(data, "tokenizer.model"))
    held_out = [line for text in texts("validation") for line in text.split("\n")]
    assert len(held_out) > 100
    wanted = theirs.encode([*held_out, *texts("validation"), *ODD])
    found = ours.encode([*held_out, *texts("validation"), *ODD])
    for text, ids, own in zip([*held_out, *texts("validation"), *ODD], wanted, found, strict=True):
        assert [*ids, ours.end_id] == own.tolist(), text[:200]
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.end_token, ours.end_id) == ("</s>", theirs.eos_id())


def test_a_corpus_is_prepared_with_a_sentencepiece_model(tmp_path, isthmus):
    data = trained("unigram", "nmt_nfkc", False, "{}")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "tokenizer.model").write_bytes(data)
    words = ("--to", tmp_path / "corpus", "--validation", 0.2, "--tokenizer")
    source = BUILTIN_FOLDER / "validation.jsonl.gz"
    assert isthmus("data", "prepare", source, *words, tmp_path / "llama")[0] == 0
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.vocab_size == 450
    assert corpus.tokenizer_path.read_bytes() == converted(data, "")
    text = "The text comes back as it was."
    encoder = Encoder(corpus.tokenizer_path.read_bytes())
    assert encoder.tokenizer.decode(encoder.encode([text])[0][:-1].tolist()) == text


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def piece(text: str, score: float = -1.0, kind: int = 1) -> bytes:
    number = varint(2 << 3 | 5) + struct.pack("<f", score)
    return field(1, field(1, text.encode()) + number + field(3, kind))


KNOWN = piece("<unk>", 0.0, 2) + piece("</s>", 0.0, 3) + piece("\u2581", -2.0) + piece("a", -1.0)


def test_a_model_of_a_few_pieces_is_read():
    found = Encoder(converted(KNOWN, "few"))
    assert found.encode(["a a"])[0].tolist() == [2, 3, 2, 3, 1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "0 pieces for what is unknown"),
        (KNOWN[:-3], "cut short"),
        (b"\xff" * 20, "not a protobuf message"),
        (b"PK\x03\x04 a zip file", "not a"),
        (field(1, 7), "cannot be"),
        (KNOWN + piece("a"), "a piece occurs twice"),
        (KNOWN + piece("<oov>", 0.0, 2), "2 pieces for what is unknown"),
        (KNOWN + piece("b", float("nan")), "the score of a piece is not a number"),
        (KNOWN + piece("b" * 600), "a piece of 600 bytes"),
        (KNOWN + field(2, field(3, 4)), "neither a Unigram nor a BPE"),
        (KNOWN + field(2, field(24, 1)), "spaces at the ends of words"),
        (KNOWN + field(3, field(2, 1)), "replacements of characters are malformed"),
        (KNOWN + field(2, field(3, 2)) + piece("b", -1.0, 5), "a BPE with unused pieces"),
    ],
)
def test_a_hostile_model_is_one_line(tmp_path, isthmus, data, says):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is not a SentencePiece model that can be used"):
        converted(data, str(path))
    (tmp_path / "in.txt").write_text("text")
    status, _, err = isthmus(
        "data", "prepare", tmp_path / "in.txt", "--to", tmp_path / "c", "--tokenizer", path
    )
    assert (status, err.count("\n")) == (2, 1)
    assert says in err or says == "cannot be"


def test_more_pieces_than_anybody_has_are_not_read(monkeypatch):
    monkeypatch.setattr(sentencepiece_file, "MAX_PIECES_BYTES", 1000)
    with pytest.raises(ConfigError, match="more than 1,048,576 pieces, or 1,000 bytes"):
        converted(KNOWN * 100, "many")
    monkeypatch.setattr(sentencepiece_file, "MAX_MERGES", 3)
    pieces = b"".join(piece("a" * n, -n) for n in range(2, 6))
    with pytest.raises(ConfigError, match="more than 3 merges"):
        converted(KNOWN + pieces + field(2, field(3, 2)), "many")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(KNOWN)))
def test_any_bytes_are_a_model_or_one_line(noise, at):
    with suppress(ConfigError):
        found = json.loads(converted(KNOWN[:at] + noise + KNOWN[at:], "noise"))
        assert found["model"]["vocab"]
