"""manifest.json: what a corpus holds. It is written last, so a folder without one is not a corpus.

A corpus may come from anywhere. Every number, name and type in it is checked here, once, where it is read.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from isthmus import reading
from isthmus.errors import ConfigError

FORMAT = "isthmus-corpus"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
JOURNAL = "progress.json"
ID_BYTES = {"uint16": 2, "uint32": 4}  # the types of token ids; no other name reaches numpy
MAX_JSON_BYTES = 64 << 20
MAX_COUNT = 1 << 50  # tokens, documents or bytes of text
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of little-endian token ids."""

    name: str
    tokens: int
    documents: int  # those that end in this shard
    sha256: str


@dataclass(frozen=True, slots=True)
class Split:
    """The train or the validation part; `bytes` counts its text in UTF-8, for bits per byte."""

    tokens: int
    documents: int
    bytes: int
    shards: list[Shard]

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything there is to know about a corpus except its tokens."""

    vocab_size: int
    dtype: str
    end_token: str
    end_id: int
    tokenizer_sha256: str
    train: Split
    validation: Split
    sources: list[dict]
    arguments: dict
    fingerprint: str  # of sources and arguments: equal fingerprints mean equal corpora
    digest: str = ""  # sha256 of the file that this was read from

    @property
    def shards(self) -> list[Shard]:
        return [*self.train.shards, *self.validation.shards]

    @property
    def tokens_sha256(self) -> str:
        """One digest for tokenizer and tokens: two machines that agree on it train on the same data."""
        parts = [self.tokenizer_sha256, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def to_json(self) -> str:
        fields = {"format": FORMAT, "version": VERSION} | asdict(self)
        del fields["digest"]
        return json.dumps(fields, indent=1) + "\n"

    def shard_bytes(self, shard: Shard) -> int:
        return shard.tokens * ID_BYTES[self.dtype]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared corpus. Where there is none, the error says how to make one."""
    path = folder / MANIFEST
    if not path.exists():  # nor where a link leads nowhere
        if (folder / JOURNAL).is_file():
            raise ConfigError(
                f"{folder} is an unfinished corpus; run its `isthmus data prepare` again to finish it"
            )
        texts, to = "TEXT", folder
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):  # `prepare` would not write there
            texts, to = str(folder), beside(folder)
        raise ConfigError(
            f"there is no corpus in {folder}; make one with `isthmus data prepare {shlex.quote(texts)} --to "
            f"{shlex.quote(str(to))}`"
            ' or use "builtin:sample"'
        )
    try:
        data = reading.read_bytes(path, MAX_JSON_BYTES)
    except FileNotFoundError:  # a link that leads nowhere
        raise ConfigError(f"{path} leads nowhere; prepare the corpus again") from None
    return parse_manifest(data, str(path))


def beside(folder: Path) -> str:
    """A name for the corpus of these texts, also of `.`, `..` and `/`."""
    return os.path.normpath(folder / ".." / f"{folder.resolve().stem or 'my'}-corpus")


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in these bytes, from a folder or a bucket."""
    fields = parse_fields(data, where)
    kind, version = fields.pop("format", None), fields.pop("version", None)
    if kind != FORMAT:
        raise ConfigError(f"{where} is not the manifest of an Isthmus corpus; prepare it again")
    if version != VERSION:
        raise ConfigError(f"{where} is {kind} {version!s:.20}; this Isthmus reads {FORMAT} {VERSION}")
    try:
        return replace(checked(fields), digest=hashlib.sha256(data).hexdigest())
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} is damaged ({error!s:.200}); prepare the corpus again") from error


def read_fields(path: Path) -> dict[str, Any]:
    """A JSON object of a bounded size."""
    return parse_fields(reading.read_bytes(path, MAX_JSON_BYTES), str(path))


def parse_fields(data: bytes, where: str) -> dict[str, Any]:
    fields = reading.parse_json(data, where)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is not a JSON object; prepare the corpus again")
    return fields


def checked(fields: Mapping[str, Any]) -> Manifest:
    """The manifest whose fields these are; KeyError, TypeError or ValueError where they make no sense."""
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in ID_BYTES:
        raise ValueError(f"dtype is {dtype!r:.40}; token ids are {' or '.join(ID_BYTES)}")
    vocab_size = whole(fields, "vocab_size", 1, 1 << (8 * ID_BYTES[dtype]))
    sources, arguments = fields["sources"], fields["arguments"]
    if not isinstance(sources, list) or not all(
        isinstance(source, dict) and isinstance(source.get("name"), str) for source in sources
    ):
        raise ValueError("sources is not a list of named files")
    if not isinstance(arguments, dict):
        raise ValueError("arguments is not an object")
    return Manifest(
        vocab_size=vocab_size,
        dtype=dtype,
        end_token=words(fields, "end_token"),
        end_id=whole(fields, "end_id", 0, vocab_size - 1),
        tokenizer_sha256=words(fields, "tokenizer_sha256", SHA256),
        train=checked_split(fields["train"], "train"),
        validation=checked_split(fields["validation"], "validation"),
        sources=sources,
        arguments=arguments,
        fingerprint=words(fields, "fingerprint"),
    )


def checked_split(fields: Mapping[str, Any], name: str) -> Split:
    shards = checked_shards(fields["shards"], name)
    split = Split(
        tokens=whole(fields, "tokens", 1),
        documents=whole(fields, "documents"),
        bytes=whole(fields, "bytes"),
        shards=shards,
    )
    if split.tokens != sum(shard.tokens for shard in shards):
        raise ValueError(f"{name} has {split.tokens} tokens, and its shards have others")
    return split


def checked_shards(listed: Any, split: str) -> list[Shard]:
    """Shards have the names that we give them, so none of them can lie anywhere else."""
    if not isinstance(listed, list):
        raise ValueError(f"the shards of {split} are not a list")
    shards = []
    for number, fields in enumerate(listed):
        if words(fields, "name") != shard_name(split, number):
            raise ValueError(
                f"a shard is named {fields['name']!r:.80}; here it is {shard_name(split, number)}"
            )
        tokens, documents = whole(fields, "tokens", 1), whole(fields, "documents")
        shards.append(Shard(fields["name"], tokens, documents, words(fields, "sha256", SHA256)))
    return shards


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def whole(fields: Mapping[str, Any], key: str, low: int = 0, high: int = MAX_COUNT) -> int:
    value = fields[key]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is {value!r:.40}; it is a whole number of {low} to {high}")
    return value


def words(fields: Mapping[str, Any], key: str, form: re.Pattern[str] | None = None) -> str:
    value = fields[key]
    if not isinstance(value, str) or len(value) > 1024 or (form is not None and not form.fullmatch(value)):
        raise ValueError(f"{key} is {value!r:.80}")
    return value


def file_sha256(path: Path) -> str:
    with reading.open_regular(path, follow=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
