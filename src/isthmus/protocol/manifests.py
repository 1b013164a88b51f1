"""The chain of manifests: the updates that count in each round.

A manifest that a closer signed is true. A reader checks its signature, the signer's right to close, its
round, its epoch and the link to the previous manifest. Closers judge commits and updates (`judge`).
"""

import re
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.protocol.cut import run_shapes, run_shards, run_sizes
from isthmus.protocol.documents import Commit, Manifest, RunInfo, Shard, decode, encode
from isthmus.protocol.epochs import Epochs
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, OtherAnchor, Refused, Signer, open_raw, sha256
from isthmus.store import Store, StoreRefused
from isthmus.store.together import together

MAX_FACTS_BYTES = 4096
KEPT = 64  # manifests: closers look back at the last rounds
AHEAD = 16  # manifests that one batch requests
MOST_BEYOND = 10  # objects beyond a gap that are checked


class Manifests(Epochs):
    """The manifests of one run, read and checked from any round on."""

    def __init__(self, store: Store, run: RunInfo, signer: Signer | None = None) -> None:
        if signer:
            check_pinned(run.digest, signer)
        super().__init__(store, run)
        self._signer, first = signer, self.membership.epochs[0].run
        self.shapes, self.shards, self.sizes = run_shapes(first), run_shards(first), run_sizes(first)
        self.manifests: dict[int, Manifest] = {}  # those read most recently
        self.newest = 0  # a settled round; there may be later ones
        self.listed = False
        self._lock = threading.Lock()

    @property
    def signer(self) -> Signer:
        assert self._signer is not None, "a ledger without a key only reads"
        return self._signer

    def sign_as(self, signer: Signer) -> None:
        check_pinned(self.run.digest, signer)
        self._signer = signer

    # Limits on documents: a manifest holds an entry for each replica, and reasons for refusals

    @property
    def commit_limit(self) -> int:
        return 2 * MAX_FACTS_BYTES + 128 * len(self.shards)

    @property
    def manifest_limit(self) -> int:
        return max(MAX_DOCUMENT_BYTES, (self.commit_limit + 2048) * len(self.names))

    # Commits

    def check_commit(self, data: bytes, replica: str, round_number: int, anchor: str) -> Commit:
        """The replica's commit to this round from this anchor, or Refused with the reason."""
        if len(data) > self.commit_limit:
            raise Refused(f"the commit has {len(data)} bytes; at most {self.commit_limit} are accepted")
        signer, body = open_raw(data, "commit", self.run.run_id, self.at(round_number).keys)
        if signer != replica:
            raise Refused(f"the commit of {replica} is signed by {signer}", "unsigned")
        commit = decode(body, Commit, "commit")
        if commit.round != round_number:
            raise Refused(f"the commit is for round {commit.round}, not {round_number}", "other_round")
        if commit.anchor != anchor:
            raise OtherAnchor("the update starts from another anchor than this round's", commit.anchor)
        if not commit.skip:
            self._check_shards(commit.shards)
        elif commit.shards:
            raise Refused("it says that it gives nothing, and lists shards")
        before = self.known(round_number - 1)
        if before and replica not in before.dealt_in and not commit.skip:
            raise Refused("it had no share of this round's data", "no_share")
        return commit

    def _check_shards(self, shards: Sequence[Shard]) -> None:
        if [shard.index for shard in shards] != list(range(len(self.shards))):
            raise Refused("it does not list every shard once")
        for shard, size in zip(shards, self.sizes, strict=True):
            if shard.size != size:
                words = f"shard {shard.index} is said to have {shard.size} bytes; this run's have {size}"
                raise Refused(words)

    # Manifests

    def create_manifest(self, manifest: Manifest) -> bool:
        """Create the manifest; True if ours won. Only the bucket decides."""
        manifest = replace(self.in_epoch(manifest), previous=self.digest_of(manifest.round - 1))
        sealed = self.signer.seal("manifest", self.run.run_id, manifest)
        try:  # a manifest that readers refuse would stop the run: never write one
            decode(encode(manifest), Manifest, "manifest")
            if len(sealed) > self.manifest_limit:
                raise Refused(f"it has {len(sealed)} bytes; at most {self.manifest_limit} are accepted")
            self._check_entries(manifest)
        except Refused as reason:
            raise RunError(
                f"round {manifest.round} cannot be closed: its manifest would not be taken: {reason}"
            ) from None
        return self.store.create(manifest_key(manifest.round), sealed)

    def digest_of(self, round_number: int) -> str:
        """The digest of a settled round's manifest; of run.json for 0."""
        if round_number == 0:
            return self.run.digest
        manifest = self.manifest(round_number)
        if manifest is None:
            raise gone(round_number)
        return manifest.digest

    def manifest(self, round_number: int) -> Manifest | None:
        """The manifest of a settled round; None while it is open. A forged one stops the run."""
        if found := self.manifests.get(round_number):
            return found
        if not 0 < round_number <= self.run.recipe.outer.rounds:
            return None  # an object there does not belong to this run
        data = self._get(round_number)
        if data is not None:
            return self._take(round_number, data)
        if round_number <= self.newest:
            raise gone(round_number)
        return None

    def between(self, first: int, last: int) -> Iterator[Manifest]:
        """Yield settled rounds in order, several requests at a time; RunStopped if one is gone."""
        for begin in range(first, last + 1, AHEAD):
            numbers = range(begin, min(begin + AHEAD, last + 1))
            missing = [t for t in numbers if t not in self.manifests]
            read = dict(zip(missing, together([partial(self._get, t) for t in missing]), strict=True))
            for t in numbers:
                data = read.get(t)
                manifest = self._take(t, data) if data is not None else self.manifest(t)
                if manifest is None:
                    raise gone(t)
                yield manifest

    def known(self, round_number: int) -> Manifest | None:
        """The manifest if it is cached; makes no request."""
        return self.manifests.get(round_number)

    def _take(self, round_number: int, data: bytes) -> Manifest:
        manifest = self._checked(data, round_number)
        with self._lock:  # evict the oldest
            self.manifests.pop(round_number, None)
            self.manifests[round_number] = manifest
            for old in list(self.manifests)[: max(0, len(self.manifests) - KEPT)]:
                del self.manifests[old]
        self.newest = max(self.newest, round_number)
        return manifest

    def _get(self, round_number: int) -> bytes | None:
        try:
            return self.store.get(manifest_key(round_number), max_bytes=self.manifest_limit)
        except StoreRefused as reason:
            raise RunStopped(f"manifest {round_number} of this run: {reason}; the run stops here") from None

    def _checked(self, data: bytes, round_number: int) -> Manifest:
        """Return the manifest, checked together with its links to known neighbours."""
        closer, run = "", self.run
        before, after = self.manifests.get(round_number - 1), self.manifests.get(round_number + 1)
        previous = self.run.digest if round_number == 1 else before.digest if before else ""
        try:
            run = self._stated_epoch(data).run
            closer, body = open_raw(data, "manifest", run.run_id, run.keys)
            if closer not in run.closers:
                raise Refused(f"it is signed by {closer}, who may not close rounds")
            manifest = replace(decode(body, Manifest, "manifest"), closer=closer, digest=sha256(data))
            if manifest.round != round_number:
                raise Refused(f"it is for round {manifest.round}")
            if previous and manifest.previous != previous:
                raise Refused(f"it is not chained to manifest {round_number - 1}")
            if after and after.previous != manifest.digest:
                raise Refused(f"it is not the one that manifest {round_number + 1} is chained to")
            self._check_epoch(manifest, before, begins=before is None and round_number > 1)
            self._check_entries(manifest)
        except Refused as reason:
            by = f", by closer {closer}," if closer in run.closers else ""
            raise RunStopped(
                f"manifest {round_number} of this run{by} is not to be trusted: {reason}; the run stops here"
            ) from None
        return manifest

    def _check_entries(self, manifest: Manifest) -> None:
        names = [each.replica for each in (*manifest.entries, *manifest.skipped)]
        if not names:
            raise Refused("nobody has answered")
        run, following = (self.membership.epoch(n).run for n in (manifest.epoch, manifest.next_epoch))
        if len(set(names)) < len(names) or not set(names) <= run.keys.keys():
            raise Refused("it does not list contributors of this run once each")
        strangers = {each.replica for each in manifest.refusals} - run.keys.keys()
        if strangers := strangers | (set(manifest.dealt_in) - following.keys.keys()):
            raise Refused(f"it speaks of {min(strangers)!r}, who is not in this run")
        if shareless := set(manifest.members) - set(manifest.dealt_in):
            raise Refused(f"the next round would wait for {min(shareless)}, who has no share of its data")
        for entry in manifest.entries:
            self._check_shards(entry.shards)

    # How far the run has come

    def last_round(self) -> int:
        """The newest settled round; 0 before the first. The first call lists; later calls send HEAD for the
        next manifest."""
        if not self.listed:
            self._list()
            self.listed = True
        while self.newest < self.run.recipe.outer.rounds and self._is_there(self.newest + 1):
            self.newest += 1
        return self.newest

    def _list(self) -> None:
        """Find the newest manifest of the chain. A signed manifest beyond a gap proves that the ones in the
        gap are gone."""
        keys, rounds = set(self.store.list("manifests/")), self.run.recipe.outer.rounds
        found = {int(m[1]) for key in keys if (m := re.fullmatch(r"manifests/([0-9]{6,7})\.json", key))}
        found -= {t for t in found if manifest_key(t) not in keys}  # we never write names like 0000003.json
        while self.newest < rounds and (self.newest + 1 in found or self._is_there(self.newest + 1)):
            self.newest += 1  # a listing may lag behind
        for t in sorted(t for t in found if self.newest + 1 < t <= rounds)[:MOST_BEYOND]:
            if self._is_signed(t):
                missing = self.newest + 1
                raise RunStopped(f"manifest {missing} of this run is gone, before {t}; the run stops here")

    def _is_there(self, round_number: int) -> bool:
        return self.store.head(manifest_key(round_number)) is not None

    def _is_signed(self, round_number: int) -> bool:
        try:
            data = self._get(round_number) or b""
            run = self._stated_epoch(data).run
            closer, body = open_raw(data, "manifest", run.run_id, run.keys)
            manifest = decode(body, Manifest, "manifest")
        except (Refused, RunStopped):
            return False
        return closer in run.closers and manifest.round == round_number

    def settled_at(self, round_number: int, deadline: float | None = None) -> float | None:
        """When round `round_number` was settled, by the store's clock; for 0, when the run was created."""
        key = "run.json" if round_number == 0 else manifest_key(round_number)
        info = self.store.head(key, deadline=deadline)
        return info.modified_unix_seconds if info else None

    def check_confirmed(self, round_number: int, digest: str) -> None:
        """Raise Refused unless the next manifest states this digest of theta^(t)."""
        following = self.manifest(round_number + 1)
        if following is None:
            raise Refused(f"round {round_number + 1}, which confirms it, is not settled yet")
        if following.anchor != digest:
            raise Refused(f"round {round_number + 1} began from another one")


def gone(round_number: int) -> RunStopped:
    return RunStopped(f"manifest {round_number} of this run is gone; the run stops here")


def check_pinned(run_digest: str, signer: Signer) -> None:
    """Check that the key file names this run: run.json may have been replaced."""
    if signer.pinned and signer.pinned != run_digest:
        raise ConfigError(
            f"run.json in this bucket is not the one that the key of {signer.replica} was made for: it was "
            "replaced, or this is the bucket of another run"
        )


def manifest_key(round_number: int) -> str:
    return f"manifests/{round_number:06d}.json"
