"""The documents of a run as types: what run.json fixes, and what commits and manifests list."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.config import Recipe
from isthmus.protocol.trust import Refused
from isthmus.runlog.facts import Facts


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What run.json fixes for good."""

    run_id: str
    recipe: Recipe
    keys: Mapping[str, str]  # replica -> public key
    closers: tuple[str, ...]  # in the order in which they step in
    digest: str  # of run.json itself: the first manifest is chained to it
    corpus: str = ""  # digest of the text, where `init` had it: all must train on the same
    start: str = ""  # digest of theta^(0) where it is an anchor in the bucket; else the seed draws it


@dataclass(frozen=True, slots=True)
class Shard:
    index: int
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One contribution as a manifest lists it."""

    replica: str
    shards: tuple[Shard, ...]
    norm: float = 0.0  # measured by the closer
    facts: Facts = field(default_factory=Facts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "replica": self.replica,
            "shards": [[shard.index, shard.digest, shard.size] for shard in self.shards],
            "norm": self.norm,
            "facts": self.facts.to_dict(),
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Entry":
        try:
            shards = tuple(Shard(int(i), str(digest), int(size)) for i, digest, size in body["shards"])
            if not all(re.fullmatch("[0-9a-f]{64}", shard.digest) for shard in shards):
                raise ValueError
            facts = Facts.from_dict(dict(body["facts"]))
            return cls(str(body["replica"]), shards, float(body["norm"]), facts)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise Refused("the commit is malformed") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Round `round` as it is settled for everyone."""

    round: int
    anchor: str  # digest of theta^(round - 1)
    entries: tuple[Entry, ...]
    refused: tuple[tuple[str, str], ...]  # (replica, reason)
    members: tuple[str, ...]  # whom the next round waits for
    deadline_seconds: float  # of the next round
    seconds: float  # by the store's clock, since the manifest before
    closer: str = ""  # who signed it
    digest: str = ""  # of the manifest as stored

    def to_dict(self, previous: str) -> dict[str, Any]:
        """The body that is signed; `previous` is the digest of the manifest before."""
        return {
            "round": self.round,
            "previous": previous,
            "anchor": self.anchor,
            "entries": [entry.to_dict() for entry in self.entries],
            "refused": self.refused,
            "members": self.members,
            "deadline_seconds": self.deadline_seconds,
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any], closer: str, digest: str) -> "Manifest":
        return cls(
            round=int(body["round"]),
            anchor=str(body["anchor"]),
            entries=tuple(map(Entry.from_dict, body["entries"])),
            refused=tuple((str(name), str(reason)) for name, reason in body["refused"]),
            members=tuple(str(name) for name in body["members"]),
            deadline_seconds=float(body["deadline_seconds"]),
            seconds=float(body["seconds"]),
            closer=closer,
            digest=digest,
        )

    def entry(self, replica: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.replica == replica), None)
