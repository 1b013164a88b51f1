"""The chain of manifests: the updates that count in each round, and the epoch of each round.

A manifest that a closer signed is true. A reader checks its signature, the signer's right to close, its
round, its epoch and the link to the previous manifest. Closers judge commits and updates (`judge`).

A manifest names the epochs of its own round and of the next. So put-if-absent of the manifest settles when an
epoch begins, and every member knows its round's epoch before it trains.
"""

import re
import threading
from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from isthmus.errors import RunError, RunStopped
from isthmus.protocol.cut import Cut
from isthmus.protocol.documents import EpochsOfManifest, Manifest, RunInfo, decode, encode
from isthmus.protocol.membership import Epoch, Membership
from isthmus.protocol.objects import Objects
from isthmus.protocol.shares import batches_of, dealt_up_to
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, raw_body, sha256
from isthmus.store import StoreRefused
from isthmus.store.together import together

KEPT = 64  # manifests: closers look back at the last rounds
AHEAD = 16  # manifests that one batch requests
MOST_BEYOND = 10  # objects beyond a gap that are checked


class Manifests:
    """The manifests of one run, read and checked from any round on, in the membership's epochs."""

    def __init__(self, objects: Objects, membership: Membership, cut: Cut) -> None:
        self.objects, self.store, self.membership, self.cut = objects, objects.store, membership, cut
        self.kept: dict[int, Manifest] = {}  # those read most recently
        self.newest = 0  # a settled round; there may be later ones
        self.listed = False
        self._lock = threading.Lock()

    @property
    def rounds(self) -> int:
        """Rounds of the whole run, by the newest epoch that was read."""
        return self.membership.run.recipe.outer.rounds

    @property
    def limit(self) -> int:
        """Bytes of a manifest: it holds an entry for each replica, and reasons for refusals."""
        return max(MAX_DOCUMENT_BYTES, (self.cut.commit_limit + 2048) * len(self.membership.names))

    # Epochs

    def at(self, round_number: int) -> RunInfo:
        """The run in a given round: its contributors, closers and keys."""
        return self.epoch_of(round_number).run

    def epoch_of(self, round_number: int) -> Epoch:
        """The epoch that a round's manifest, or the one before, names; further ahead, the newest."""
        if round_number <= 1:
            return self.membership.epochs[0]
        if found := self.known(round_number):
            return self.membership.epochs[found.epoch]
        before = self.manifest(round_number - 1)
        return self.membership.at(before.next_epoch, round_number) if before else self.membership.newest

    def first_round_of(self, epoch: int, low: int, high: int) -> int:
        """The first round from `low` to `high` with this epoch or a later one; `high` has it. Epochs only
        grow, so bisection finds it."""
        while low < high:
            middle = (low + high) // 2
            if self.epoch_of(middle).number >= epoch:
                high = middle
            else:
                low = middle + 1
        return low

    # Writing

    def create(self, manifest: Manifest) -> bool:
        """Create the manifest; True if ours won. Only the bucket decides."""
        manifest = replace(self.in_epoch(manifest), previous=self.digest_of(manifest.round - 1))
        sealed = self.objects.seal("manifest", manifest)
        try:  # a manifest that readers refuse would stop the run: never write one
            decode(encode(manifest), Manifest, "manifest")
            if len(sealed) > self.limit:
                raise Refused(f"it has {len(sealed)} bytes; at most {self.limit} are accepted")
            self._check_entries(manifest)
        except Refused as reason:
            raise RunError(
                f"round {manifest.round} cannot be closed: its manifest would not be taken: {reason}"
            ) from None
        return self.store.create(manifest_key(manifest.round), sealed)

    def in_epoch(self, manifest: Manifest) -> Manifest:
        """Add the epoch of the manifest's round and, for the next round, the newest epoch written. Keep only
        its replicas in `members` and `dealt_in`."""
        now, following = self.epoch_of(manifest.round), self.membership.newest
        dealt, rest = dealt_up_to(now.run, self.known(manifest.round - 1))
        return replace(
            manifest,
            epoch=now.number,
            next_epoch=following.number,
            membership=following.digest,
            dealt=dealt,
            dealt_rest=rest,
            members=tuple(name for name in manifest.members if name in following.run.keys),
            dealt_in=tuple(name for name in manifest.dealt_in if name in following.run.keys),
        )

    # Reading

    def manifest(self, round_number: int) -> Manifest | None:
        """The manifest of a settled round; None while it is open. A forged one stops the run."""
        if found := self.kept.get(round_number):
            return found
        if not 0 < round_number <= self.rounds:
            return None  # an object there does not belong to this run
        data = self._get(round_number)
        if data is not None:
            return self._take(round_number, data)
        if round_number <= self.newest:
            raise gone(round_number)
        return None

    def settled(self, round_number: int) -> Manifest:
        """The manifest of a round that is settled; RunStopped if it is gone."""
        if (manifest := self.manifest(round_number)) is None:
            raise gone(round_number)
        return manifest

    def known(self, round_number: int) -> Manifest | None:
        """The manifest if it is cached; makes no request."""
        return self.kept.get(round_number)

    def between(self, first: int, last: int) -> Iterator[Manifest]:
        """Yield settled rounds in order, several requests at a time; RunStopped if one is gone."""
        for begin in range(first, last + 1, AHEAD):
            numbers = range(begin, min(begin + AHEAD, last + 1))
            missing = [t for t in numbers if t not in self.kept]
            read = dict(zip(missing, together([partial(self._get, t) for t in missing]), strict=True))
            for t in numbers:
                data = read.get(t)
                yield self.settled(t) if data is None else self._take(t, data)

    def digest_of(self, round_number: int) -> str:
        """The digest of a settled round's manifest; of run.json for 0."""
        return self.settled(round_number).digest if round_number else self.objects.digest

    def check_confirmed(self, round_number: int, digest: str) -> None:
        """Raise Refused unless the next manifest states this digest of theta^(t)."""
        following = self.manifest(round_number + 1)
        if following is None:
            raise Refused(f"round {round_number + 1}, which confirms it, is not settled yet")
        if following.anchor != digest:
            raise Refused(f"round {round_number + 1} began from another one")

    def _take(self, round_number: int, data: bytes) -> Manifest:
        manifest = self._checked(data, round_number)
        with self._lock:  # evict the oldest
            self.kept.pop(round_number, None)
            self.kept[round_number] = manifest
            for old in list(self.kept)[: max(0, len(self.kept) - KEPT)]:
                del self.kept[old]
        self.newest = max(self.newest, round_number)
        return manifest

    def _get(self, round_number: int) -> bytes | None:
        try:
            return self.store.get(manifest_key(round_number), max_bytes=self.limit)
        except StoreRefused as reason:
            raise RunStopped(f"manifest {round_number} of this run: {reason}; the run stops here") from None

    # Checking

    def _checked(self, data: bytes, round_number: int) -> Manifest:
        """Return the manifest, checked together with its links to known neighbours."""
        closer, closers = "", ()
        before, after = self.known(round_number - 1), self.known(round_number + 1)
        previous = self.objects.digest if round_number == 1 else before.digest if before else ""
        try:
            # The manifest names its epoch, whose keys check its signature. `_check_epoch` then checks that
            # the round has this epoch.
            stated = decode(raw_body(data, "manifest"), EpochsOfManifest, "manifest")
            self.membership.epoch(stated.next_epoch)
            run = self.membership.epoch(stated.epoch).run
            closer, manifest = self.objects.open(data, "manifest", Manifest, run.keys)
            closers = run.closers
            if closer not in closers:
                raise Refused(f"it is signed by {closer}, who may not close rounds")
            manifest = replace(manifest, closer=closer, digest=sha256(data))
            if manifest.round != round_number:
                raise Refused(f"it is for round {manifest.round}")
            if previous and manifest.previous != previous:
                raise Refused(f"it is not chained to manifest {round_number - 1}")
            if after and after.previous != manifest.digest:
                raise Refused(f"it is not the one that manifest {round_number + 1} is chained to")
            self._check_epoch(manifest, before, begins=before is None and round_number > 1)
            self._check_entries(manifest)
        except Refused as reason:
            by = f", by closer {closer}," if closer in closers else ""
            raise RunStopped(
                f"manifest {round_number} of this run{by} is not to be trusted: {reason}; the run stops here"
            ) from None
        return manifest

    def _check_epoch(self, manifest: Manifest, before: Manifest | None, begins: bool) -> None:
        """Check the epoch against the previous manifest, and the next epoch and the assigned data."""
        if manifest.next_epoch < manifest.epoch:
            raise Refused(f"it goes back from epoch {manifest.epoch} to {manifest.next_epoch}")
        if self.membership.epoch(manifest.next_epoch).digest != manifest.membership:
            raise Refused(f"it names another membership document {manifest.next_epoch} than the bucket's")
        if begins:
            return
        epoch = self.membership.at(before.next_epoch if before else 0, manifest.round)
        if manifest.epoch != epoch.number:
            raise Refused(f"it is closed under epoch {manifest.epoch}, and its round is in {epoch.number}")
        if (manifest.dealt, manifest.dealt_rest) != dealt_up_to(epoch.run, before):
            rest = f" and {manifest.dealt_rest} sequences" if manifest.dealt_rest else ""
            raise Refused(f"it says that {manifest.dealt} batches{rest} were dealt")
        shareless = epoch.run.keys.keys() - batches_of(epoch.run, before).keys()
        if shareless := shareless & {entry.replica for entry in manifest.entries}:
            raise Refused(f"it counts {min(shareless)}, who had no share of its data")

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
            self.cut.check(entry.shards)

    # How far the run has come

    def last_round(self) -> int:
        """The newest settled round; 0 before the first. The first call lists; later calls send HEAD for the
        next manifest."""
        if not self.listed:
            self._list()
            self.listed = True
        while self.newest < self.rounds and self._is_there(self.newest + 1):
            self.newest += 1
        return self.newest

    def _list(self) -> None:
        """Find the newest manifest of the chain. A signed manifest beyond a gap proves that the ones in the
        gap are gone."""
        keys, rounds = set(self.store.list("manifests/")), self.rounds
        found = {int(m[1]) for key in keys if (m := re.fullmatch(r"manifests/([0-9]{6,7})\.json", key))}
        found -= {t for t in found if manifest_key(t) not in keys}  # we never write names like 0000003.json
        while self.newest < rounds and (self.newest + 1 in found or self._is_there(self.newest + 1)):
            self.newest += 1  # a listing may lag behind
        for t in sorted(t for t in found if self.newest + 1 < t <= rounds)[:MOST_BEYOND]:
            if self._is_ours(t):
                missing = self.newest + 1
                raise RunStopped(f"manifest {missing} of this run is gone, before {t}; the run stops here")

    def _is_there(self, round_number: int) -> bool:
        return self.store.head(manifest_key(round_number)) is not None

    def _is_ours(self, round_number: int) -> bool:
        try:
            return bool(self._checked(self._get(round_number) or b"", round_number))
        except RunStopped:
            return False

    def settled_at(self, round_number: int, deadline: float | None = None) -> float | None:
        """When round `round_number` was settled, by the store's clock; for 0, when the run was created."""
        key = "run.json" if round_number == 0 else manifest_key(round_number)
        info = self.store.head(key, deadline=deadline)
        return info.modified_unix_seconds if info else None


def gone(round_number: int) -> RunStopped:
    return RunStopped(f"manifest {round_number} of this run is gone; the run stops here")


def manifest_key(round_number: int) -> str:
    return f"manifests/{round_number:06d}.json"


def other_start(manifest: Manifest, anchor: str) -> RunStopped:
    """The error for a manifest whose anchor differs from what replaying the previous rounds gives."""
    return RunStopped(
        f"manifest {manifest.round} of this run, by closer {manifest.closer}, is not to be trusted: it "
        f"starts from anchor {manifest.anchor[:16]}, but replaying the rounds before it gives "
        f"{anchor[:16]}; the run stops here"
    )
