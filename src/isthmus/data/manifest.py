"""manifest.json: what a corpus holds. It is written last, so a folder without one is not a corpus.

A corpus may come from anywhere, so every number, name and type is checked once, here.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from isthmus import reading
from isthmus.errors import ConfigError

FORMAT = "isthmus-corpus"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
JOURNAL = "progress.json"
ID_BYTES = {"uint16": 2, "uint32": 4}  # the types of token ids; numpy sees no other name
MAX_JSON_BYTES = 64 << 20
SHA256 = re.compile("[0-9a-f]{64}")
# Tokens, documents or bytes of text
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Word = Annotated[str, msgspec.Meta(max_length=1024)]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of little-endian token ids."""

    name: str
    tokens: Positive
    documents: Count  # those that end in this shard
    sha256: Digest


@dataclass(frozen=True, slots=True)
class Split:
    """The train or validation part; `bytes` counts its text in UTF-8, for bits per byte."""

    tokens: Positive
    documents: Count
    bytes: Count
    shards: list[Shard]

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a corpus except its tokens."""

    vocab_size: Positive
    dtype: str
    end_token: Word
    end_id: Count
    tokenizer_sha256: Digest
    train: Split
    validation: Split
    sources: list[dict]
    arguments: dict
    fingerprint: Word  # of sources and arguments: equal fingerprints mean equal corpora
    digest: str = ""  # sha256 of the file that this was read from

    @property
    def shards(self) -> list[Shard]:
        return [*self.train.shards, *self.validation.shards]

    @property
    def tokens_sha256(self) -> str:
        """Digest of tokenizer and tokens: two machines with the same digest train on the same data."""
        return text_digest([self.tokenizer_sha256, *(shard.sha256 for shard in self.shards)])

    def to_json(self) -> str:
        fields = {"format": FORMAT, "version": VERSION} | asdict(self)
        del fields["digest"]
        return json.dumps(fields, indent=1) + "\n"

    def shard_bytes(self, shard: Shard) -> int:
        return shard.tokens * ID_BYTES[self.dtype]


def text_digest(parts: Iterable[str]) -> str:
    """Combine the sha256 of the tokenizer and of each shard."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared corpus. If it is missing, the error says how to make one."""
    path = folder / MANIFEST
    if not path.exists():  # also false for a dangling link
        if (folder / JOURNAL).is_file():
            raise ConfigError(
                f"{folder} is an unfinished corpus; run its `isthmus data prepare` again to finish it"
            )
        texts, to = "TEXT", folder
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):  # `prepare` would refuse
            texts, to = str(folder), beside(folder)
        raise ConfigError(
            f"there is no corpus in {folder}; make one with `isthmus data prepare {shlex.quote(texts)} --to "
            f"{shlex.quote(str(to))}`"
            ' or use "builtin:sample"'
        )
    try:
        data = reading.read_bytes(path, MAX_JSON_BYTES)
    except FileNotFoundError:  # a dangling link
        raise ConfigError(f"{path} leads nowhere; prepare the corpus again") from None
    return parse_manifest(data, str(path))


def beside(folder: Path) -> str:
    """Suggest a folder name for the corpus of these texts, also for `.`, `..` and `/`."""
    return os.path.normpath(folder / ".." / f"{folder.resolve().stem or 'my'}-corpus")


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest from a folder or a bucket."""
    fields = parse_fields(data, where)
    kind, version = fields.pop("format", None), fields.pop("version", None)
    if kind != FORMAT:
        raise ConfigError(f"{where} is not the manifest of an Isthmus corpus; prepare it again")
    if version != VERSION:
        raise ConfigError(f"{where} is {kind} {version!s:.20}; this Isthmus reads {FORMAT} {VERSION}")
    try:
        return replace(checked(fields), digest=hashlib.sha256(data).hexdigest())
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where} is damaged ({error!s:.200}); prepare the corpus again") from error


def parse_fields(data: bytes, where: str) -> dict[str, Any]:
    fields = reading.parse_json(data, where)
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is not a JSON object; prepare the corpus again")
    return fields


def checked(fields: Mapping[str, Any]) -> Manifest:
    """Build a manifest from its fields; KeyError, ValueError or ValidationError if they are invalid."""
    if (dtype := fields["dtype"]) not in list(ID_BYTES):
        raise ValueError(f"dtype is {dtype!r:.40}; token ids are {' or '.join(ID_BYTES)}")
    found = msgspec.convert(fields, Manifest)
    if found.vocab_size > 1 << (8 * ID_BYTES[dtype]) or found.end_id >= found.vocab_size:
        raise ValueError(f"vocab_size is {found.vocab_size} of {dtype}, and end_id {found.end_id}")
    if not all(isinstance(source.get("name"), str) for source in found.sources):
        raise ValueError("sources is not a list of named files")
    for name, split in (("train", found.train), ("validation", found.validation)):
        check_names(split.shards, name)
        if split.tokens != sum(shard.tokens for shard in split.shards):
            raise ValueError(f"{name} has {split.tokens} tokens, and its shards have others")
    return found


def check_names(shards: Iterable[Shard], split: str) -> None:
    """Check that shards have the names that we give them, so that no path leaves the folder."""
    for number, shard in enumerate(shards):
        if shard.name != (right := shard_name(split, number)):
            raise ValueError(f"a shard is named {shard.name!r:.80}; here it is {right}")


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def file_sha256(path: Path) -> str:
    with reading.open_regular(path, follow=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
