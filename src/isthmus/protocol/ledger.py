"""The bucket as the run's history: run.json, payloads and commits, manifests, anchors, heartbeats.

    run.json                                  the recipe, a 128-bit run id, who may contribute and close
    members/<replica>/live.json               heartbeat of the incarnation that runs now
    members/<replica>/waiting.json            what its launcher waits for while none runs; nobody waits for it
    payloads/<replica>/<t>/<shard>-<sha256>   one shard of one update
    commits/<t>/<replica>.json                written last and signed; no commit, not delivered
    manifests/<t>.json                        which commits count in round t; only if absent, chained, signed
    anchors/<t>/<shard>.safetensors           theta^(t); complete.json last, with the digest

Round t takes theta^(t-1) to theta^(t), t = 1 .. R. Nothing read here is trusted before its signature, hash
and size are checked, and nothing is ever unpickled.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from isthmus.config import Recipe, dump_recipe, stored_recipe
from isthmus.errors import ConfigError, Unreachable
from isthmus.protocol.anchors import Anchors
from isthmus.protocol.chain import check_pinned
from isthmus.protocol.documents import RUN, Entry, Manifest, RunInfo, Shard
from isthmus.protocol.heartbeat import WAITING, Heartbeat, silent_after
from isthmus.protocol.history import LISTED, MOST_CLAIMS
from isthmus.protocol.schema import check
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, Signer, canonical, open_sealed, sha256
from isthmus.reading import parse_json
from isthmus.store import Store, StoreRefused
from isthmus.store.together import together

if TYPE_CHECKING:
    from isthmus.store import Info

__all__ = ["Entry", "Ledger", "Manifest", "RunInfo", "Shard", "create_run", "read_run"]

FORMAT = 1
MAX_HEARTBEAT_BYTES = 2**16

Beat = tuple[Heartbeat, float]  # and when it was written, by the store's clock


def run_document(
    recipe: Recipe,
    keys: Mapping[str, str],
    closers: Sequence[str],
    corpus: str = "",
    start: str = "",
    owner: str = "",
    room: Sequence[int] = (),
) -> bytes:
    """run.json of a new run. Its sha256 is in every key file, so it is made before it is written. `owner` is
    the public key by which the membership can change."""
    body = {
        "format": FORMAT,
        "run_id": os.urandom(16).hex(),
        "recipe": dump_recipe(recipe),
        "keys": dict(keys),
        "closers": list(closers),
        "corpus": corpus,
        "start": start,
        "commits_in_manifests": 1,
        "commits_by_round": 1,
        "scores": 1,
        "owner": owner,
        "room": list(room),
    }
    return canonical(body)


def create_run(store: Store, document: bytes) -> RunInfo:
    """Write run.json, or say whose run is there already."""
    if not store.create("run.json", document):
        there = read_run(store)
        raise ConfigError(
            f'the bucket already holds the run "{there.recipe.name}" ({there.run_id}); give another URL'
        )
    return parse_run(document)


def read_run(store: Store, signer: Signer | None = None) -> RunInfo:
    """run.json, checked; with a key, its digest before anything in it."""
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
    body: Any = parse_json(data, "run.json in this bucket")
    if isinstance(body, dict) and isinstance(form := body.get("format"), int) and FORMAT < form < 1000:
        raise ConfigError(f"run.json is of format {form}; this Isthmus reads format {FORMAT}")
    try:
        check(body, RUN)
        keys, closers = dict(body["keys"]), tuple(body["closers"])
        recipe = stored_recipe(body["recipe"])
        if keys.keys() != {member.name for member in recipe.fleet()}:
            raise Refused("its keys are not those of the recipe's replicas")
        if any(stages > recipe.model.layers for stages in body.get("room", ())):
            raise Refused("it has room for more stages than the model has layers")
        if len(set(closers)) < len(closers) or not set(closers) <= keys.keys():
            raise Refused("its closers are not replicas of the recipe, once each")
    except Refused as reason:
        raise ConfigError(
            f"run.json in this bucket is not one of ours ({reason}); give the URL of a run"
        ) from None
    return RunInfo(
        body["run_id"],
        recipe,
        keys,
        closers,
        sha256(data),
        body["corpus"],
        body.get("start", ""),  # older runs have none of these
        commits_in_manifests=bool(body.get("commits_in_manifests", 0)),
        commits_by_round=bool(body.get("commits_by_round", 0)),
        owner=body.get("owner", ""),
        room=tuple(body.get("room", ())),
        scores=bool(body.get("scores", 0)),
    )


class Ledger(Anchors):
    """Reads and writes one run's documents, checking all that it reads."""

    # Heartbeats

    def beat(self, heartbeat: Heartbeat) -> None:
        """A launcher that waits says so in a file of its own: closers go by the heartbeats of workers."""
        sealed = self.signer.seal("heartbeat", self.run.run_id, heartbeat.to_dict())
        name = WAITING if heartbeat.state == WAITING else "live"
        self.store.put(f"members/{self.signer.replica}/{name}.json", sealed, durable=False)

    def scan_heartbeats(self) -> "dict[tuple[str, str], Info]":
        """(replica, name of the document) -> when it was written and how long it is, by one listing; where
        somebody has filled the place with other objects, by two requests for each replica."""
        keys = {(r, n): f"members/{r}/{n}.json" for r in sorted(self.names) for n in ("live", WAITING)}
        with suppress(StoreRefused):
            listed = self.store.scan("members", most=32 * len(self.names) + 1000)
            return {which: listed[key] for which, key in keys.items() if key in listed}
        found = together([partial(self.store.head, key) for key in keys.values()])
        return {which: info for which, info in zip(keys, found, strict=True) if info}

    def heartbeat(self, replica: str, name: str = "live", info: "Info | None" = None) -> Beat | None:
        """(the replica's last heartbeat, when it was written by the store's clock), or None. `info` is what a
        listing has just said of it."""
        key = f"members/{replica}/{name}.json"
        try:
            found = self.store.foreign(partial(self.store.get_dated, key, max_bytes=MAX_HEARTBEAT_BYTES))
            if found is None:
                return None
            signer, body = self._open_heartbeat(found[0])
        except (Refused, StoreRefused):  # a heartbeat that breaks the rules counts as none
            return None
        written = (info or found[1]).modified_unix_seconds
        return (Heartbeat.from_dict(body), written) if signer == replica else None

    def _open_heartbeat(self, data: bytes) -> tuple[str, dict[str, Any]]:
        """By the newest keys; or by those of the open round: who replaces its key beats by the old one until
        it reads the manifest that names the new one."""
        run, before = self.run, self.known(self.newest)
        try:
            return open_sealed(data, "heartbeat", run.run_id, run.keys)
        except Refused:
            if before is None or before.next_epoch == self.membership.newest.number:
                raise
            keys = self.membership.epoch(before.next_epoch).run.keys
            return open_sealed(data, "heartbeat", run.run_id, keys)

    def heartbeats(self, now: float) -> tuple[dict[str, Beat], dict[str, Beat]]:
        """(of the replicas, of launchers that wait for something) by the replica's name: one listing, and a
        request for each that counts. `now` is the store's. Readers only."""
        written = self.scan_heartbeats()
        live = [name for name, kind in written if kind == "live"]
        found = together([partial(self.heartbeat, name, info=written[name, "live"]) for name in live])
        beats = {name: beat for name, beat in zip(live, found, strict=True) if beat}
        idle = [name for name, kind in written if kind == WAITING]
        ages = {name: beats[name][1] if name in beats else None for name in idle}
        waits = [partial(self.waiting, name, ages[name], now, written[name, WAITING]) for name in idle]
        return beats, {name: beat for name, beat in zip(idle, together(waits), strict=True) if beat}

    def last_round(self, claims: Iterable[int] | None = None) -> int:
        """See `History.last_round`. Who comes new asks the heartbeats written last how far the run is."""
        if claims is None and self.newest == 0 and self.run.recipe.outer.rounds > LISTED:
            beats = {name: info for (name, kind), info in self.scan_heartbeats().items() if kind == "live"}
            last = sorted(beats, key=lambda name: beats[name].modified_unix_seconds)[-MOST_CLAIMS:]
            heard = together([partial(self.heartbeat, name, info=beats[name]) for name in last])
            claims = [found[0].round for found in heard if found]
        return super().last_round(claims or ())

    def waiting(
        self, replica: str, live_at: float | None, now: float, info: "Info | None" = None
    ) -> Beat | None:
        """What the replica's launcher waits for, and when it said so: only where no worker's heartbeat has
        come since, and where it is not old itself. Both times are the store's. Readers only."""
        every, silent = self.run.recipe.bucket.heartbeat_seconds, silent_after(self.run.recipe)
        if live_at is not None and now - live_at < 2 * every:  # a worker is there: ask no more of the store
            return None
        if info is not None and info.modified_unix_seconds < (live_at or 0.0):
            return None
        found = self.heartbeat(replica, WAITING, info)
        if found is None or found[1] < (live_at or 0.0) or abs(now - found[1]) > silent:
            return None
        return found

    # Requests to leave

    def ask_to_leave(self, incarnation: str) -> None:
        """Ask our replica, wherever it runs, to leave at the end of its round; only this start of it."""
        sealed = self.signer.seal("leave", self.run.run_id, {"incarnation": incarnation})
        self.store.put(_leave_key(self.signer.replica, incarnation), sealed)

    def asked_to_leave(self, incarnation: str) -> bool:
        """Has somebody with our key asked this incarnation to leave? Refused where others have."""
        replica = self.signer.replica
        try:
            data = self._theirs(_leave_key(replica, incarnation), MAX_HEARTBEAT_BYTES)
        except StoreRefused as error:
            raise Refused(str(error)) from None
        if data is None:
            return False
        signer, body = open_sealed(data, "leave", self.run.run_id, self.run.keys)
        if signer != replica or body.get("incarnation") != incarnation:
            raise Refused(f"the request is {signer}'s, or for another start")
        return True


def _leave_key(replica: str, incarnation: str) -> str:
    return f"members/{replica}/leave-{incarnation}"
