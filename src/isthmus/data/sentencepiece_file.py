"""tokenizer.model of SentencePiece, as a tokenizer.json: the same ids, without the package.

The file is a protobuf (sentencepiece_model.proto). Of it the pieces are read, and the few settings that
decide how text becomes pieces. It may be anybody's: lengths are bounded, and kinds that cannot be had are
refused. Ids differ where the tokenizers library works otherwise: where characters are replaced, of rare
characters in several parts (Hangul in single letters); and where a text spells out a control token in letters
that the model does not know.
"""

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from isthmus.data.tokenizer_file import MAX_MERGES, MAX_TOKENS, text_bytes
from isthmus.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE = 1, 2
SPACE = "\u2581"  # what stands for a space in pieces
MAX_PIECE_BYTES = 512
MAX_PIECES_BYTES = 8 << 20  # of all pieces together
UNK_PENALTY = 10.0  # below the rarest piece; the tokenizers library has the same


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(slots=True)
class Model:
    pieces: list[Piece] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    space_as_suffix: bool = False
    rule: bytes = b""  # the name of the replacements of characters
    charsmap: bytes = b""  # those, compiled
    dummy_prefix: bool = True  # a text begins with a space
    single_spaces: bool = True  # runs of spaces are one, and none at the ends
    escape_spaces: bool = True


def converted(data: bytes, where: str) -> bytes:
    """The tokenizer.json of these bytes."""
    try:
        model = read_model(data)
        found = tokenizer_of(model)
    except (ValueError, struct.error, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is not a SentencePiece model that can be used ({error!s:.200})") from None
    return json.dumps(found, ensure_ascii=False).encode()


def read_model(data: bytes) -> Model:
    model, total = Model(), 0
    for number, value in messages(data):
        if number == 1:
            total += len(value)
            if len(model.pieces) == MAX_TOKENS or total > MAX_PIECES_BYTES:
                raise ValueError(f"more than {MAX_TOKENS:,} pieces, or {MAX_PIECES_BYTES:,} bytes of them")
            model.pieces.append(_piece(value))
        elif number == 2:
            spec = dict(messages(value))
            model.kind = spec.get(3, UNIGRAM)
            model.byte_fallback = bool(spec.get(35, 0))
            model.space_as_suffix = bool(spec.get(24, 0))
        elif number == 3:
            spec = dict(messages(value))
            model.rule, model.charsmap = spec.get(1, b""), spec.get(2, b"")
            model.dummy_prefix, model.single_spaces = bool(spec.get(3, 1)), bool(spec.get(4, 1))
            model.escape_spaces = bool(spec.get(5, 1))
    if not isinstance(model.charsmap, bytes) or not isinstance(model.rule, bytes):
        raise ValueError("its replacements of characters are malformed")
    return model


def _piece(data: bytes) -> Piece:
    fields = dict(messages(data))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not text or len(text) > MAX_PIECE_BYTES:
        raise ValueError(f"a piece of {len(text)} bytes; 1 to {MAX_PIECE_BYTES} are read")
    (number,) = struct.unpack("<f", score)
    if not abs(number) < 1e30:
        raise ValueError("the score of a piece is not a number")
    return Piece(text.decode(), number, fields.get(3, NORMAL))


def messages(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field of a protobuf message: whole numbers, else bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind in (1, 2, 5):
            size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
            if size > len(data) - at:
                raise ValueError("it is cut short")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError("it is not a protobuf message")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at == len(data):
            raise ValueError("it is cut short")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("it is not a protobuf message")


def tokenizer_of(model: Model) -> dict[str, Any]:
    """As the tokenizers library reads it."""
    if model.kind not in (UNIGRAM, BPE):
        raise ValueError("it is neither a Unigram nor a BPE model")
    if model.space_as_suffix or not model.escape_spaces:
        raise ValueError("it has spaces at the ends of words, or does not escape them")
    if len({piece.text for piece in model.pieces}) < len(model.pieces):
        raise ValueError("a piece occurs twice")
    unknown = [number for number, piece in enumerate(model.pieces) if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"it has {len(unknown)} pieces for what is unknown, in place of one")
    part = unigram(model, unknown[0]) if model.kind == UNIGRAM else bpe(model, unknown[0])
    # A space within a piece is a reason not to cut the text at spaces; else words can be looked up.
    apart = not any(SPACE in piece.text[1:] for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED))
    scheme = "first" if prefix_later(model) else "never"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens(model)),
        "normalizer": {"type": "Sequence", "normalizers": list(normalizers(model))},
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": scheme,
            "split": apart,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": list(decoders(model))},
        "model": part,
    }


def unigram(model: Model, unknown: int) -> dict[str, Any]:
    scores = [piece.score for piece in model.pieces if piece.kind == NORMAL] or [0.0]
    least, most = min(scores), max(scores)

    def score(piece: Piece) -> float:
        if piece.kind == USER_DEFINED:  # as SentencePiece: taken before anything else
            return text_bytes(piece.text) * most - 0.1
        # Control tokens and bytes are no text: "</s>" in a document costs more than its characters do.
        return piece.score if piece.kind == NORMAL else len(piece.text) * min(least, 0.0) - 1.0

    vocab = [[piece.text, score(piece)] for piece in model.pieces]
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": model.byte_fallback}


def bpe(model: Model, unknown: int) -> dict[str, Any]:
    """SentencePiece joins the neighbours whose union has the best score; a list of merges says the same."""
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    if any(piece.kind == UNUSED for piece in model.pieces):
        raise ValueError("it is a BPE with unused pieces")
    ordered = sorted((p for p in model.pieces if p.kind == NORMAL), key=lambda piece: -piece.score)
    known, merges = {piece.text for piece in ordered}, []
    for text in (piece.text for piece in ordered if len(piece.text) > 1):
        for cut in range(1, len(text)):
            if text[:cut] in known and text[cut:] in known:
                merges.append([text[:cut], text[cut:]])
        if len(merges) > MAX_MERGES:
            raise ValueError(f"it has more than {MAX_MERGES:,} merges")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[unknown].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }


def added_tokens(model: Model) -> Iterator[dict[str, Any]]:
    """Control tokens are special. Of a BPE those that its user defined are cut out of the text first."""
    for number, piece in enumerate(model.pieces):
        special = piece.kind in (UNKNOWN, CONTROL)
        if special or (piece.kind == USER_DEFINED and model.kind == BPE):
            marks = {"single_word": False, "lstrip": False, "rstrip": False}
            yield {
                "id": number,
                "content": piece.text,
                "special": special,
                "normalized": not special,
                **marks,
            }


def normalizers(model: Model) -> Iterator[dict[str, Any]]:
    if model.rule.startswith(b"nmt_"):
        # To these rules both are spaces. The library takes them for one character, and leaves one space.
        yield {"type": "Replace", "pattern": {"String": "\r\n"}, "content": "\n\n"}
    if model.charsmap:
        yield {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()}
    if model.single_spaces:
        yield replace(r"\A +\z| +\z", "")
        yield replace(" {2,}", " ")
        if not prefix_later(model):
            yield replace(r"\A ", "")
    elif prefix_later(model):
        yield replace(r"\A ", "  ")  # which stands for the one that the library then does not add
    if model.dummy_prefix and not prefix_later(model):
        yield {"type": "Prepend", "prepend": SPACE}


def prefix_later(model: Model) -> bool:
    """Is the first space added where the text has been cut already? A BPE's user-defined tokens are looked up
    as they are normalized, and would get one each."""
    return model.dummy_prefix and model.kind == BPE and any(p.kind == USER_DEFINED for p in model.pieces)


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def decoders(model: Model) -> Iterator[dict[str, Any]]:
    yield {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.dummy_prefix:
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}
