"""The bucket as the run's history: run.json, payloads and commits, manifests, anchors, heartbeats.

    run.json                                  the recipe, a 128-bit run id, who may contribute and close
    members/<replica>/live.json               heartbeat of the incarnation that runs now
    members/<replica>/waiting.json            what its launcher waits for while none runs; nobody waits for it
    payloads/<replica>/<t>/<shard>-<sha256>   one shard of one update
    payloads/<replica>/<t>/commit.json        written last and signed; no commit, not delivered
    manifests/<t>.json                        which commits count in round t; only if absent, chained, signed
    anchors/<t>/<shard>.safetensors           theta^(t); complete.json last, with the digest

Round t takes theta^(t-1) to theta^(t), t = 1 .. R. Nothing read here is trusted before its signature, hash
and size are checked, and nothing is ever unpickled.
"""

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from isthmus.config import Recipe, dump_recipe, parse_recipe
from isthmus.errors import ConfigError, RunError, RunStopped, Unreachable
from isthmus.layout.traffic import shard_bytes, shards
from isthmus.protocol.documents import Entry, Manifest, RunInfo, Shard
from isthmus.protocol.heartbeat import WAITING, Heartbeat, silent_after
from isthmus.protocol.trust import (
    MAX_DOCUMENT_BYTES,
    OtherAnchor,
    Refused,
    Signer,
    canonical,
    open_sealed,
    sha256,
)
from isthmus.store import Store, StoreRefused

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MAX_HEARTBEAT_BYTES = 2**16
MAX_FACTS_BYTES = 4096


def create_run(
    store: Store,
    recipe: Recipe,
    keys: Mapping[str, str],
    closers: Sequence[str],
    corpus: str = "",
    start: str = "",
) -> RunInfo:
    """Write run.json, or say whose run is there already."""
    body = {
        "format": FORMAT,
        "run_id": os.urandom(16).hex(),
        "recipe": dump_recipe(recipe),
        "keys": dict(keys),
        "closers": list(closers),
        "corpus": corpus,
        "start": start,
    }
    if not store.create("run.json", canonical(body)):
        there = read_run(store)
        raise ConfigError(
            f'the bucket already holds the run "{there.recipe.name}" ({there.run_id}); give another URL'
        )
    return read_run(store)


def read_run(store: Store) -> RunInfo:
    try:
        data = store.get("run.json", max_bytes=MAX_DOCUMENT_BYTES)
        if data is None:
            raise Unreachable("there is no run in this bucket; create one with `isthmus init RECIPE URL`")
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise ConfigError(f"run.json is of format {body['format']!r}; this Isthmus reads format {FORMAT}")
        keys = {str(name): str(key) for name, key in body["keys"].items()}
        closers = tuple(str(name) for name in body["closers"])
        recipe, corpus = parse_recipe(body["recipe"]), str(body["corpus"])
        start = str(body.get("start", ""))  # older runs have none
        return RunInfo(str(body["run_id"]), recipe, keys, closers, sha256(data), corpus, start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("run.json in this bucket is not one of ours; give the URL of a run") from None


class Ledger:
    """Reads and writes one run's documents, checking all that it reads."""

    def __init__(self, store: Store, run: RunInfo, signer: Signer | None = None) -> None:
        self.store, self.run, self._signer = store, run, signer
        self.shards = shards(run.recipe)
        self.sizes = shard_bytes(run.recipe)
        self.manifests: dict[int, Manifest] = {}
        self.chain: dict[int, str] = {0: run.digest}  # digest of each settled manifest; run.json stands for 0

    @property
    def signer(self) -> Signer:
        assert self._signer is not None, "a ledger without a key only reads"
        return self._signer

    # Payloads and commits

    def put_shard(self, round_number: int, index: int, data: bytes) -> Shard:
        shard = Shard(index, sha256(data), len(data))
        self.store.put(self.shard_key(self.signer.replica, round_number, shard), data)
        return shard

    def get_shard(self, replica: str, round_number: int, shard: Shard) -> bytes:
        """The shard's bytes, or Refused when it is missing, oversized, or not what its commit says."""
        if not 0 <= shard.index < len(self.sizes) or shard.size != self.sizes[shard.index]:
            raise Refused(f"shard {shard.index} is said to have {shard.size} bytes: not a size of this run")
        try:
            data = self.store.get(self.shard_key(replica, round_number, shard), max_bytes=shard.size)
        except ValueError as error:
            raise Refused(f"shard {shard.index}: {error}") from None
        if data is None:
            raise Refused(f"shard {shard.index} is missing")
        if len(data) != shard.size or sha256(data) != shard.digest:
            raise Refused(f"shard {shard.index} does not match its commit")
        return data

    def commit(self, round_number: int, incarnation: str, anchor: str, entry: Entry) -> None:
        body = entry.to_dict() | {"round": round_number, "anchor": anchor, "incarnation": incarnation}
        sealed = self.signer.seal("commit", self.run.run_id, body)
        self.store.put(self._commit_key(self.signer.replica, round_number), sealed)

    def get_commit(self, replica: str, round_number: int) -> bytes | None:
        return self.store.get(self._commit_key(replica, round_number), max_bytes=MAX_DOCUMENT_BYTES)

    def has_commit(self, replica: str, round_number: int) -> bool:
        return self.store.head(self._commit_key(replica, round_number)) is not None

    def check_commit(self, data: bytes, replica: str, round_number: int, anchor: str) -> Entry:
        """A commit's entry, or Refused with the reason."""
        signer, body = open_sealed(data, "commit", self.run.run_id, self.run.keys)
        if signer != replica:
            raise Refused(f"the commit of {replica} is signed by {signer}")
        if body.get("round") != round_number:
            raise Refused(f"the commit is for round {body.get('round')!r:.20}, not {round_number}")
        if body.get("anchor") != anchor:
            raise OtherAnchor("the update starts from another anchor than this round's")
        entry = Entry.from_dict(body)
        if len(canonical(body["facts"])) > MAX_FACTS_BYTES:
            raise Refused("the facts of the commit are too long")
        if entry.replica != replica:
            raise Refused(f"the commit of {replica} speaks of {entry.replica!r:.80}")
        self._check_shards(entry)
        return entry

    def _check_shards(self, entry: Entry) -> None:
        if [shard.index for shard in entry.shards] != list(range(len(self.shards))):
            raise Refused("it does not list every shard once")
        for shard, size in zip(entry.shards, self.sizes, strict=True):
            if shard.size != size:
                words = f"shard {shard.index} is said to have {shard.size} bytes; this run's have {size}"
                raise Refused(words)

    # Manifests

    def create_manifest(self, manifest: Manifest) -> bool:
        """True when ours is the manifest of its round; only the bucket decides."""
        body = manifest.to_dict(self.chain[manifest.round - 1])
        sealed = self.signer.seal("manifest", self.run.run_id, body)
        return self.store.create(_manifest_key(manifest.round), sealed)

    def manifest(self, round_number: int) -> Manifest | None:
        """Round `round_number` as it was settled, or None while it is open. A forged one stops the run."""
        if round_number in self.manifests:
            return self.manifests[round_number]
        known = round_number - 1
        while known not in self.chain:  # back to run.json, or to the round of an anchor that was read
            known -= 1
        for t in range(known + 1, round_number + 1):
            try:
                data = self.store.get(_manifest_key(t), max_bytes=MAX_DOCUMENT_BYTES)
            except StoreRefused as reason:
                raise RunStopped(f"manifest {t} of this run: {reason}; the run stops here") from None
            if data is None:
                later = t < round_number and self.store.head(_manifest_key(round_number)) is not None
                if later and self.store.head(_manifest_key(t)) is None:
                    raise RunStopped(f"manifest {t} of this run is gone; the run stops here")
                return None
            self.manifests[t] = self._checked_manifest(data, t)
            self.chain[t] = self.manifests[t].digest
        return self.manifests[round_number]

    def _checked_manifest(self, data: bytes, round_number: int) -> Manifest:
        try:
            closer, body = open_sealed(data, "manifest", self.run.run_id, self.run.keys)
            if closer not in self.run.closers:
                raise Refused(f"it is signed by {closer}, who may not close rounds")
            if body["round"] != round_number:
                raise Refused(f"it is for round {body['round']!r:.20}")
            if body["previous"] != self.chain[round_number - 1]:
                raise Refused(f"it is not chained to manifest {round_number - 1}")
            manifest = Manifest.from_dict(body, closer, sha256(data))
            if self.chain.get(round_number, manifest.digest) != manifest.digest:
                raise Refused("it is not the one that the anchor of its round belongs to")
            names = [entry.replica for entry in manifest.entries]
            if not names or len(set(names)) < len(names) or not set(names) <= set(self.run.keys):
                raise Refused("it does not list contributors of this run once each")
            for entry in manifest.entries:
                self._check_shards(entry)
        except Refused as reason:
            words = f"manifest {round_number} of this run is not to be trusted: {reason}; the run stops here"
            raise RunStopped(words) from None
        except (KeyError, TypeError, ValueError, AttributeError):
            words = f"manifest {round_number} of this run is malformed; the run stops here"
            raise RunStopped(words) from None
        return manifest

    def last_round(self) -> int:
        """The newest settled round; 0 before the first."""
        rounds = [int(name) for key in self.store.list("manifests/") if (name := _stem(key)).isdigit()]
        newest = max([0, *rounds])
        while self.store.head(_manifest_key(newest + 1)) is not None:  # a listing may lag behind
            newest += 1
        return newest

    def settled_at(self, round_number: int, deadline: float | None = None) -> float | None:
        """When round `round_number` was settled, by the store's clock; for 0, when the run was created."""
        key = "run.json" if round_number == 0 else _manifest_key(round_number)
        info = self.store.head(key, deadline=deadline)
        return info.modified_unix_seconds if info else None

    # Anchors

    def put_anchor_shard(self, round_number: int, index: int, tensors: "Mapping[str, Tensor]") -> str:
        from safetensors.torch import save  # loads torch, which `status` does without

        data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        self.store.put(f"anchors/{round_number:06d}/{index}.safetensors", data)
        return sha256(data)

    def complete_anchor(self, round_number: int, digest: str, files: Sequence[str]) -> None:
        manifest = self.chain[round_number]
        body = {"round": round_number, "digest": digest, "files": list(files), "manifest": manifest}
        sealed = self.signer.seal("anchor", self.run.run_id, body)
        self.store.put(f"anchors/{round_number:06d}/complete.json", sealed)

    def anchor_rounds(self) -> list[int]:
        """Rounds with a complete anchor, oldest first."""
        keys = self.store.list("anchors/")
        done = [key.split("/")[-2] for key in keys if key.endswith("/complete.json")]
        return sorted(int(name) for name in done if name.isdigit())

    def read_anchor(self, round_number: int, wanted: Sequence[int]) -> "tuple[str, dict[str, Tensor]]":
        """(digest of the whole, tensors of the wanted shards) of theta^(round), every file checked."""
        from safetensors.torch import load

        folder = f"anchors/{round_number:06d}"
        try:
            sealed = self.store.get(f"{folder}/complete.json", max_bytes=MAX_DOCUMENT_BYTES)
            if sealed is None:
                raise Refused("it is not complete")
            writer, body = open_sealed(sealed, "anchor", self.run.run_id, self.run.keys)
            if writer not in self.run.closers or body["round"] != round_number:
                raise Refused(f"{writer} may not write it")
            if self.chain.get(round_number, body["manifest"]) != body["manifest"]:
                raise Refused("it belongs to another history")
            if round_number == 0 and body["digest"] != self.run.start:
                raise Refused("it is not the theta^(0) that run.json names")
            tensors: dict[str, Tensor] = {}
            shapes = self.run.recipe.model.shapes()
            for index in wanted:
                limit = 8 * sum(prod(shapes[name]) for name in self.shards[index]) * 2 + 2**20
                data = self.store.get(f"{folder}/{index}.safetensors", max_bytes=limit)
                if data is None or sha256(data) != body["files"][index]:
                    raise Refused(f"file {index} is missing or not what complete.json says")
                loaded = load(data)
                for name in self.shards[index]:
                    if name not in loaded or tuple(loaded[name].shape) != shapes[name]:
                        raise Refused(f"file {index} does not hold {name} in the shape of this run's model")
                tensors |= loaded
            self.chain[round_number] = str(body["manifest"])
            return str(body["digest"]), tensors
        except (Refused, KeyError, IndexError, TypeError, ValueError, SafetensorError) as error:
            raise RunError(f"the anchor of round {round_number} cannot be used: {error}") from None

    # Heartbeats

    def beat(self, heartbeat: Heartbeat) -> None:
        """A launcher that waits says so in a file of its own: closers go by the heartbeats of workers."""
        sealed = self.signer.seal("heartbeat", self.run.run_id, heartbeat.to_dict())
        name = WAITING if heartbeat.state == WAITING else "live"
        self.store.put(f"members/{self.signer.replica}/{name}.json", sealed)

    def heartbeat(self, replica: str, name: str = "live") -> tuple[Heartbeat, float] | None:
        """(the replica's last heartbeat, when it was written by the store's clock), or None."""
        key = f"members/{replica}/{name}.json"
        try:
            info = self.store.head(key)
            data = self.store.get(key, max_bytes=MAX_HEARTBEAT_BYTES) if info else None
            if info is None or data is None:
                return None
            signer, body = open_sealed(data, "heartbeat", self.run.run_id, self.run.keys)
        except (Refused, StoreRefused):  # a heartbeat that breaks the rules counts as none
            return None
        return (Heartbeat.from_dict(body), info.modified_unix_seconds) if signer == replica else None

    def waiting(self, replica: str, live_at: float | None, now: float) -> tuple[Heartbeat, float] | None:
        """What the replica's launcher waits for, and when it said so: only where no worker's heartbeat has
        come since, and where it is not old itself. Both times are the store's. Readers only."""
        every = self.run.recipe.bucket.heartbeat_seconds
        if live_at is not None and now - live_at < 2 * every:  # a worker is there: ask no more of the store
            return None
        found = self.heartbeat(replica, WAITING)
        if found is None or found[1] < (live_at or 0.0) or now - found[1] > silent_after(self.run.recipe):
            return None
        return found

    def shard_key(self, replica: str, round_number: int, shard: Shard) -> str:
        return f"payloads/{replica}/{round_number:06d}/{shard.index}-{shard.digest}"

    def _commit_key(self, replica: str, round_number: int) -> str:
        return f"payloads/{replica}/{round_number:06d}/commit.json"


def _manifest_key(round_number: int) -> str:
    return f"manifests/{round_number:06d}.json"


def _stem(key: str) -> str:
    return key.rsplit("/", 1)[-1].removesuffix(".json")
