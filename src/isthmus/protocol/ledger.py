"""The bucket as the run's history: run.json, payloads and commits, manifests, anchors, heartbeats.

    run.json                                  the recipe, a 128-bit run id, who may contribute and close
    members/<replica>/live.json               heartbeat of the incarnation that runs now
    members/<replica>/waiting.json            what its launcher waits for while no worker runs
    payloads/<replica>/<t>/<shard>-<sha256>   one shard of one update
    commits/<t>/<replica>.json                signed, written last: without it nothing is delivered
    manifests/<t>.json                        which commits count in round t; only if absent, chained, signed
    anchors/<t>/<shard>.safetensors           theta^(t); complete.json last, with the digest

Round t takes theta^(t-1) to theta^(t), t = 1 .. R. Nothing read here is trusted before its signature, hash
and size are checked, and nothing is ever unpickled.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from isthmus.config import Recipe, dump_recipe, stored_recipe
from isthmus.errors import ConfigError, Unreachable
from isthmus.protocol.anchors import Anchors
from isthmus.protocol.cut import check_cut
from isthmus.protocol.documents import (
    FORMAT,
    OLDER,
    Entry,
    LeaveDocument,
    Manifest,
    RunDocument,
    RunInfo,
    Shard,
    Tensor,
    decode,
    encode,
    format_of,
)
from isthmus.protocol.heartbeat import WAITING, Heartbeat, fitting, silent_after
from isthmus.protocol.manifests import check_pinned
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, Signer, open_raw, sha256
from isthmus.store import Store, StoreRefused
from isthmus.store.together import together

if TYPE_CHECKING:
    from isthmus.store import Info

__all__ = ["Entry", "Ledger", "Manifest", "RunInfo", "Shard", "create_run", "read_run"]

MAX_HEARTBEAT_BYTES = 2**16

Beat = tuple[Heartbeat, float]  # with its write time by the store's clock


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


class Ledger(Anchors):
    """Reads and writes one run's documents, checking everything it reads."""

    # Heartbeats

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write our heartbeat; a waiting launcher's goes to its own file, since closers read the workers'."""
        sealed = self.signer.seal("heartbeat", self.run.run_id, fitting(heartbeat))
        name = WAITING if heartbeat.state == WAITING else "live"
        self.store.put(f"members/{self.signer.replica}/{name}.json", sealed, durable=False)

    def scan_heartbeats(self) -> "dict[tuple[str, str], Info]":
        """(replica, document name) -> write time and size, from one listing. If the folder is full of other
        objects, it makes two requests per replica instead."""
        keys = {(r, n): f"members/{r}/{n}.json" for r in sorted(self.names) for n in ("live", WAITING)}
        with suppress(StoreRefused):
            listed = self.store.scan("members", most=32 * len(self.names) + 1000)
            return {which: listed[key] for which, key in keys.items() if key in listed}
        found = together([partial(self.store.head, key) for key in keys.values()])
        return {which: info for which, info in zip(keys, found, strict=True) if info}

    def heartbeat(self, replica: str, name: str = "live", info: "Info | None" = None) -> Beat | None:
        """(the replica's last heartbeat, when it was written by the store's clock), or None. `info` is a
        fresh listing's entry for it."""
        key = f"members/{replica}/{name}.json"
        try:
            found = self.store.foreign(partial(self.store.get_dated, key, max_bytes=MAX_HEARTBEAT_BYTES))
            if found is None:
                return None
            signer, body = open_raw(found[0], "heartbeat", self.run.run_id, self.run.keys)
            heartbeat = decode(body, Heartbeat, "heartbeat")
        except (Refused, StoreRefused):  # an invalid heartbeat counts as none
            return None
        written = (info or found[1]).modified_unix_seconds
        return (heartbeat, written) if signer == replica else None

    def heartbeats(self, now: float) -> tuple[dict[str, Beat], dict[str, Beat]]:
        """(heartbeats of replicas, notes of waiting launchers), each by replica: one listing, and a request
        for each that counts. `now` is the store's time. Readers only."""
        written = self.scan_heartbeats()
        live = [name for name, kind in written if kind == "live"]
        found = together([partial(self.heartbeat, name, info=written[name, "live"]) for name in live])
        beats = {name: beat for name, beat in zip(live, found, strict=True) if beat}
        idle = [name for name, kind in written if kind == WAITING]
        ages = {name: beats[name][1] if name in beats else None for name in idle}
        waits = [partial(self.waiting, name, ages[name], now, written[name, WAITING]) for name in idle]
        return beats, {name: beat for name, beat in zip(idle, together(waits), strict=True) if beat}

    def waiting(
        self, replica: str, live_at: float | None, now: float, info: "Info | None" = None
    ) -> Beat | None:
        """What the replica's launcher waits for, and when it said so. None if a worker's heartbeat is newer
        or the note is old. Both times are the store's. Readers only."""
        every, silent = self.run.recipe.bucket.heartbeat_seconds, silent_after(self.run.recipe)
        if live_at is not None and now - live_at < 2 * every:  # a worker runs: make no further request
            return None
        if info is not None and info.modified_unix_seconds < (live_at or 0.0):
            return None
        found = self.heartbeat(replica, WAITING, info)
        if found is None or found[1] < (live_at or 0.0) or abs(now - found[1]) > silent:
            return None
        return found

    # Requests to leave

    def ask_to_leave(self, incarnation: str) -> None:
        """Ask this incarnation of our replica, wherever it runs, to leave at the end of its round."""
        sealed = self.signer.seal("leave", self.run.run_id, LeaveDocument(incarnation=incarnation))
        self.store.put(_leave_key(self.signer.replica, incarnation), sealed)

    def asked_to_leave(self, incarnation: str) -> bool:
        """Whether a holder of our key asked this incarnation to leave. Refused if anyone else did."""
        replica = self.signer.replica
        try:
            data = self._theirs(_leave_key(replica, incarnation), MAX_HEARTBEAT_BYTES)
        except StoreRefused as error:
            raise Refused(str(error)) from None
        if data is None:
            return False
        signer, body = open_raw(data, "leave", self.run.run_id, self.run.keys)
        if signer != replica or decode(body, LeaveDocument, "leave").incarnation != incarnation:
            raise Refused(f"the request is {signer}'s, or for another start")
        return True


def _leave_key(replica: str, incarnation: str) -> str:
    return f"members/{replica}/leave-{incarnation}"
