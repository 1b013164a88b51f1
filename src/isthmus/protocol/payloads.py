"""Updates in the bucket: written once, never replaced, and readable for as long as a round counts them."""

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from isthmus.protocol.documents import Commit, Shard
from isthmus.protocol.manifests import Manifests
from isthmus.protocol.trust import Refused, sha256
from isthmus.store import StoreError, StoreRefused

if TYPE_CHECKING:
    from isthmus.store import Info


class Payloads(Manifests):
    """Shards and commits of all replicas.

    Any object here may be another replica's. If one cannot be read, its author is at fault: Refused or
    StoreRefused, with the reason. A StoreError concerns the store as a whole.
    """

    def put_shard(self, round_number: int, index: int, data: bytes) -> Shard:
        shard = Shard(index, sha256(data), len(data))
        self.store.create(self.shard_key(self.signer.replica, round_number, shard), data)
        return shard

    def get_shard(self, replica: str, round_number: int, shard: Shard) -> bytes:
        """The shard's bytes; Refused if it is missing, oversized, or differs from its commit."""
        return self._checked_shard(self.shard_key(replica, round_number, shard), shard)

    def has_payloads(self, round_number: int) -> bool:
        """Whether a settled round's updates can still be read. One shard shows it: sweeps take all."""
        manifest = self.manifest(round_number)
        if manifest is None:
            return False
        if not manifest.entries:
            return True
        entry = manifest.entries[0]
        return self.is_object(self.shard_key(entry.replica, round_number, entry.shards[0]))

    def commit(self, commit: Commit) -> bool:
        """Commit an update, or state that there is none. The first commit of a round stands: False if it
        lists other shards.

        After a kill we commit again and find our own. A commit that no closer would accept is replaced, if
        the bucket allows it.
        """
        sealed = self.signer.seal("commit", self.run.run_id, commit)
        replica = self.signer.replica
        key = self.commit_key(replica, commit.round)
        if self.store.create(key, sealed):
            return True
        try:
            there = self.get_commit(replica, commit.round)
            first = self.check_commit(there or b"", replica, commit.round, commit.anchor)
            return first.shards == commit.shards
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
        """The replicas with a commit to a round, valid or not. A listing may lag."""
        return set(self.scan_commits(round_number))

    def scan_commits(self, round_number: int) -> "dict[str, Info]":
        """The commits of a round, by replica: one listing. If the folder is full of other objects, it makes
        one request per replica instead."""
        names = self.at(round_number).keys
        keys = {name: self.commit_key(name, round_number) for name in sorted(names)}
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

    def commit_key(self, replica: str, round_number: int) -> str:
        return f"commits/{round_number:06d}/{replica}.json"

    def is_object(self, key: str) -> bool:
        """Whether an object has this key."""
        with suppress(StoreRefused):
            return self.store.foreign(lambda: self.store.head(key)) is not None
        return False

    def _theirs(self, key: str, max_bytes: int) -> bytes | None:
        """An object that another may have written, or None. StoreRefused: only this one is unreadable."""
        return self.store.foreign(lambda: self.store.get(key, max_bytes=max_bytes))

    def _check_size(self, shard: Shard) -> None:
        if not 0 <= shard.index < len(self.sizes) or shard.size != self.sizes[shard.index]:
            raise Refused(f"shard {shard.index} is said to have {shard.size} bytes: not a size of this run")

    def _checked_shard(self, key: str, shard: Shard) -> bytes:
        self._check_size(shard)
        try:
            data = self._theirs(key, shard.size)
        except StoreRefused as error:
            raise Refused(f"shard {shard.index}: {error}", "unreadable") from None
        if data is None:
            raise Refused(f"shard {shard.index} is missing", "missing")
        if len(data) != shard.size or sha256(data) != shard.digest:
            raise Refused(f"shard {shard.index} does not match its commit", "changed")
        return data
