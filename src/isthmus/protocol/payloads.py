"""Updates in the bucket: written once, never replaced, and readable for as long as a round counts them."""

from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from isthmus.protocol.documents import Entry, Manifest, Shard
from isthmus.protocol.history import History
from isthmus.protocol.trust import Refused, sha256
from isthmus.store import StoreError, StoreRefused

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger
    from isthmus.protocol.repairs import Repairs
    from isthmus.store import Info


class Payloads(History):
    """Shards and commits of all replicas, and the copies that closers keep of what they judge.

    Every object here may be another's. One that cannot be read is its author's fault: Refused or
    StoreRefused, with the reason. A StoreError is of the store as a whole.
    """

    @cached_property
    def repairs(self) -> "Repairs":
        """Which rounds are void, by whose decision."""
        from isthmus.protocol.repairs import Repairs  # it needs a whole ledger

        return Repairs(cast("Ledger", self))

    def put_shard(self, round_number: int, index: int, data: bytes) -> Shard:
        shard = Shard(index, sha256(data), len(data))
        self._put_once(self.shard_key(self.signer.replica, round_number, shard), data)
        return shard

    def get_shard(self, replica: str, round_number: int, shard: Shard) -> bytes:
        """The shard's bytes, or Refused when it is missing, oversized, or not what its commit says."""
        return self._checked_shard(self.shard_key(replica, round_number, shard), shard)

    def counted_shard(self, manifest: Manifest, replica: str, shard: Shard) -> bytes:
        """A shard that a round counts. Where its author has changed or removed it, a closer has a copy; where
        those are gone too, whoever was asked for one may have put it (`rescue`)."""
        try:
            return self._author_or_closer(manifest, replica, shard)
        except Refused:
            keys = [self.kept_key(name, manifest.round, shard) for name in sorted(self.names)]
            there = self.store.together([partial(self.is_object, key) for key in keys])
            for key in (key for key, found in zip(keys, there, strict=True) if found):
                with suppress(Refused):
                    return self._checked_shard(key, shard)
            raise

    def _author_or_closer(self, manifest: Manifest, replica: str, shard: Shard) -> bytes:
        try:
            return self.get_shard(replica, manifest.round, shard)
        except Refused as reason:
            for closer in dict.fromkeys(
                (manifest.closer, *self.at(manifest.round).closers, *self.run.closers)
            ):
                with suppress(Refused):
                    return self._checked_shard(self.kept_key(closer, manifest.round, shard), shard)
            raise reason

    def lost_shards(self, manifest: Manifest, most: int = 1000) -> list[tuple[str, Shard, str]]:
        """(author, shard, reason) of what a round counts and cannot be read anywhere; at most so many."""
        lost: list[tuple[str, Shard, str]] = []
        for entry in manifest.entries:
            for shard in entry.shards:
                try:
                    self.counted_shard(manifest, entry.replica, shard)
                except Refused as reason:
                    lost.append((entry.replica, shard, str(reason)))
                    if len(lost) == most:
                        return lost
        return lost

    def has_payloads(self, round_number: int) -> bool:
        """Can a settled round's updates still be read? They are swept together, so one shard tells."""
        manifest = self.manifest(round_number)
        if manifest is None:
            return False
        entry = manifest.entries[0]
        try:
            self._author_or_closer(manifest, entry.replica, entry.shards[0])
        except Refused:
            return False
        return True

    def keep_shard(self, round_number: int, shard: Shard, data: bytes) -> None:
        """Put a copy of another's shard, which a round counts, below our own prefix."""
        self._put_once(self.kept_key("", round_number, shard), data)

    def copy_shard(self, replica: str, round_number: int, shard: Shard) -> bool:
        """Copy another's shard below our own prefix, inside the store: one request, and no bytes come here.

        False where this one cannot be copied so; Refused where there is none.
        """
        self._check_size(shard)
        source, kept = self.shard_key(replica, round_number, shard), self.kept_key("", round_number, shard)
        with suppress(StoreRefused):
            if not self.store.foreign(lambda: self.store.copy(source, kept, max_bytes=shard.size)):
                raise Refused(f"shard {shard.index} is missing")
            return True
        return False

    def read_copy(self, replica: str, round_number: int, shard: Shard, copied: bool) -> bytes:
        """The bytes of our own copy: what is judged is what stays. Where it was not `copied`, we put it."""
        kept = self.kept_key("", round_number, shard)
        if copied:
            return self._checked_shard(kept, shard)
        data = self.get_shard(replica, round_number, shard)
        self._put_once(kept, data)
        return data

    def commit(self, round_number: int, incarnation: str, anchor: str, entry: Entry) -> bool:
        """Say that an update is whole. The first commit of a round stands: False where it lists other shards.

        After a kill we commit again and find our own. One that no closer would take is replaced, where the
        bucket lets us.
        """
        body = entry.to_dict() | {"round": round_number, "anchor": anchor, "incarnation": incarnation}
        sealed = self.signer.seal("commit", self.run.run_id, body)
        replica = self.signer.replica
        key = self.commit_key(replica, round_number)
        if self.store.create(key, sealed):
            return True
        try:
            there = self.get_commit(replica, round_number)
            return self.check_commit(there or b"", replica, round_number, anchor).shards == entry.shards
        except (Refused, StoreRefused):
            pass
        try:
            self.store.put(key, sealed)
        except StoreError as error:
            if error.kind != "denied":
                raise
            return False
        return True

    def get_commit(self, replica: str, round_number: int) -> bytes | None:
        return self._theirs(self.commit_key(replica, round_number), self.commit_limit)

    def committed(self, round_number: int) -> set[str]:
        """Whose commits to a round are there, whatever is in them. A listing may lag."""
        return set(self.scan_commits(round_number))

    def scan_commits(self, round_number: int) -> "dict[str, Info]":
        """By replica. One listing; in older runs, and where somebody has filled the place with other objects,
        one request for each replica."""
        names = self.at(round_number).keys
        keys = {name: self.commit_key(name, round_number) for name in sorted(names)}
        if self.run.commits_by_round:
            with suppress(StoreRefused):
                listed = self.store.scan(f"commits/{round_number:06d}", most=2 * len(keys) + 1000)
                return {name: listed[key] for name, key in keys.items() if key in listed}
        found = self.store.together([partial(self._commit_info, name, round_number) for name in keys])
        return {name: info for name, info in zip(keys, found, strict=True) if info}

    def _commit_info(self, replica: str, round_number: int) -> "Info | None":
        with suppress(StoreRefused):
            return self.store.foreign(lambda: self.store.head(self.commit_key(replica, round_number)))
        return None

    def shard_key(self, replica: str, round_number: int, shard: Shard) -> str:
        return f"payloads/{replica}/{round_number:06d}/{shard.index}-{shard.digest}"

    def kept_key(self, closer: str, round_number: int, shard: Shard) -> str:
        """A closer's copy; "" is ourselves. By hash alone: the same bytes may be of several authors."""
        closer = closer or self.signer.replica
        return f"payloads/{closer}/{round_number:06d}/kept-{shard.index}-{shard.digest}"

    def commit_key(self, replica: str, round_number: int) -> str:
        if not self.run.commits_by_round:
            return f"payloads/{replica}/{round_number:06d}/commit.json"
        return f"commits/{round_number:06d}/{replica}.json"

    def get_document(self, key: str, max_bytes: int) -> bytes | None:
        """One that is no part of a round's course; StoreRefused where it cannot be read."""
        return self._theirs(key, max_bytes)

    def is_object(self, key: str) -> bool:
        """Is anything there?"""
        with suppress(StoreRefused):
            return self.store.foreign(lambda: self.store.head(key)) is not None
        return False

    def _theirs(self, key: str, max_bytes: int) -> bytes | None:
        """An object that another may have written, or None. StoreRefused: it alone cannot be read."""
        return self.store.foreign(lambda: self.store.get(key, max_bytes=max_bytes))

    def _put_once(self, key: str, data: bytes) -> None:
        """Only if absent. Where other bytes lie under the hash of ours, a power cut has spoilt the write."""
        if not self.store.create(key, data):
            self.store.put(key, data)

    def _check_size(self, shard: Shard) -> None:
        if not 0 <= shard.index < len(self.sizes) or shard.size != self.sizes[shard.index]:
            raise Refused(f"shard {shard.index} is said to have {shard.size} bytes: not a size of this run")

    def _checked_shard(self, key: str, shard: Shard) -> bytes:
        self._check_size(shard)
        try:
            data = self._theirs(key, shard.size)
        except StoreRefused as error:
            raise Refused(f"shard {shard.index}: {error}") from None
        if data is None:
            raise Refused(f"shard {shard.index} is missing")
        if len(data) != shard.size or sha256(data) != shard.digest:
            raise Refused(f"shard {shard.index} does not match its commit")
        return data
