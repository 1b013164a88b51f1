"""The chain of manifests: which updates count in which round.

Whoever reads a manifest checks what its closer had to check and what documents can show: that the closer may
close, the link to the manifest before, the commit that the author of every entry signed, and the comparison
of norms. What only the updates themselves can show is in `judge`.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.layout.traffic import shard_bytes, shards
from isthmus.protocol.documents import COMMIT, MANIFEST, Entry, Manifest, RunInfo
from isthmus.protocol.epochs import Epochs
from isthmus.protocol.norms import compare_norms
from isthmus.protocol.schema import check
from isthmus.protocol.trust import (
    MAX_DOCUMENT_BYTES,
    OtherAnchor,
    Refused,
    Signer,
    canonical,
    open_document,
    open_sealed,
    sha256,
    without_extras,
)
from isthmus.store import Store, StoreRefused
from isthmus.store.together import together

MAX_FACTS_BYTES = 4096
WINDOW = 64  # manifests that are kept: who closes looks back at the last rounds, nobody at all of them
AHEAD = 16  # manifests that are read at a time, where many are read in order
T = TypeVar("T")


class Chain(Epochs):
    """The manifests of one run, read and checked one after another, from any of them on.

    What it keeps of them does not grow with the rounds.
    """

    def __init__(self, store: Store, run: RunInfo, signer: Signer | None = None) -> None:
        if signer:
            check_pinned(run.digest, signer)
        super().__init__(store, run)
        self._signer, first = signer, self.membership.epochs[0].run
        self.shards = shards(first.recipe, first.room)  # whoever comes later, the cut stays
        self.sizes = shard_bytes(first.recipe, first.room)
        self.manifests: dict[int, Manifest] = {}  # those read last; each was checked against the one before
        self.chain: dict[int, str] = {0: run.digest}  # digests of manifests; run.json stands for 0
        self.newest = 0  # a settled round; there may be later ones
        self._begun: dict[int, Manifest] = {}  # before the first of those in `manifests`
        self._raw: dict[int, bytes] = {}  # as stored, read before they were asked for
        self._expected = 0
        self._lock = threading.Lock()

    @property
    def signer(self) -> Signer:
        assert self._signer is not None, "a ledger without a key only reads"
        return self._signer

    def sign_as(self, signer: Signer) -> None:
        check_pinned(self.run.digest, signer)
        self._signer = signer

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
        self._check_length(data)
        signed = open_sealed(data, "commit", self.run.run_id, self.at(round_number).keys)
        entry = Entry.from_dict(self._check_signed(signed, replica, round_number, anchor))
        self._check_shards(entry)
        commit = without_extras(data)
        self._check_length(commit)  # as the manifest will have it: 1e15 is longer there
        return replace(entry, commit=commit)

    def _check_length(self, commit: bytes) -> None:
        if len(commit) > self.commit_limit:
            raise Refused(f"the commit has {len(commit)} bytes; at most {self.commit_limit} are accepted")

    def _check_signed(
        self, signed: tuple[str, dict[str, Any]], replica: str, round_number: int, anchor: str
    ) -> dict[str, Any]:
        """The body of a commit, by who signed it, if it is the replica's for this round and this anchor."""
        signer, body = signed
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
        if body["replica"] != replica:
            raise Refused(f"the commit of {replica} speaks of {body['replica']!r}")
        return body

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
        manifest = self.in_epoch(manifest)
        body = manifest.to_dict(self.digest_of(manifest.round - 1))
        sealed = self.signer.seal("manifest", self.run.run_id, body)
        try:  # one that readers would refuse must never be written: it would stop the run
            check(body, MANIFEST)
            if len(sealed) > self.manifest_limit:
                raise Refused(f"it has {len(sealed)} bytes; at most {self.manifest_limit} are accepted")
            self._check_entries(manifest, body["entries"])
            self._check_norms(manifest, self.known(manifest.round - 1))
        except Refused as reason:
            raise RunError(
                f"round {manifest.round} cannot be closed: its manifest would not be taken: {reason}"
            ) from None
        return self.store.create(manifest_key(manifest.round), sealed)

    def digest_of(self, round_number: int) -> str:
        """Of a settled round's manifest; of run.json for 0."""
        if round_number not in self.chain and self.manifest(round_number) is None:
            raise gone(round_number)
        return self.chain[round_number]

    def manifest(self, round_number: int) -> Manifest | None:
        """Round `round_number` as it was settled, or None while it is open. A forged one stops the run.

        It is checked against the manifest before it, which is read too where it is not known. Of that one
        only what it says itself is checked, so it is not handed out.
        """
        if found := self.manifests.get(round_number):
            return found
        if not 0 < round_number <= self.run.recipe.outer.rounds:
            return None  # whatever lies there is not of this run
        before = self.known(round_number - 1)
        begins = before is None and round_number > 1
        read = self._load(round_number - begins, round_number)
        if begins:
            before = self._begin(round_number - 1, read)
        if round_number not in read:
            if round_number <= self.newest and self._get(round_number) is None:
                raise gone(round_number)
            return None
        if begins and before is None:
            return None
        manifest = self._checked(read[round_number], round_number, before)
        self._remember(self.manifests, manifest)
        self.newest = max(self.newest, round_number)
        return manifest

    def between(self, first: int, last: int) -> Iterator[Manifest]:
        """Settled rounds in order, several requests at a time; RunStopped where one is gone."""
        self.expect(last)
        for t in range(first, last + 1):
            manifest = self.manifest(t)
            if manifest is None:
                raise gone(t)
            yield manifest

    def expect(self, last: int) -> None:
        """The manifests up to `last` will be asked for in order, so several are read at a time."""
        self._expected = last

    def known(self, round_number: int) -> Manifest | None:
        """Without a request; also the one before the first that was asked for."""
        return self.manifests.get(round_number) or self._begun.get(round_number)

    def _begin(self, round_number: int, read: Mapping[int, bytes]) -> Manifest | None:
        """The manifest before the first that we read; None where neither is there."""
        data = read.get(round_number)
        if data is None:  # it came between two answers, or the one after it tells that it is gone
            following = read.get(round_number + 1)
            if round_number + 1 > self.newest and not (
                following and self._is_signed(following, round_number + 1)
            ):
                return None
            if (data := self._get(round_number)) is None:
                raise gone(round_number)
        manifest = self._checked(data, round_number, None)
        self._remember(self._begun, manifest)
        return manifest

    def _load(self, first: int, last: int) -> dict[int, bytes]:
        """Manifests as stored, as far as they are there. What is expected next is read with them."""
        wanted = range(first, last + 1)
        if any(t not in self._raw for t in wanted):
            until = max(last, min(self._expected, last + AHEAD - 1))
            numbers = [t for t in range(first, until + 1) if t not in self._raw and t not in self.manifests]
            calls = [partial(self._get if t in wanted else self._get_early, t) for t in numbers]
            for t, data in zip(numbers, together(calls, AHEAD), strict=True):
                if data is not None:
                    self._stash(t, data)
        return {t: data for t in wanted if (data := self._raw.pop(t, None)) is not None}

    def _remember(self, where: dict[int, Manifest], manifest: Manifest) -> None:
        """It, and the digests that it fixes: its own, and that of the one before."""
        with self._lock:
            _keep(where, manifest.round, manifest, WINDOW)
            for t, digest in ((manifest.round - 1, manifest.previous), (manifest.round, manifest.digest)):
                if t:  # run.json stays
                    _keep(self.chain, t, digest, 2 * WINDOW)

    def _stash(self, round_number: int, data: bytes) -> None:
        with self._lock:
            _keep(self._raw, round_number, data, 2 * AHEAD)

    def _get_early(self, round_number: int) -> bytes | None:
        try:
            return self._get(round_number)
        except RunStopped:
            return None  # it is said when its turn comes

    def _get(self, round_number: int) -> bytes | None:
        try:
            return self.store.get(manifest_key(round_number), max_bytes=self.manifest_limit)
        except StoreRefused as reason:
            raise RunStopped(f"manifest {round_number} of this run: {reason}; the run stops here") from None

    def _is_signed(self, data: bytes, round_number: int) -> bool:
        try:
            run = self._stated_epoch(data).run
            closer, body = open_sealed(data, "manifest", run.run_id, run.keys)
        except Refused:
            return False
        return closer in run.closers and body.get("round") == round_number

    def _checked(self, data: bytes, round_number: int, before: Manifest | None) -> Manifest:
        """The manifest, and its link to its neighbours. Norms are compared where the one before is known."""
        closer, begins, run = "", before is None and round_number > 1, self.run
        try:
            run = self._stated_epoch(data).run
            closer, body = open_sealed(data, "manifest", run.run_id, run.keys)
            if closer not in run.closers:
                raise Refused(f"it is signed by {closer}, who may not close rounds")
            manifest = Manifest.from_dict(body, closer, sha256(data))
            if manifest.round != round_number:
                raise Refused(f"it is for round {manifest.round}")
            if self.chain.get(round_number - 1, manifest.previous) != manifest.previous:
                raise Refused(f"it is not chained to manifest {round_number - 1}")
            if self.chain.get(round_number, manifest.digest) != manifest.digest:
                raise Refused(f"it is not the one that manifest {round_number + 1} is chained to")
            self._check_epoch(manifest, before, begins)
            self._check_entries(manifest, body["entries"])
            if not begins:
                self._check_norms(manifest, before)
        except Refused as reason:
            by = f", by closer {closer}," if closer in run.closers else ""
            raise RunStopped(
                f"manifest {round_number} of this run{by} is not to be trusted: {reason}; the run stops here"
            ) from None
        rows = zip(manifest.entries, body["entries"], strict=True)
        return replace(manifest, entries=tuple(replace(entry, proved="commit" in row) for entry, row in rows))

    def _check_entries(self, manifest: Manifest, rows: Sequence[Mapping[str, Any]]) -> None:
        """`rows` are the entries as the manifest has them, with the commits of their authors."""
        names = [entry.replica for entry in manifest.entries]
        run, following = (self.membership.epoch(n).run for n in (manifest.epoch, manifest.next_epoch))
        if len(set(names)) < len(names) or not set(names) <= run.keys.keys():
            raise Refused("it does not list contributors of this run once each")
        strangers = {name for name, _ in manifest.refused} - run.keys.keys()
        if strangers := strangers | (set(manifest.members) - following.keys.keys()):
            raise Refused(f"it speaks of {min(strangers)!r}, who is not in this run")
        for entry, row in zip(manifest.entries, rows, strict=True):
            self._check_shards(entry)
            if "commit" in row:
                self._check_listed(manifest, entry, row)
            elif self.run.commits_in_manifests:
                raise Refused(f"it counts {entry.replica} without a commit that {entry.replica} signed")

    def _check_listed(self, manifest: Manifest, entry: Entry, row: Mapping[str, Any]) -> None:
        """What a closer lists of an update must be what its author signed."""
        try:
            keys = self.membership.epoch(manifest.epoch).run.keys
            signed = open_document(row["commit"], "commit", self.run.run_id, keys)
            body = self._check_signed(signed, entry.replica, manifest.round, manifest.anchor)
        except Refused as reason:
            raise Refused(f"it counts {entry.replica}, but {reason}") from None
        same = body["shards"] == row["shards"] and canonical(body["facts"]) == canonical(row["facts"])
        own = entry if same else Entry.from_dict(body)
        if (own.shards, own.facts) != (entry.shards, entry.facts):
            raise Refused(f"it does not list of {entry.replica} what {entry.replica} signed")

    def _check_norms(self, manifest: Manifest, previous: Manifest | None) -> None:
        if not self.run.commits_in_manifests:
            return  # closers followed another rule
        before = {entry.replica: entry.norm for entry in previous.entries} if previous else {}
        norms = {entry.replica: entry.norm for entry in manifest.entries}
        for name, reason in compare_norms(norms, before, self.run.recipe.bucket.norm_limit).refused.items():
            raise Refused(f"it counts {name}, but {reason}")


def gone(round_number: int) -> RunStopped:
    return RunStopped(f"manifest {round_number} of this run is gone; the run stops here")


def _keep(known: dict[int, T], key: int, value: T, most: int) -> None:
    """As the last of at most so many: what was kept longest ago goes."""
    known.pop(key, None)
    known[key] = value
    for old in [t for t in list(known)[: max(0, len(known) - most)] if t]:
        del known[old]


def check_pinned(run_digest: str, signer: Signer) -> None:
    """A key signs nothing of a run that its file does not name: run.json may have been replaced."""
    if signer.pinned and signer.pinned != run_digest:
        raise ConfigError(
            f"run.json in this bucket is not the one that the key of {signer.replica} was made for: it was "
            "replaced, or this is the bucket of another run"
        )


def manifest_key(round_number: int) -> str:
    return f"manifests/{round_number:06d}.json"
