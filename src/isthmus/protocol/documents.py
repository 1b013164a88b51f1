"""The documents of a run: their schemas, and as types what run.json fixes and commits and manifests list."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.config import Recipe
from isthmus.config.fleet import MOST_BATCH, MOST_STAGES
from isthmus.protocol.schema import (
    HASH,
    HASH_OR_NONE,
    MOST_SECONDS,
    NAME,
    SECONDS,
    Anything,
    Many,
    Number,
    Optional,
    Row,
    Table,
    Text,
    Whole,
    check,
)
from isthmus.runlog.facts import Facts

MOST_REPLICAS = 4096  # of a run
MOST_ROUNDS = 10**6
MOST_ROOM = 16  # numbers of stages, beside those of the recipe, that updates are cut for
MOST_SHARDS = 4096  # of an update
MOST_EPOCHS = 10_000  # changes of a run's membership
MOST_CHANGES = 16  # replicas that one of them admits, or whose keys it replaces
MOST_UNIX_SECONDS = 2**40
MOST_REASON = 300  # characters of why an update was refused
MOST_SCORE = 1e6  # nats
ROUND = Whole(0, MOST_ROUNDS)
EPOCH = Whole(0, MOST_EPOCHS)
RUN = {
    "format": Whole(1, 1),
    "run_id": Text(32, "[0-9a-f]{32}"),
    "recipe": Text(2**20),
    "keys": Table(HASH, MOST_REPLICAS, 1),
    "closers": Many(NAME, MOST_REPLICAS, 1),
    "corpus": HASH_OR_NONE,
    "start": Optional(HASH_OR_NONE),
    "commits_in_manifests": Optional(Whole(0, 1)),
    "commits_by_round": Optional(Whole(0, 1)),
    "owner": Optional(HASH_OR_NONE),
    "room": Optional(Many(Whole(2, MOST_STAGES), MOST_ROOM)),
    "scores": Optional(Whole(0, 1)),
}
UPDATE = {
    "replica": NAME,
    "shards": Many(Row((Whole(0, MOST_SHARDS), HASH, Whole(0, 2**50))), MOST_SHARDS, 1),
    "norm": Number(0.0, 1e300),
    "facts": Anything(),
}
COMMIT = UPDATE | {"round": ROUND, "anchor": HASH_OR_NONE, "incarnation": Text(64)}
MANIFEST = {
    "round": ROUND,
    "previous": HASH,
    "anchor": HASH_OR_NONE,
    "entries": Many(UPDATE | {"commit": Optional(Anything())}, MOST_REPLICAS, 1),
    "refused": Many(Row((NAME, Text(MOST_REASON))), MOST_REPLICAS),
    "members": Many(NAME, MOST_REPLICAS),
    "deadline_seconds": Number(0.0, MOST_SECONDS),
    "seconds": SECONDS,
    "epoch": Optional(EPOCH),
    "next_epoch": Optional(EPOCH),
    "membership": Optional(HASH_OR_NONE),
    "dealt": Optional(Whole(0, 2**60)),
    "dealt_rest": Optional(Whole(0, MOST_BATCH - 1)),
    "scores": Optional(Many(Row((NAME, Number(-MOST_SCORE, MOST_SCORE))), MOST_REPLICAS)),
    "probation": Optional(Table(Whole(0, MOST_ROUNDS), MOST_REPLICAS)),
}
PAIR = {"invitation": Anything(), "request": Anything()}  # of an admission
MEMBERSHIP = {
    "number": EPOCH,
    "previous": HASH,
    "written": Whole(0, MOST_UNIX_SECONDS),
    "admitted": Many(PAIR, MOST_CHANGES),
    "rotated": Many(Anything(), MOST_CHANGES),
    "revoked": Many(NAME, MOST_REPLICAS),
    "closers": Many(NAME, MOST_REPLICAS),
    "rounds": ROUND,
}
INVITATION = {
    "name": NAME,
    "table": Anything(),
    "key": HASH,
    "expires": Whole(0, MOST_UNIX_SECONDS),
    "after": EPOCH,
    "closes": Whole(0, 1),
}
REQUEST = {"name": NAME, "key": HASH}
ROTATION = {"name": NAME, "key": HASH, "old": HASH}
REPAIR = {"first": ROUND, "last": ROUND, "digest": HASH, "manifest": HASH, "reason": Text(MOST_REASON)}
MOST_WANTED = 256  # shards that one process asks for at a time
WANTED = {"round": ROUND, "shards": Many(HASH, MOST_WANTED)}
ANCHOR = {"round": ROUND, "digest": HASH, "files": Many(HASH, MOST_SHARDS, 1), "manifest": HASH}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run: as run.json fixes it, or as an epoch of its membership has it."""

    run_id: str
    recipe: Recipe
    keys: Mapping[str, str]  # replica -> public key
    closers: tuple[str, ...]  # in the order in which they step in
    digest: str  # of run.json itself: the first manifest is chained to it, and key files name it
    corpus: str = ""  # digest of the text, where `init` had it: all must train on the same
    start: str = ""  # digest of theta^(0) where it is an anchor in the bucket; else the seed draws it
    commits_in_manifests: bool = False  # nothing counts without its author's commit; not in runs up to 0.2
    commits_by_round: bool = False  # in commits/<t>/, where one listing finds them all; not in runs up to 0.2
    owner: str = ""  # public key of who may change the membership; older runs have none, and do not change
    room: tuple[int, ...] = ()  # numbers of stages that later replicas may have, beside those of the recipe
    scores: bool = False  # updates are scored, as the recipe says; not in runs that were made before that
    epoch: int = 0  # of the membership; run.json is 0
    first: "RunInfo | None" = None  # epoch 0, where this is a later one


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
    commit: bytes = b""  # as its author signed it: what a closer lists is the author's word, not the closer's
    proved: bool = False  # by such a commit, which was checked when the manifest was read

    def to_dict(self) -> dict[str, Any]:
        body = {
            "replica": self.replica,
            "shards": [[shard.index, shard.digest, shard.size] for shard in self.shards],
            "norm": self.norm,
            "facts": self.facts.to_dict(),
        }
        return body | {"commit": json.loads(self.commit)} if self.commit else body

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> "Entry":
        """Of a commit or of a manifest's entry that has passed its schema; without the commit in it."""
        shards = tuple(Shard(*row) for row in body["shards"])
        return cls(body["replica"], shards, float(body["norm"]), Facts.from_dict(body["facts"]))


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
    previous: str = ""  # digest of the manifest before
    epoch: int = 0  # of the membership, in this round
    next_epoch: int = 0  # in the round after it
    membership: str = ""  # digest of that epoch's document, in runs that have an owner
    # What was dealt of the run's order up to this round, read or not; in such runs. In batches of inner.batch
    # sequences, and sequences beside them, where replicas have batches of their own.
    dealt: int = 0
    dealt_rest: int = 0
    scores: tuple[tuple[str, float], ...] = ()  # (replica, score) of the updates that the closer scored
    probation: Mapping[str, int] = field(default_factory=dict)  # of the next round: replica -> rounds passed

    def to_dict(self, previous: str) -> dict[str, Any]:
        """The body that is signed; `previous` is the digest of the manifest before."""
        return {
            "round": self.round,
            "previous": previous,
            "anchor": self.anchor,
            "entries": [entry.to_dict() for entry in self.entries],
            "refused": [[name, reason[:MOST_REASON]] for name, reason in self.refused],
            "members": list(self.members),
            "deadline_seconds": self.deadline_seconds,
            "seconds": self.seconds,
            "epoch": self.epoch,
            "next_epoch": self.next_epoch,
            "membership": self.membership,
            "dealt": self.dealt,
            **({"dealt_rest": self.dealt_rest} if self.dealt_rest else {}),
            "scores": [[name, score] for name, score in self.scores],
            "probation": dict(self.probation),
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any], closer: str, digest: str) -> "Manifest":
        """Refused unless the body is a manifest's."""
        check(body, MANIFEST)
        return cls(
            round=body["round"],
            anchor=body["anchor"],
            entries=tuple(map(Entry.from_dict, body["entries"])),
            refused=tuple((name, reason) for name, reason in body["refused"]),
            members=tuple(body["members"]),
            deadline_seconds=float(body["deadline_seconds"]),
            seconds=float(body["seconds"]),
            closer=closer,
            digest=digest,
            previous=body["previous"],
            epoch=body.get("epoch", 0),
            next_epoch=body.get("next_epoch", 0),
            membership=body.get("membership", ""),
            dealt=body.get("dealt", 0),
            dealt_rest=body.get("dealt_rest", 0),
            scores=tuple((name, float(score)) for name, score in body.get("scores", ())),
            probation=dict(body.get("probation", {})),
        )

    def entry(self, replica: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.replica == replica), None)
