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
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from isthmus.config import Recipe, dump_recipe, parse_recipe
from isthmus.errors import ConfigError, RunError, Unreachable
from isthmus.protocol.documents import ANCHOR, RUN, Entry, Manifest, RunInfo, Shard
from isthmus.protocol.heartbeat import WAITING, Heartbeat, silent_after
from isthmus.protocol.history import check_pinned
from isthmus.protocol.payloads import Payloads
from isthmus.protocol.schema import check
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, Signer, canonical, open_sealed, sha256
from isthmus.reading import parse_json
from isthmus.store import Store, StoreRefused

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entry", "Ledger", "Manifest", "RunInfo", "Shard", "create_run", "read_run"]

FORMAT = 1
MAX_HEARTBEAT_BYTES = 2**16


def run_document(
    recipe: Recipe, keys: Mapping[str, str], closers: Sequence[str], corpus: str = "", start: str = ""
) -> bytes:
    """run.json of a new run. Its sha256 is in every key file, so it is made before it is written."""
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
        recipe = parse_recipe(body["recipe"])
        if keys.keys() != {member.name for member in recipe.fleet()}:
            raise Refused("its keys are not those of the recipe's replicas")
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
    )


class Ledger(Payloads):
    """Reads and writes one run's documents, checking all that it reads."""

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
        self.store.put(_complete_key(round_number), sealed)

    def anchor_rounds(self) -> list[int]:
        """Settled rounds with a complete anchor, oldest first. Nothing is said about what is in it."""
        names = (
            re.fullmatch(r"anchors/([0-9]{6,7})/complete\.json", key) for key in self.store.list("anchors/")
        )
        rounds = sorted({int(name[1]) for name in names if name})
        first = [0] if self.run.start and rounds[:1] == [0] else []
        later = (t for t in rounds if t)
        return first + list(takewhile(lambda t: self.manifest(t) is not None, later))

    def anchor_header(self, round_number: int) -> tuple[str, dict[str, Any]]:
        """(writer, body) of an anchor's complete.json; Refused unless a closer signed it for this history."""
        try:
            sealed = self._theirs(_complete_key(round_number), MAX_DOCUMENT_BYTES)
        except StoreRefused as error:
            raise Refused(str(error)) from None
        if sealed is None:
            raise Refused("it is not complete")
        writer, body = open_sealed(sealed, "anchor", self.run.run_id, self.run.keys)
        try:
            self._check_header(writer, body, round_number)
        except Refused as reason:
            raise Refused(f"{reason} (it was written by {writer})") from None
        return writer, body

    def _check_header(self, writer: str, body: dict[str, Any], round_number: int) -> None:
        if writer not in self.run.closers:
            raise Refused(f"{writer} may not write it")
        check(body, ANCHOR)
        if body["round"] != round_number or len(body["files"]) != len(self.shards):
            raise Refused("it is for another round or another model")
        if round_number and self.manifest(round_number) is None:
            raise Refused("its round is not settled")
        if body["manifest"] != self.chain[round_number]:
            raise Refused("it belongs to another history")
        if round_number == 0 and body["digest"] != self.run.start:
            raise Refused("it is not the theta^(0) that run.json names")

    def read_anchor(
        self, round_number: int, wanted: Sequence[int], witnessed: bool = True
    ) -> "tuple[str, dict[str, Tensor]]":
        """(digest of the whole, tensors of the wanted shards) of theta^(round), every file checked.

        It is believed only if those who started from it have signed its digest; see `check_witnessed`.
        Without `witnessed` it is the word of its writer. Whoever has all shards compares the digest.
        """
        try:
            writer, body = self.anchor_header(round_number)
            if witnessed and round_number:
                self.check_witnessed(round_number, body["digest"], writer)
            tensors: dict[str, Tensor] = {}
            for index in wanted:
                tensors |= self._anchor_file(round_number, index, body["files"][index])
            return body["digest"], tensors
        except Refused as reason:
            raise RunError(f"the anchor of round {round_number} cannot be used: {reason}") from None

    def believed_anchors(self, most: int) -> list[int]:
        """The newest rounds, at most so many, whose anchors contributors speak for; newest first. Their files
        are not read."""
        found: list[int] = []
        for t in reversed(self.anchor_rounds()):
            if t and len(found) < most:
                with suppress(Refused):
                    writer, body = self.anchor_header(t)
                    self.check_witnessed(t, body["digest"], writer)
                    found.append(t)
        return found

    def _anchor_file(self, round_number: int, index: int, digest: str) -> "dict[str, Tensor]":
        from safetensors.torch import load

        shapes = self.run.recipe.model.shapes()
        limit = 8 * sum(prod(shapes[name]) for name in self.shards[index]) * 2 + 2**20
        try:
            data = self._theirs(f"anchors/{round_number:06d}/{index}.safetensors", limit)
            if data is None or sha256(data) != digest:
                raise Refused(f"file {index} is missing or not what complete.json says")
            loaded = load(data)
        except (StoreRefused, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise Refused(str(error)) from None
        for name, tensor in loaded.items():  # beside each parameter, what the outer method carries of it
            own = name if name in shapes else name.partition("/")[2]
            if own not in self.shards[index] or tuple(tensor.shape) != shapes[own]:
                raise Refused(
                    f"file {index} holds {name[:80]!r}, which this run's model has not in that shape"
                )
        wanted = set(self.shards[index])
        if round_number and self.run.recipe.outer.method == "diloco":
            wanted |= {f"velocity/{name}" for name in self.shards[index]}
        if missing := wanted - loaded.keys():
            raise Refused(f"file {index} does not hold {min(missing)}")
        return loaded

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
            info = self.store.foreign(lambda: self.store.head(key))
            data = self._theirs(key, MAX_HEARTBEAT_BYTES) if info else None
            if info is None or data is None:
                return None
            signer, body = open_sealed(data, "heartbeat", self.run.run_id, self.run.keys)
        except (Refused, StoreRefused):  # a heartbeat that breaks the rules counts as none
            return None
        return (Heartbeat.from_dict(body), info.modified_unix_seconds) if signer == replica else None

    def waiting(self, replica: str, live_at: float | None, now: float) -> tuple[Heartbeat, float] | None:
        """What the replica's launcher waits for, and when it said so: only where no worker's heartbeat has
        come since, and where it is not old itself. Both times are the store's. Readers only."""
        every, silent = self.run.recipe.bucket.heartbeat_seconds, silent_after(self.run.recipe)
        if live_at is not None and now - live_at < 2 * every:  # a worker is there: ask no more of the store
            return None
        found = self.heartbeat(replica, WAITING)
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


def _complete_key(round_number: int) -> str:
    return f"anchors/{round_number:06d}/complete.json"
