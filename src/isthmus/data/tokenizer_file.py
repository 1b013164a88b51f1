"""tokenizer.json as somebody else wrote it: its size, and what the library would make of it.

The library takes some 300 bytes of memory for each byte of a Unigram token, and a short list of replacements
can turn a sentence into gigabytes. So the parts that grow are counted before the library gets the file.
"""

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
MAX_GROWTH = 256  # a normalizer or decoder may make a text so many times as long


def tokenizer_bytes(path: Path) -> bytes:
    try:
        return reading.read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"cannot read the tokenizer {path}: there is no such file") from None


def check_tokenizer(data: bytes, where: str) -> None:
    """Refuse what would take far more memory than an honest tokenizer. The library checks the rest."""
    found = reading.parse_json(data, where, MAX_VALUES)
    found = found if isinstance(found, dict) else {}
    added, model = found.get("added_tokens"), found.get("model")
    model = model if isinstance(model, dict) else {}
    vocab = model.get("vocab")
    grown = [growth(found.get(part)) for part in ("normalizer", "pre_tokenizer", "decoder")]
    for name, size, most in (
        ("bytes of added tokens", text_bytes(added), MAX_ADDED_BYTES),
        ("tokens", len(vocab) if isinstance(vocab, dict | list) else 0, MAX_TOKENS),
        ("merges", len(merges) if isinstance(merges := model.get("merges"), list) else 0, MAX_MERGES),
        ("bytes of Unigram tokens", text_bytes(vocab) if isinstance(vocab, list) else 0, MAX_UNIGRAM_BYTES),
        ("times the text after its replacements", max(grown), MAX_GROWTH),
    ):
        if size > most:
            raise ConfigError(f"{where} has {size:,} {name}; at most {most:,} are read")


def text_bytes(tokens: Any) -> int:
    """Of added tokens ({"content": text, ...}) or Unigram tokens ([text, score])."""
    total = 0
    for token in tokens if isinstance(tokens, list) else []:
        text = token.get("content") if isinstance(token, dict) else token[0] if token else ""
        total += len(text.encode(errors="replace")) if isinstance(text, str) else 0
    return total


def growth(part: Any) -> int:
    """How many times as long its replacements and prefixes can make a text, at most."""
    if not isinstance(part, dict):
        return 1
    total = 1
    for key in ("content", "prepend"):
        if isinstance(text := part.get(key), str):
            total *= 1 + len(text)  # an empty pattern keeps what is there and adds this
    for key in ("normalizers", "pretokenizers", "decoders"):
        for inner in inside if isinstance(inside := part.get(key), list) else []:
            total = min(total * growth(inner), 1 << 40)
    return total
