"""The bucket as the run's history: run.json, payloads and commits, manifests, anchors, heartbeats.

    run.json                                  the recipe, a 128-bit run id, who may contribute and close
    members/<replica>/live.json               heartbeat of the incarnation that runs now
    members/<replica>/waiting.json            what its supervisor waits for while no worker runs
    payloads/<replica>/<t>/<shard>-<sha256>   one shard of one update
    commits/<t>/<replica>.json                signed, written last: without it nothing is delivered
    manifests/<t>.json                        which commits count in round t; only if absent, chained, signed
    anchors/<t>/<shard>.safetensors           theta^(t); complete.json last, with the digest

Round t takes theta^(t-1) to theta^(t), t = 1 .. R. Nothing read here is trusted before its signature, hash
and size are checked, and nothing is ever unpickled.
"""

import os
from collections.abc import Mapping, Sequence

from isthmus.config import Recipe, dump_recipe, stored_recipe
from isthmus.errors import ConfigError, Unreachable
from isthmus.layout.deal import Deal
from isthmus.protocol.anchors import Anchors
from isthmus.protocol.cut import Cut, check_cut
from isthmus.protocol.documents import (
    FORMAT,
    OLDER,
    Entry,
    Manifest,
    RunDocument,
    RunInfo,
    Shard,
    Tensor,
    decode,
    encode,
    format_of,
)
from isthmus.protocol.heartbeat import Heartbeats
from isthmus.protocol.manifests import Manifests
from isthmus.protocol.membership import Epoch, Membership
from isthmus.protocol.objects import Objects, check_pinned
from isthmus.protocol.payloads import Payloads
from isthmus.protocol.shares import deal
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, Signer, sha256
from isthmus.store import Store, StoreRefused

__all__ = ["Entry", "Ledger", "Manifest", "RunInfo", "Shard", "create_run", "read_run"]


def run_document(
    recipe: Recipe,
    keys: Mapping[str, str],
    closers: Sequence[str],
    corpus: str = "",
    start: str = "",
    *,
    owner: str,
    room: Sequence[int] = (),
    tensors: Sequence[Tensor] = (),
    shard_bytes: int = 0,
    frozen: str = "",
) -> bytes:
    """The run.json of a new run. Every key file holds its sha256, so it is made before it is written. `owner`
    is the public key that signs membership changes."""
    return encode(
        RunDocument(
            format=FORMAT,
            run_id=os.urandom(16).hex(),
            recipe=dump_recipe(recipe, with_model=not tensors),
            keys=dict(keys),
            closers=tuple(closers),
            corpus=corpus,
            start=start,
            owner=owner,
            room=tuple(room),
            requires=("tensors",) if tensors else (),
            tensors=tuple(tensors),
            shard_bytes=shard_bytes,
            frozen=frozen,
        )
    )


def create_run(store: Store, document: bytes) -> RunInfo:
    """Write run.json; ConfigError names the run that is there already."""
    if not store.create("run.json", document):
        there = read_run(store)
        raise ConfigError(
            f'the bucket already holds the run "{there.recipe.name}" ({there.run_id}); give another URL'
        )
    return parse_run(document)


def read_run(store: Store, signer: Signer | None = None) -> RunInfo:
    """Read and check run.json. With a key, check its digest before anything in it."""
    try:
        data = store.get("run.json", max_bytes=MAX_DOCUMENT_BYTES)
    except StoreRefused as reason:
        raise ConfigError(f"run.json in this bucket is not one of ours: {reason}") from None
    if data is None:
        raise Unreachable("there is no run in this bucket; create one with `isthmus init RECIPE URL`")
    if signer:
        check_pinned(sha256(data), signer)
    return parse_run(data)


def parse_run(data: bytes) -> RunInfo:
    form = format_of(data)
    if form == 1:
        raise ConfigError(f"{OLDER} (run.json)")
    if FORMAT < form < 1000:
        raise ConfigError(f"run.json is of format {form}; this Isthmus reads format {FORMAT}")
    try:
        stated = decode(data, RunDocument, "run.json")
        recipe = stored_recipe(stated.recipe, tensors=[(each.name, each.shape) for each in stated.tensors])
        if stated.keys.keys() != {member.name for member in recipe.fleet()}:
            raise Refused("its keys are not those of the recipe's replicas")
        if len(set(stated.closers)) < len(stated.closers) or not set(stated.closers) <= stated.keys.keys():
            raise Refused("its closers are not replicas of the recipe, once each")
        check_cut(stated, recipe)
    except Refused as reason:
        raise ConfigError(
            f"run.json in this bucket is not one of ours ({reason}); give the URL of a run"
        ) from None
    return RunInfo(
        stated.run_id,
        recipe,
        stated.keys,
        stated.closers,
        sha256(data),
        stated.corpus,
        stated.start,
        owner=stated.owner,
        room=stated.room,
        tensors=stated.tensors,
        shard_bytes=stated.shard_bytes,
        frozen=stated.frozen,
    )


class Ledger:
    """One run in its bucket. Its parts check everything they read; their methods are the ledger's own."""

    def __init__(self, store: Store, run: RunInfo, signer: Signer | None = None) -> None:
        """Without a key (`signer`) it only reads."""
        self.store, first = store, run.first or run
        self.objects, self.cut = Objects(store, first, signer), Cut(first)
        self.membership = Membership(store, run)
        self.manifests = Manifests(self.objects, self.membership, self.cut)
        self.payloads = Payloads(self.objects, self.manifests, self.cut)
        self.anchors = Anchors(self.objects, self.manifests, self.cut)
        self.beats = Heartbeats(self.objects, self.membership)

        self.sign_as = self.objects.sign_as
        # What is trained: every parameter's shape, the names in each shard, the bytes of each shard.
        self.shapes, self.shards, self.sizes = self.cut.shapes, self.cut.shards, self.cut.sizes
        # Who belongs to the run: the owner's documents, and the epochs of rounds.
        self.look, self.order = self.membership.look, self.membership.order
        self.at, self.epoch_of = self.manifests.at, self.manifests.epoch_of
        self.first_round_of = self.manifests.first_round_of
        # What counts: the chain of manifests.
        self.manifest, self.settled = self.manifests.manifest, self.manifests.settled
        self.known, self.between = self.manifests.known, self.manifests.between
        self.last_round, self.settled_at = self.manifests.last_round, self.manifests.settled_at
        self.create_manifest, self.check_confirmed = self.manifests.create, self.manifests.check_confirmed
        # What replicas gave: shards and commits.
        self.put_shard, self.get_shard = self.payloads.put_shard, self.payloads.get_shard
        self.has_shard, self.has_payloads = self.payloads.has_shard, self.payloads.has_payloads
        self.commit, self.get_commit = self.payloads.commit, self.payloads.get_commit
        self.check_commit = self.payloads.check_commit
        self.committed, self.scan_commits = self.payloads.committed, self.payloads.scan_commits
        # Whole models.
        self.put_anchor_shard, self.complete_anchor = (
            self.anchors.put_anchor_shard,
            self.anchors.complete_anchor,
        )
        self.has_anchor, self.is_whole = self.anchors.has_anchor, self.anchors.is_whole
        self.is_believed, self.believed_anchors = self.anchors.is_believed, self.anchors.believed_anchors
        self.anchor_rounds, self.anchors_down = self.anchors.anchor_rounds, self.anchors.anchors_down
        self.anchor_header, self.read_anchor = self.anchors.anchor_header, self.anchors.read_anchor
        # Who lives, and who is asked to leave.
        self.beat, self.heartbeat = self.beats.beat, self.beats.heartbeat
        self.heartbeats, self.scan_heartbeats = self.beats.heartbeats, self.beats.scan
        self.ask_to_leave, self.asked_to_leave = self.beats.ask_to_leave, self.beats.asked_to_leave

    @property
    def signer(self) -> Signer:
        return self.objects.signer

    @property
    def run(self) -> RunInfo:
        """The run by the newest epoch that was read. Use `at` for anything that belongs to a round."""
        return self.membership.run

    @property
    def epoch(self) -> Epoch:
        """The newest epoch that was read."""
        return self.membership.newest

    @property
    def epochs(self) -> list[Epoch]:
        """All epochs that were read; run.json is the first."""
        return self.membership.epochs

    @property
    def odd(self) -> str:
        """Why the owner's next document exists but does not count, as `look` found; empty if all is well."""
        return self.membership.odd

    @property
    def names(self) -> frozenset[str]:
        """All replicas that ever belonged to the run, in the epochs read so far."""
        return self.membership.names

    def deal(self, round_number: int, replica: str) -> Deal | None:
        """The replica's batches in a round; None if it has no share of the data."""
        run = self.at(round_number)
        before = self.manifest(round_number - 1) if round_number > 1 else None
        return deal(run, round_number, replica, before)

    def revoked(self, replica: str, last: int) -> str:
        """The message for a replica that the owner revoked before round `last`."""
        round_number = self.first_round_of(self.epoch.ended.get(replica, 0), 1, last) - 1
        return f"{replica}: you were revoked by the owner in round {round_number}"
