"""manifest.json: what a corpus holds. It is written last, so a folder without one is not a corpus."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.errors import ConfigError

FORMAT = "isthmus-corpus"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
JOURNAL = "progress.json"


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

    @property
    def shards(self) -> list[Shard]:
        return [*self.train.shards, *self.validation.shards]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared corpus. Where there is none, the error says how to make one."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / JOURNAL).is_file():
            raise ConfigError(
                f"{folder} is an unfinished corpus; run its `isthmus data prepare` again to finish it"
            )
        raise ConfigError(
            f"there is no corpus in {folder}; make one with `isthmus data prepare TEXT --to {folder}`"
            ' or use "builtin:sample"'
        )
    try:
        fields = json.loads(path.read_bytes())
        kind, version = fields.pop("format"), fields.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not the manifest of an Isthmus corpus; prepare it again") from None
    if (kind, version) != (FORMAT, VERSION):
        raise ConfigError(f"{path} is {kind} {version}; this Isthmus reads {FORMAT} {VERSION}")
    try:
        for name in ("train", "validation"):
            part = fields[name]
            fields[name] = Split(**part | {"shards": [Shard(**shard) for shard in part["shards"]]})
        return Manifest(**fields)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); prepare the corpus again") from error


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
