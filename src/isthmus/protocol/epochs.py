"""The epoch of each round: its replicas, their keys, and their batches.

A manifest names the epochs of its own round and of the next. So put-if-absent of the manifest settles when an
epoch begins, and every member knows its round's epoch before it trains.
"""

from abc import ABC, abstractmethod

from msgspec.structs import replace

from isthmus.layout.deal import Deal
from isthmus.protocol.documents import EpochsOfManifest, Manifest, RunInfo, decode
from isthmus.protocol.membership import Epoch, Membership
from isthmus.protocol.trust import Refused, raw_body
from isthmus.store import Store


class Epochs(ABC):
    """The run's membership according to a chain of manifests."""

    def __init__(self, store: Store, run: RunInfo) -> None:
        self.store, self.membership = store, Membership(store, run)

    @abstractmethod
    def known(self, round_number: int) -> Manifest | None:
        """The manifest of a round, if it has been read."""

    @abstractmethod
    def manifest(self, round_number: int) -> Manifest | None:
        """The manifest of a round, checked; None if the round is not settled."""

    @property
    def run(self) -> RunInfo:
        """The run by the newest epoch that was read. Use `at` for anything that belongs to a round."""
        return self.membership.run

    @property
    def names(self) -> frozenset[str]:
        """All replicas that ever belonged to the run, in the epochs read so far."""
        return self.membership.names

    def at(self, round_number: int) -> RunInfo:
        """The run in a given round: its contributors, closers and keys."""
        return self.epoch_of(round_number).run

    def epoch_of(self, round_number: int) -> Epoch:
        """The epoch that a round's manifest, or the one before, names; further ahead, the newest."""
        if round_number <= 1:
            return self.membership.epochs[0]
        if found := self.known(round_number):
            return self.membership.epochs[found.epoch]
        before = self.known(round_number - 1) or self.manifest(round_number - 1)
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

    def deal(self, round_number: int, replica: str) -> Deal | None:
        """The replica's batches in a round; None if it has no share of the data."""
        run = self.at(round_number)
        before = self.manifest(round_number - 1) if round_number > 1 else None
        sizes = _batches(run, before)
        if replica not in sizes:
            return None
        steps, number = run.recipe.outer.inner_steps, list(sizes).index(replica)
        first, each = _sequences(run, before), list(sizes.values())
        begin = (round_number - 1) * steps
        return Deal(begin, steps, first, sum(each), sum(each[:number]), sizes[replica])

    def revoked(self, replica: str, last: int) -> str:
        """The message for a replica that the owner revoked before round `last`."""
        ended = self.membership.newest.ended.get(replica, 0)
        round_number = self.first_round_of(ended, 1, last) - 1
        return f"{replica}: you were revoked by the owner in round {round_number}"

    # Of a manifest

    def in_epoch(self, manifest: Manifest) -> Manifest:
        """Add the epoch of the manifest's round and, for the next round, the newest epoch written. Keep only
        its replicas in `members` and `dealt_in`."""
        now, following = self.epoch_of(manifest.round), self.membership.newest
        dealt, rest = self._dealt(now.run, self.known(manifest.round - 1))
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

    def _dealt(self, run: RunInfo, before: Manifest | None) -> tuple[int, int]:
        """The data assigned up to and including a round, at every inner step of every `dealt_in` replica:
        batches of inner.batch sequences, and remaining sequences."""
        taken = run.recipe.outer.inner_steps * sum(_batches(run, before).values())
        return divmod(_sequences(run, before) + taken, run.recipe.inner.batch)

    def _stated_epoch(self, data: bytes) -> Epoch:
        """The epoch that a manifest names for its round; its keys check the signature. `_check_epoch` then
        checks that the round has this epoch."""
        stated = decode(raw_body(data, "manifest"), EpochsOfManifest, "manifest")
        self.membership.epoch(stated.next_epoch)
        return self.membership.epoch(stated.epoch)

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
        if (manifest.dealt, manifest.dealt_rest) != self._dealt(epoch.run, before):
            rest = f" and {manifest.dealt_rest} sequences" if manifest.dealt_rest else ""
            raise Refused(f"it says that {manifest.dealt} batches{rest} were dealt")
        shareless = epoch.run.keys.keys() - _batches(epoch.run, before).keys()
        if shareless := shareless & {entry.replica for entry in manifest.entries}:
            raise Refused(f"it counts {min(shareless)}, who had no share of its data")


def _batches(run: RunInfo, before: Manifest | None) -> dict[str, int]:
    """The replicas in `dealt_in`, in the fleet's order -> sequences per inner step. All in round 1."""
    fleet = run.recipe.fleet()
    return {
        m.name: run.recipe.batch_of(m.config) for m in fleet if before is None or m.name in before.dealt_in
    }


def _sequences(run: RunInfo, before: Manifest | None) -> int:
    """Sequences assigned up to the end of a round."""
    return before.dealt * run.recipe.inner.batch + before.dealt_rest if before else 0
