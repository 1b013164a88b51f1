"""The epoch of each round: which replicas it has, by which keys, and which batches are theirs.

A manifest names the epoch of its own round and that of the next. So put-if-absent of the manifest settles
from which round on an epoch holds, and every member knows its round's epoch before it trains.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from isthmus.layout.deal import Deal
from isthmus.protocol.documents import EPOCH, Manifest, RunInfo
from isthmus.protocol.membership import Epoch, Membership
from isthmus.protocol.schema import check
from isthmus.protocol.trust import Refused, parse_document
from isthmus.store import Store


class Epochs(ABC):
    """What a chain of manifests says of the run's membership."""

    def __init__(self, store: Store, run: RunInfo) -> None:
        self.store, self.membership = store, Membership(store, run)

    @abstractmethod
    def known(self, round_number: int) -> Manifest | None:
        """The manifest of a round, if it was read before."""

    @abstractmethod
    def manifest(self, round_number: int) -> Manifest | None:
        """The manifest of a round, checked; None where it is not settled."""

    @property
    def run(self) -> RunInfo:
        """The run by the newest epoch that was read. What belongs to a round is asked by `at`."""
        return self.membership.run

    @property
    def names(self) -> frozenset[str]:
        """Everybody who ever belonged to it, as far as epochs were read."""
        return self.membership.names

    def at(self, round_number: int) -> RunInfo:
        """The run as it is in a round: who may contribute and close, by which keys."""
        return self.epoch_of(round_number).run

    def epoch_of(self, round_number: int) -> Epoch:
        """By its manifest, or by the one before it; of a round further ahead, the newest."""
        if not self.membership.owner or round_number <= 1:
            return self.membership.epochs[0]
        if found := self.known(round_number):
            return self.membership.epochs[found.epoch]
        before = self.known(round_number - 1) or self.manifest(round_number - 1)
        return self.membership.at(before.next_epoch, round_number) if before else self.membership.newest

    def first_round_of(self, epoch: int, low: int, high: int) -> int:
        """The first round from `low` to `high` that has the epoch or a later one; `high` has it. Epochs only
        grow, so halving finds it."""
        while low < high:
            middle = (low + high) // 2
            if self.epoch_of(middle).number >= epoch:
                high = middle
            else:
                low = middle + 1
        return low

    def deal(self, round_number: int, replica: str) -> Deal | None:
        """Which batches are the replica's in a round; None where it is not in it, or the fleet never
        changes."""
        run = self.at(round_number)
        sizes = {member.name: run.recipe.batch_of(member.config) for member in run.recipe.fleet()}
        if not run.owner or replica not in sizes:
            return None
        before = self.manifest(round_number - 1) if round_number > 1 else None
        steps, number = run.recipe.outer.inner_steps, list(sizes).index(replica)
        first, each = _sequences(run, before), list(sizes.values())
        begin = (round_number - 1) * steps
        return Deal(begin, steps, first, sum(each), sum(each[:number]), sizes[replica])

    def on_probation(self, round_number: int) -> dict[str, int]:
        """Whose updates to a round are only judged: replica -> rounds in which one passed. By the manifest
        before it; who came with an epoch that it does not name comes to it new."""
        before = self.manifest(round_number - 1) if round_number > 1 else None
        if before is None:
            return {}
        now = self.epoch_of(round_number)
        return _probation(before.probation, self.membership.epoch(before.next_epoch), now)

    # Of a manifest

    def in_epoch(self, manifest: Manifest) -> Manifest:
        """With the epoch of its round, and that of the next: the newest that is written. Only who is in that
        one is awaited in it."""
        if not self.membership.owner:
            return manifest
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
            probation=_probation(manifest.probation, now, following),
        )

    def _dealt(self, run: RunInfo, before: Manifest | None) -> tuple[int, int]:
        """What was dealt up to a round, with all that its epoch's replicas take in its inner steps: batches
        of inner.batch sequences, and sequences beside them."""
        taken = run.recipe.outer.inner_steps * run.recipe.step_sequences
        return divmod(_sequences(run, before) + taken, run.recipe.inner.batch)

    def _stated_epoch(self, data: bytes) -> Epoch:
        """The epoch that a manifest names for its round, by which its signature is checked; whether it is
        that round's is asked afterwards."""
        if not self.membership.owner:
            return self.membership.newest
        try:
            body = parse_document(data)["body"]
        except (KeyError, TypeError):
            raise Refused("the manifest is not signed: it is not a document of ours") from None
        check(body, {"epoch": EPOCH, "next_epoch": EPOCH})
        self.membership.epoch(body["next_epoch"])
        return self.membership.epoch(body["epoch"])

    def _check_epoch(self, manifest: Manifest, before: Manifest | None, begins: bool) -> None:
        """Is it the epoch that the manifest before names, and are the next one, and what was dealt, right?"""
        if not self.membership.owner:
            if manifest.epoch or manifest.next_epoch:
                raise Refused("it names an epoch, and this run's membership does not change")
            return
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


def _sequences(run: RunInfo, before: Manifest | None) -> int:
    """That were dealt up to the end of a round."""
    return before.dealt * run.recipe.inner.batch + before.dealt_rest if before else 0


def has_probation(run: RunInfo) -> bool:
    """Is there probation in this run? Only where some closer has the whole model, and can score."""
    score = run.recipe.score
    whole = {member.name for member in run.recipe.fleet() if member.config.parts == 1}
    return run.scores and score.batches > 0 and score.probation > 0 and bool(whole & set(run.closers))


def _probation(so_far: Mapping[str, int], before: Epoch, after: Epoch) -> dict[str, int]:
    """With those who came since `before`, or came back: a name that was revoked meanwhile is a newcomer's."""
    if not has_probation(after.run):
        return {}
    keys, needed = after.run.keys, after.run.recipe.score.probation
    new = [n for n in keys if n not in before.run.keys or after.ended.get(n, -1) > before.number]
    return {
        name: passed
        for name, passed in {**so_far, **dict.fromkeys(new, 0)}.items()
        if name in keys and passed < needed
    }
