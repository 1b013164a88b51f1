"""The documents of a run as types: their fields, and the limits that msgspec checks on reading.

Fields with their default value are omitted. A reader ignores fields that it does not know, but refuses a
document that lists an unknown name in `requires`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from isthmus.config import Recipe
from isthmus.config.fleet import MOST_BATCH, MOST_STAGES
from isthmus.protocol.trust import Refused
from isthmus.runlog.facts import MAX_WORD, Facts

FORMAT = 2
OLDER = "this run was made by isthmus 0.2 or before; train or export it there"
KNOWN = frozenset({"tensors"})  # what a document may require of this version
MOST_REPLICAS = 4096  # in a run
MOST_ROUNDS = 10**6
MOST_ROOM = 16  # further numbers of stages that updates are cut for
MOST_SHARDS = 4096  # per update
MOST_TENSORS = 2**16
MOST_EPOCHS = 10_000  # changes of a run's membership
MOST_CHANGES = 16  # replicas that one change admits
MOST_SECONDS = 1e9
MOST_WORDS = 300  # characters of the reason for a refusal
MOST_ADDRESSES = 8  # per stage
Round = Annotated[int, Meta(ge=0, le=MOST_ROUNDS)]
EpochNumber = Annotated[int, Meta(ge=0, le=MOST_EPOCHS)]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
HashOrNone = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
Name = Annotated[str, Meta(pattern=r"^[\w-]{1,100}\Z")]  # of a replica: part of keys and paths
Code = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")]
Start = Annotated[str, Meta(pattern=r"^[\w-]{0,64}\Z")]  # an incarnation
Seconds = Annotated[float, Meta(ge=-MOST_SECONDS, le=MOST_SECONDS)]  # two clocks may differ
Bytes = Annotated[int, Meta(ge=0, le=2**50)]
Address = Annotated[
    str,
    Meta(max_length=300, pattern=r"^(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}\Z"),
]


class Document(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that every document may hold."""

    requires: Annotated[tuple[Code, ...], Meta(max_length=16)] = ()


class _Format(Struct):
    format: int = 0


class Tensor(Struct, frozen=True, array_like=True):
    """One parameter of a run that states its tensors itself."""

    name: Annotated[str, Meta(pattern=r"^[\w.:\[\]-]{1,300}\Z")]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**31 - 1)], ...], Meta(max_length=8)]
    dtype: Literal["float64", "float32", "bfloat16", "float16"]


class RunDocument(Document, frozen=True, kw_only=True):
    """run.json. It is not signed: key files name its hash."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    run_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    recipe: Annotated[str, Meta(max_length=2**20)]  # resolved, as TOML
    keys: Annotated[dict[Name, Hash], Meta(min_length=1, max_length=MOST_REPLICAS)]
    closers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MOST_REPLICAS)]
    owner: Hash  # public key of the owner, who may change the membership
    corpus: HashOrNone = ""  # digest of the text; "": each replica brings its own data
    start: HashOrNone = ""  # digest of theta^(0) if it is an anchor in the bucket
    room: Annotated[tuple[Annotated[int, Meta(ge=2, le=MOST_STAGES)], ...], Meta(max_length=MOST_ROOM)] = ()
    # For a run of named tensors, which requires "tensors": its parameters, which replace the recipe's
    # [model], and the most bytes that one shard holds.
    tensors: Annotated[tuple[Tensor, ...], Meta(max_length=MOST_TENSORS)] = ()
    shard_bytes: Bytes = 0
    frozen: HashOrNone = ""  # digest of the parameters that nobody trains, which are not sent
    # Reserved for later versions. "kept": the share of its own progress that a replica keeps at the end of a
    # round; "overlap": inner steps that it trains while the round's update is in transit.
    kept_progress: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    overlap_steps: Annotated[int, Meta(ge=0, le=MOST_ROUNDS)] = 0


class Shard(Struct, frozen=True, array_like=True):
    index: Annotated[int, Meta(ge=0, le=MOST_SHARDS)]
    digest: Hash
    size: Bytes


Shards = Annotated[tuple[Shard, ...], Meta(max_length=MOST_SHARDS)]


class Commit(Document, frozen=True, kw_only=True):
    """A replica's contribution to a round. With a `skip` and no shards, it states that it gives nothing."""

    round: Round
    anchor: HashOrNone  # digest of theta^(round - 1) as the replica holds it
    incarnation: Start
    shards: Shards = ()
    skip: Annotated[str, Meta(pattern=r"^[a-z_]{0,32}\Z")] = ""  # code of the reason
    facts: Facts = Facts()


class Entry(Struct, frozen=True, omit_defaults=True):
    """One contribution as a manifest lists it."""

    replica: Name
    shards: Shards
    norm: Annotated[float, Meta(ge=0.0, le=1e300)] = 0.0  # measured by the closer
    facts: Facts = Facts()
    incarnation: Start = ""  # the start that committed it


class Skip(Struct, frozen=True, array_like=True):
    """A replica that stated that it gives nothing to a round."""

    replica: Name
    code: Code


class Refusal(Struct, frozen=True, array_like=True):
    """A replica whose commit does not count: a code for programs, words for people."""

    replica: Name
    code: Code
    words: Annotated[str, Meta(max_length=MOST_WORDS)]


class Manifest(Document, frozen=True, kw_only=True, rename={"refusals": "refused"}):
    """The settled result of round `round`, the same for everyone."""

    round: Round
    anchor: HashOrNone  # digest of theta^(round - 1)
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MOST_REPLICAS)]
    members: Annotated[tuple[Name, ...], Meta(max_length=MOST_REPLICAS)]  # awaited in the next round
    dealt_in: Annotated[tuple[Name, ...], Meta(max_length=MOST_REPLICAS)]  # for the next round's data
    deadline_seconds: Annotated[float, Meta(ge=0.0, le=MOST_SECONDS)]  # of the next round
    seconds: Seconds  # by the store's clock, since the manifest before
    previous: HashOrNone = ""  # digest of the previous manifest; of run.json for round 1
    skipped: Annotated[tuple[Skip, ...], Meta(max_length=MOST_REPLICAS)] = ()
    refusals: Annotated[tuple[Refusal, ...], Meta(max_length=MOST_REPLICAS)] = ()
    epoch: EpochNumber = 0  # of the membership in this round
    next_epoch: EpochNumber = 0  # of the membership in the next round
    membership: HashOrNone = ""  # digest of that epoch's document
    # Samples of the run's order assigned up to this round, read or not: in batches of inner.batch sequences,
    # plus remaining sequences where replicas have batches of their own.
    dealt: Annotated[int, Meta(ge=0, le=2**60)] = 0
    dealt_rest: Annotated[int, Meta(ge=0, le=MOST_BATCH - 1)] = 0
    clipped: Annotated[tuple[Name, ...], Meta(max_length=2)] = ()  # scaled to three times their usual norm
    # Reserved for later versions, which require "published" for it: one update per shard that all replicas
    # apply in place of the entries' updates.
    published: Shards = ()
    # Set on reading; never written.
    closer: str = ""  # the replica that signed it
    digest: str = ""  # of the manifest as stored

    @property
    def answered(self) -> set[str]:
        """Replicas that gave, counted or refused, or that skipped."""
        return {each.replica for each in (*self.entries, *self.refusals, *self.skipped)}

    def entry(self, replica: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.replica == replica), None)

    def refusal(self, replica: str) -> Refusal | None:
        return next((each for each in self.refusals if each.replica == replica), None)

    @property
    def skips(self) -> dict[str, str]:
        """replica -> code."""
        return {each.replica: each.code for each in self.skipped}

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """(replica, words) of all that answered and do not count."""
        said = [(each.replica, f"it gave nothing ({each.code})") for each in self.skipped]
        return (*((each.replica, each.words) for each in self.refusals), *said)


class EpochsOfManifest(Struct, frozen=True, kw_only=True):
    """The epochs of a manifest, read before its signature: they name the keys that check it."""

    epoch: EpochNumber = 0
    next_epoch: EpochNumber = 0


class AnchorDocument(Document, frozen=True, kw_only=True):
    """anchors/<t>/complete.json."""

    round: Round
    digest: Hash  # of theta^(round)
    files: Annotated[tuple[Hash, ...], Meta(min_length=1, max_length=MOST_SHARDS)]
    manifest: Hash  # digest of the round's manifest as stored; of run.json for 0: the history it belongs to


class Admitted(Struct, frozen=True, omit_defaults=True):
    """A new replica, as the owner's document names it."""

    name: Name
    key: Hash  # public
    table: dict[str, Any]  # its kind, stages and links: see `membership.table_of`
    closes: bool = False


class MembershipDocument(Document, frozen=True, kw_only=True):
    """membership/<n>.json: what epoch n changes of epoch n - 1."""

    number: EpochNumber
    previous: Hash  # of the previous document; of run.json for 1
    admitted: Annotated[tuple[Admitted, ...], Meta(max_length=MOST_CHANGES)] = ()
    revoked: Annotated[tuple[Name, ...], Meta(max_length=MOST_REPLICAS)] = ()
    closers: Annotated[tuple[Name, ...], Meta(max_length=MOST_REPLICAS)] = ()  # the complete list
    rounds: Round = 0  # of the whole run from now on; 0: as before


class LeaveDocument(Document, frozen=True, kw_only=True):
    incarnation: Start


class StageDocument(Document, frozen=True, kw_only=True):
    """What the process that holds a stage states about itself."""

    stage: Annotated[int, Meta(ge=0, le=MOST_STAGES - 1)]
    start: Annotated[int, Meta(ge=1, le=2**53)]  # larger than in every earlier start
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MOST_ADDRESSES)] = ()  # empty: unreachable
    secured: bool = True  # links use TLS; false with --trust-network
    last_error: Annotated[str, Meta(max_length=MAX_WORD)] = ""


T = TypeVar("T", bound=Struct)


def encode(document: Struct) -> bytes:
    return msgspec.json.encode(document)


def decode(data: bytes, kind: type[T], name: str) -> T:
    """Decode a document; Refused, with the field's name, if it is malformed or requires anything unknown."""
    try:
        document = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_required(_required(data), name)
        raise Refused(f"the {name} is malformed: {error!s:.200}") from None
    if isinstance(document, Document):
        _check_required(document.requires, name)
    return document


def format_of(data: bytes) -> int:
    """The format that run.json states; 0 if it states none."""
    try:
        return msgspec.json.decode(data, type=_Format).format
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0


def _required(data: bytes) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(data, type=Document).requires
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ()


def _check_required(names: tuple[str, ...], name: str) -> None:
    if unknown := sorted(set(names) - KNOWN):
        raise Refused(
            f'the {name} requires "{unknown[0]}", which this Isthmus does not know; use a newer one'
        )


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run, as run.json or a later epoch of its membership defines it."""

    run_id: str
    recipe: Recipe
    keys: Mapping[str, str]  # replica -> public key
    closers: tuple[str, ...]  # in the order of their turns
    digest: str  # of run.json itself: the first manifest is chained to it, and key files name it
    corpus: str = ""  # digest of the text if `init` had it: all must train on the same
    start: str = ""  # digest of theta^(0) if it is an anchor in the bucket; else the seed draws it
    owner: str = ""  # public key of the owner, who may change the membership
    room: tuple[int, ...] = ()  # further numbers of stages that later replicas may have
    epoch: int = 0  # of the membership; run.json is 0
    first: "RunInfo | None" = None  # epoch 0, if this is a later one
    tensors: tuple[Tensor, ...] = ()  # if the run states its parameters itself
    shard_bytes: int = 0
    frozen: str = ""  # digest of its frozen parameters
