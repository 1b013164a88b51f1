"""Updates in the bucket: written once, never replaced, and readable for as long as a round counts them."""

from contextlib import suppress
from typing import TYPE_CHECKING

from isthmus.protocol.cut import Cut
from isthmus.protocol.documents import Commit, Shard
from isthmus.protocol.manifests import Manifests
from isthmus.protocol.objects import Objects
from isthmus.protocol.trust import OtherAnchor, Refused, sha256
from isthmus.store import StoreError, StoreRefused

if TYPE_CHECKING:
    from isthmus.store import Info


class Payloads:
    """Shards and commits of all replicas.

    Any object here may be another replica's. If one cannot be read, its author is at fault: Refused or
    StoreRefused, with the reason. A StoreError concerns the store as a whole.
    """

    def __init__(self, objects: Objects, manifests: Manifests, cut: Cut) -> None:
        self.objects, self.store, self.manifests, self.cut = objects, objects.store, manifests, cut

    # Shards

    def put_shard(self, round_number: int, index: int, data: bytes) -> Shard:
        shard = Shard(index, sha256(data), len(data))
        self.store.create(shard_key(self.objects.signer.replica, round_number, shard), data)
        return shard

    def get_shard(self, replica: str, round_number: int, shard: Shard) -> bytes:
        """The shard's bytes; Refused if it is missing, oversized, or differs from its commit."""
        try:
            data = self.objects.read(shard_key(replica, round_number, shard), shard.size)
        except StoreRefused as error:
            raise Refused(f"shard {shard.index}: {error}", "unreadable") from None
        if data is None:
            raise Refused(f"shard {shard.index} is missing", "missing")
        if len(data) != shard.size or sha256(data) != shard.digest:
            raise Refused(f"shard {shard.index} does not match its commit", "changed")
        return data

    def has_shard(self, replica: str, round_number: int, shard: Shard) -> bool:
        return self.objects.exists(shard_key(replica, round_number, shard))

    def has_payloads(self, round_number: int) -> bool:
        """Whether a settled round's updates can still be read. One shard shows it: sweeps take all."""
        manifest = self.manifests.manifest(round_number)
        if manifest is None or not manifest.entries:
            return manifest is not None
        entry = manifest.entries[0]
        return self.has_shard(entry.replica, round_number, entry.shards[0])

    # Commits

    def commit(self, commit: Commit) -> bool:
        """Commit an update, or state that there is none. The first commit of a round stands: False if it
        lists other shards.

        After a kill we commit again and find our own. A commit that no closer would accept is replaced, if
        the bucket allows it.
        """
        sealed, replica = self.objects.seal("commit", commit), self.objects.signer.replica
        key = commit_key(replica, commit.round)
        if self.store.create(key, sealed):
            return True
        with suppress(Refused, StoreRefused):
            there = self.get_commit(replica, commit.round)
            first = self.check_commit(there or b"", replica, commit.round, commit.anchor)
            return first.shards == commit.shards
        try:
            self.store.put(key, sealed)
        except StoreError as error:
            if error.kind != "denied":
                raise
            return False
        return True

    def get_commit(self, replica: str, round_number: int) -> bytes | None:
        return self.objects.read(commit_key(replica, round_number), self.cut.commit_limit)

    def check_commit(self, data: bytes, replica: str, round_number: int, anchor: str) -> Commit:
        """The replica's commit to this round from this anchor, or Refused with the reason."""
        if len(data) > (limit := self.cut.commit_limit):
            raise Refused(f"the commit has {len(data)} bytes; at most {limit} are accepted")
        signer, commit = self.objects.open(data, "commit", Commit, self.manifests.at(round_number).keys)
        if signer != replica:
            raise Refused(f"the commit of {replica} is signed by {signer}", "unsigned")
        if commit.round != round_number:
            raise Refused(f"the commit is for round {commit.round}, not {round_number}", "other_round")
        if commit.anchor != anchor:
            raise OtherAnchor("the update starts from another anchor than this round's", commit.anchor)
        if not commit.skip:
            self.cut.check(commit.shards)
        elif commit.shards:
            raise Refused("it says that it gives nothing, and lists shards")
        before = self.manifests.known(round_number - 1)
        if before and replica not in before.dealt_in and not commit.skip:
            raise Refused("it had no share of this round's data", "no_share")
        return commit

    def scan_commits(self, round_number: int) -> "dict[str, Info]":
        """The commits of a round by replica, valid or not: one listing, which may lag."""
        listed = self.store.scan(f"commits/{round_number:06d}")
        keys = {name: commit_key(name, round_number) for name in sorted(self.manifests.at(round_number).keys)}
        return {name: listed[key] for name, key in keys.items() if key in listed}

    def committed(self, round_number: int) -> set[str]:
        """The replicas with a commit to a round."""
        return set(self.scan_commits(round_number))


def shard_key(replica: str, round_number: int, shard: Shard) -> str:
    return f"payloads/{replica}/{round_number:06d}/{shard.index}-{shard.digest}"


def commit_key(replica: str, round_number: int) -> str:
    return f"commits/{round_number:06d}/{replica}.json"
