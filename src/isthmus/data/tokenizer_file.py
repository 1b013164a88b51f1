"""tokenizer.json as somebody else wrote it: its size, and what the library would make of it.

The library takes some 300 bytes of memory for each byte of a Unigram token, and a short list of replacements
can turn a sentence into gigabytes. So the parts that grow are counted before the library gets the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus import reading
from isthmus.errors import ConfigError

MAX_BYTES = 64 << 20  # of the file; those of the largest public vocabularies have 35 MB
MAX_VALUES = 2_500_000
MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 20
MAX_ADDED_BYTES = 1 << 20  # of all tokens outside the model
MAX_UNIGRAM_BYTES = 2 << 20
MAX_TEMPLATE = 4096  # special tokens around a text
MAX_GROWTH = 256  # a normalizer or decoder may make a text so many times as long


def tokenizer_bytes(path: Path) -> bytes:
    try:
        return reading.read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"cannot read the tokenizer {path}: there is no such file") from None


def check_tokenizer(data: bytes, where: str) -> None:
    """Refuse what would take far more memory than an honest tokenizer. The library checks the rest."""
    found = reading.parse_json(data, where, MAX_VALUES)
    try:
        counted = list(counts(found))
    except (AttributeError, KeyError, IndexError, TypeError, RecursionError):
        raise ConfigError(f"{where} is not a tokenizer.json of the tokenizers library") from None
    for name, size, most in counted:
        if size > most:
            raise ConfigError(f"{where} has {size:,} {name}; at most {most:,} are read")


def counts(found: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(what it is, how much of it, the most) for every part that can grow."""
    model, added = found.get("model") or {}, found.get("added_tokens") or []
    vocab, merges = model.get("vocab") or {}, model.get("merges") or []
    yield "bytes of added tokens", sum(text_bytes(token["content"]) for token in added), MAX_ADDED_BYTES
    yield "tokens", len(vocab), MAX_TOKENS
    yield "merges", len(merges), MAX_MERGES
    if isinstance(vocab, list):  # [text, score] each: a Unigram
        yield "bytes of Unigram tokens", sum(text_bytes(token[0]) for token in vocab), MAX_UNIGRAM_BYTES
    yield "special tokens around a text", template_tokens(found.get("post_processor")), MAX_TEMPLATE
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        yield "times the text after its replacements", growth(found.get(part)), MAX_GROWTH


def text_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def growth(part: Any) -> int:
    """How many times as long its replacements and prefixes can make a text, at most."""
    if part is None:
        return 1
    if not isinstance(part, dict):  # the library would also read its fields from a list
        raise TypeError("a part of it is not an object")
    total = 1
    for key in ("content", "prepend"):
        if isinstance(text := part.get(key), str):
            total *= 1 + len(text)  # an empty pattern keeps what is there and adds this
    for key in ("normalizers", "pretokenizers", "decoders"):
        for inner in part.get(key) or []:
            total = min(total * growth(inner), 1 << 40)
    return total


def template_tokens(part: Any) -> int:
    """How many tokens a post-processor can put around a text, at most."""
    if part is None:
        return 0
    if not isinstance(part, dict):
        raise TypeError("its post-processor is not an object")
    pieces = len(part.get("single") or []) + len(part.get("pair") or [])
    tokens = part.get("special_tokens") or {}
    longest = max((len(token["ids"]) for token in tokens.values()), default=1)
    return pieces * longest + sum(template_tokens(inner) for inner in part.get("processors") or [])
