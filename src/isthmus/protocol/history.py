"""The chain of manifests: which updates count in which round, from run.json on.

Whoever reads a manifest checks what its closer had to check and what documents can show: that the closer may
close, the link to the manifest before, the commit that the author of every entry signed, and the comparison
of norms. What only the updates themselves can show is in `judge`.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.layout.traffic import shard_bytes, shards
from isthmus.protocol.documents import COMMIT, MANIFEST, Entry, Manifest, RunInfo
from isthmus.protocol.norms import compare_norms
from isthmus.protocol.schema import check
from isthmus.protocol.trust import (
    MAX_DOCUMENT_BYTES,
    OtherAnchor,
    Refused,
    Signer,
    canonical,
    open_sealed,
    sha256,
    without_extras,
)
from isthmus.store import Store, StoreRefused

MAX_FACTS_BYTES = 4096
FETCH = 8  # requests at a time, while a long history is read
WITNESS_ROUNDS = 10  # whoever contributed to one of the last so many rounds has a say on an anchor


class History:
    """The settled rounds of one run, each read and checked once."""

    def __init__(self, store: Store, run: RunInfo, signer: Signer | None = None) -> None:
        if signer:
            check_pinned(run.digest, signer)
        self.store, self.run, self._signer = store, run, signer
        self.shards = shards(run.recipe)
        self.sizes = shard_bytes(run.recipe)
        self.names = frozenset(member.name for member in run.recipe.fleet())
        self.manifests: dict[int, Manifest] = {}
        self.chain: dict[int, str] = {0: run.digest}  # digest of each settled manifest; run.json stands for 0

    @property
    def signer(self) -> Signer:
        assert self._signer is not None, "a ledger without a key only reads"
        return self._signer

    # Limits on documents: a manifest holds a commit and an entry of every replica, and why some were refused

    @property
    def commit_limit(self) -> int:
        return 2 * MAX_FACTS_BYTES + 128 * len(self.shards)

    @property
    def manifest_limit(self) -> int:
        return max(MAX_DOCUMENT_BYTES, 2 * (self.commit_limit + 2048) * len(self.names))

    # Commits

    def check_commit(self, data: bytes, replica: str, round_number: int, anchor: str) -> Entry:
        """A commit's entry, with the commit in it, or Refused with the reason."""
        if len(data) > self.commit_limit:
            raise Refused(f"the commit has {len(data)} bytes; at most {self.commit_limit} are accepted")
        signer, body = open_sealed(data, "commit", self.run.run_id, self.run.keys)
        if signer != replica:
            raise Refused(f"the commit of {replica} is signed by {signer}")
        try:
            check(body, COMMIT)
        except Refused as reason:
            raise Refused(f"the commit is malformed: {reason}") from None
        if body["round"] != round_number:
            raise Refused(f"the commit is for round {body['round']}, not {round_number}")
        if body["anchor"] != anchor:
            raise OtherAnchor("the update starts from another anchor than this round's", body["anchor"])
        if len(canonical(body["facts"])) > MAX_FACTS_BYTES:
            raise Refused("the facts of the commit are too long")
        entry = Entry.from_dict(body)
        if entry.replica != replica:
            raise Refused(f"the commit of {replica} speaks of {entry.replica!r}")
        self._check_shards(entry)
        return replace(entry, commit=without_extras(data))

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
        try:  # one that readers would refuse must never be written: it would stop the run
            check(body, MANIFEST)
            if len(sealed) > self.manifest_limit:
                raise Refused(f"it has {len(sealed)} bytes; at most {self.manifest_limit} are accepted")
            self._check_entries(manifest)
        except Refused as reason:
            raise RunError(
                f"round {manifest.round} cannot be closed: its manifest would not be taken: {reason}"
            ) from None
        return self.store.create(manifest_key(manifest.round), sealed)

    def manifest(self, round_number: int) -> Manifest | None:
        """Round `round_number` as it was settled, or None while it is open. A forged one stops the run."""
        if round_number in self.manifests:
            return self.manifests[round_number]
        if round_number > self.run.recipe.outer.rounds:
            return None  # whatever lies there is not of this run
        known = round_number - 1
        while known not in self.chain:
            known -= 1
        for t, data in self._fetch(known + 1, round_number):
            if data is None:
                if t < round_number and self._is_signed(round_number) and self._get(t) is None:
                    raise RunStopped(f"manifest {t} of this run is gone; the run stops here")
                return None
            self.manifests[t] = self._checked(data, t)
            self.chain[t] = self.manifests[t].digest
        return self.manifests[round_number]

    def _fetch(self, first: int, last: int) -> Iterator[tuple[int, bytes | None]]:
        """Manifests as stored, in order; several at a time where a long history is read."""
        if last - first < FETCH:
            yield from ((t, self._get(t)) for t in range(first, last + 1))
            return
        with ThreadPoolExecutor(FETCH, "manifests") as pool:
            for start in range(first, last + 1, 8 * FETCH):
                numbers = range(start, min(start + 8 * FETCH, last + 1))
                yield from zip(numbers, pool.map(self._get, numbers), strict=True)

    def _get(self, round_number: int) -> bytes | None:
        try:
            return self.store.get(manifest_key(round_number), max_bytes=self.manifest_limit)
        except StoreRefused as reason:
            raise RunStopped(f"manifest {round_number} of this run: {reason}; the run stops here") from None

    def _checked(self, data: bytes, round_number: int) -> Manifest:
        closer = ""
        try:
            closer, body = open_sealed(data, "manifest", self.run.run_id, self.run.keys)
            if closer not in self.run.closers:
                raise Refused(f"it is signed by {closer}, who may not close rounds")
            manifest = Manifest.from_dict(body, closer, sha256(data))
            if manifest.round != round_number:
                raise Refused(f"it is for round {manifest.round}")
            if body["previous"] != self.chain[round_number - 1]:
                raise Refused(f"it is not chained to manifest {round_number - 1}")
            self._check_entries(manifest)
        except Refused as reason:
            by = f", by closer {closer}," if closer in self.run.closers else ""
            raise RunStopped(
                f"manifest {round_number} of this run{by} is not to be trusted: {reason}; the run stops here"
            ) from None
        # The commits have said what they had to say, and take more room than all else.
        return replace(
            manifest,
            entries=tuple(
                replace(entry, commit=b"", proved=bool(entry.commit)) for entry in manifest.entries
            ),
        )

    def _check_entries(self, manifest: Manifest) -> None:
        names = [entry.replica for entry in manifest.entries]
        if len(set(names)) < len(names) or not set(names) <= self.run.keys.keys():
            raise Refused("it does not list contributors of this run once each")
        others = {name for name, _ in manifest.refused} | set(manifest.members)
        if strangers := others - self.names:
            raise Refused(f"it speaks of {min(strangers)!r}, who is not in this run")
        for entry in manifest.entries:
            self._check_shards(entry)
            if entry.commit:
                self._check_listed(manifest, entry)
            elif self.run.commits_in_manifests:
                raise Refused(f"it counts {entry.replica} without a commit that {entry.replica} signed")
        if self.run.commits_in_manifests:  # before, closers followed another rule
            self._check_norms(manifest)

    def _check_listed(self, manifest: Manifest, entry: Entry) -> None:
        """What a closer lists of an update must be what its author signed."""
        try:
            signed = self.check_commit(entry.commit, entry.replica, manifest.round, manifest.anchor)
        except Refused as reason:
            raise Refused(f"it counts {entry.replica}, but {reason}") from None
        if (signed.shards, signed.facts) != (entry.shards, entry.facts):
            raise Refused(f"it does not list of {entry.replica} what {entry.replica} signed")

    def _check_norms(self, manifest: Manifest) -> None:
        previous = self.manifests.get(manifest.round - 1)
        before = {entry.replica: entry.norm for entry in previous.entries} if previous else {}
        norms = {entry.replica: entry.norm for entry in manifest.entries}
        for name, reason in compare_norms(norms, before, self.run.recipe.bucket.norm_limit).refused.items():
            raise Refused(f"it counts {name}, but {reason}")

    def last_round(self) -> int:
        """The newest settled round; 0 before the first. By the chain: whatever has a later name is not of it.

        A manifest that is signed and beyond a gap tells that those in the gap are gone.
        """
        keys = set(self.store.list("manifests/"))
        found = {int(m[1]) for key in keys if (m := re.fullmatch(r"manifests/([0-9]{6,7})\.json", key))}
        found -= {t for t in found if manifest_key(t) not in keys}  # 0000003.json is no name of ours
        newest = max(self.chain)
        rounds = self.run.recipe.outer.rounds
        while newest < rounds and (newest + 1 in found or self._is_there(newest + 1)):
            newest += 1  # a listing may lag behind
        for t in sorted(t for t in found if newest + 1 < t <= rounds)[:10]:
            if self._is_signed(t):
                raise RunStopped(f"manifest {newest + 1} of this run is gone, before {t}; the run stops here")
        return newest

    def _is_there(self, round_number: int) -> bool:
        return self.store.head(manifest_key(round_number)) is not None

    def _is_signed(self, round_number: int) -> bool:
        try:
            data = self.store.get(manifest_key(round_number), max_bytes=self.manifest_limit)
            closer, body = open_sealed(data or b"", "manifest", self.run.run_id, self.run.keys)
        except (Refused, StoreRefused):
            return False
        return closer in self.run.closers and body.get("round") == round_number

    def settled_at(self, round_number: int, deadline: float | None = None) -> float | None:
        """When round `round_number` was settled, by the store's clock; for 0, when the run was created."""
        key = "run.json" if round_number == 0 else manifest_key(round_number)
        info = self.store.head(key, deadline=deadline)
        return info.modified_unix_seconds if info else None

    # Who speaks for an anchor

    def check_witnessed(self, round_number: int, digest: str, writer: str) -> str:
        """Who says that theta^(t) has this digest, in words; Refused where it is the word of `writer` alone.

        Every contributor to round t + 1 has signed the digest of the anchor that it started from. More than
        half of those who contributed lately must have: a closer can leave out whom it likes.
        """
        following = self.manifest(round_number + 1)
        if following is None:
            raise Refused(f"{writer} alone speaks for it: round {round_number + 1} is not settled yet")
        if following.anchor != digest:
            raise Refused(f"{writer} wrote another one than round {round_number + 1} began from")
        if not self.run.commits_in_manifests:
            return f"closer {following.closer}, in manifest {round_number + 1}"
        lately = range(max(1, round_number + 2 - WITNESS_ROUNDS), round_number + 2)
        known = [m for t in lately if (m := self.manifest(t)) is not None]
        electorate = {entry.replica for manifest in known for entry in manifest.entries}
        signed = {entry.replica for entry in following.entries}
        words = f"{len(signed)} of {len(electorate)} contributors"
        if 2 * len(signed) <= len(electorate):
            raise Refused(f"{writer} wrote it, and only {words} have signed its digest")
        return f"{words}, in round {round_number + 1}"


def check_pinned(run_digest: str, signer: Signer) -> None:
    """A key signs nothing of a run that its file does not name: run.json may have been replaced."""
    if signer.pinned and signer.pinned != run_digest:
        raise ConfigError(
            f"run.json in this bucket is not the one that the key of {signer.replica} was made for: it was "
            "replaced, or this is the bucket of another run"
        )


def manifest_key(round_number: int) -> str:
    return f"manifests/{round_number:06d}.json"
