"""Start a process: restore the newest checkpoint that all processes of its replica have, or begin from the
bucket. The ordinary loop then repeats what comes after the checkpoint."""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.model.digest import shard_digest
from isthmus.protocol.missing import LedPast
from isthmus.protocol.trust import Refused
from isthmus.replica.control_group import agree, all_true, share_json, whole_number, whole_numbers
from isthmus.runtime.checkpoint import Files, Place
from isthmus.runtime.trainer import Trainer
from isthmus.store import StoreError
from isthmus.store.together import together

AT_ONCE = 64  # manifests that one batch requests


class Way(IntEnum):
    """How a process with a restored checkpoint reaches the others' anchor."""

    ROUNDS = 0  # round by round
    LATER_ANCHOR = 1  # from a later anchor; the feedback stays
    EMPTIED = 2


class Recovery:
    """Restores a trainer's position in the run (docs/protocol.md, Crash points). All processes of a replica
    take the same steps together."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def resume(self) -> int:
        """Restore the state on this disk, or start from the bucket; return how many rounds are done."""
        trainer = self.trainer
        found = self._newest()
        if found is None:
            return self._join()
        place, files = found
        trainer.restore(place, files)
        at = f"after {place.num_steps} of its inner steps" if place.num_steps else "at its start"
        trainer.log(f"back in round {place.round}, {at}")
        leads, way = trainer.control.rank == 0, Way.ROUNDS
        if leads:
            way = trainer.patience(partial(self._way_on, place.round))
        way = Way(trainer.control.share(bytes([way]))[0][0])
        if way is not Way.ROUNDS:
            trainer.log(f"going on from a later anchor than that of round {place.round}")
            return self._past(way is Way.EMPTIED)
        trainer.hold(place.round - 1)
        return place.round - 1

    def _join(self) -> int:
        self.trainer.checkpoint.forget_starts()
        self.trainer.exchange.starts.clear()
        last = self._agreed_last_round()
        start = self._from_bucket(last)
        if last:
            self.trainer.log(
                f"no private state here: joining at round {last} from the bucket with a fresh optimiser and "
                "an empty error feedback"
            )
        return start

    # The checkpoint

    def _newest(self) -> tuple[Place, Files] | None:
        """The newest checkpoint that all processes have complete. Others are removed, so that they cannot
        clash with what the replica saves from now on."""
        checkpoint, control = self.trainer.checkpoint, self.trainer.control
        own: list[Any] = [sorted(checkpoint.numbers()), checkpoint.starts()]
        theirs = share_json(control, own, _numbers_and_starts)
        common = set.intersection(*(numbers for numbers, _ in theirs))
        self.trainer.exchange.starts = set.intersection(*(starts for _, starts in theirs))
        checkpoint.drop(lambda number: number not in common)
        for number in sorted(common, reverse=True):
            found, why = self._load(number)
            if all_true(control, found is not None) and found is not None:
                self._check_processes(found[0])
                return found
            why = why or "another process of this replica cannot read its part"
            self.trainer.log(f"a checkpoint is lost: {why}")
            checkpoint.drop(lambda other, lost=number: other == lost)
        return None

    def _load(self, number: int) -> tuple[tuple[Place, Files] | None, str]:
        trainer = self.trainer
        wanted, params = trainer.state_files(), trainer.replica.named_parameters()
        try:
            return trainer.checkpoint.load(number, wanted, params), ""
        except ConfigError as reason:
            return None, str(reason)

    def _check_processes(self, place: Place) -> None:
        if place.processes != self.trainer.control.size:
            raise ConfigError(
                f"{self.trainer.checkpoint.folder} was saved by a replica of {place.processes} processes, "
                f"and this one has {self.trainer.control.size}; put their number back, or remove the folder "
                "to join from the bucket"
            )

    # Jumps over rounds

    def _way_on(self, round_number: int) -> "Way":
        """Continue from our anchor, round by round, or from a later one: if our round's payloads are gone, or
        if we are far behind and no update of ours counts meanwhile."""
        ledger = self.trainer.ledger
        anchors = ledger.believed_anchors(2)
        if not anchors or round_number > anchors[0]:
            return Way.ROUNDS
        swept, far = self._is_swept(round_number), round_number <= min(anchors[1:], default=0)
        if not swept and not far:
            return Way.ROUNDS
        if self._is_lost(round_number, ledger.last_round()):
            return Way.EMPTIED if swept else Way.ROUNDS
        return Way.LATER_ANCHOR

    def _is_swept(self, round_number: int) -> bool:
        """Whether payloads of a settled round are gone. Each replica sweeps its own."""
        ledger, name = self.trainer.ledger, self.trainer.member.name
        manifest = ledger.manifest(round_number)
        others = [entry for entry in manifest.entries if entry.replica != name] if manifest else []
        some = [(entry, entry.shards[0]) for entry in (others[:1] + others[-1:])]
        return not all(ledger.has_shard(e.replica, round_number, s) for e, s in some)

    def _is_lost(self, first: int, last: int) -> bool:
        """Whether the feedback must be emptied to continue from an anchor after these rounds. What our open
        round counted can be subtracted if we have its c and its payload exists."""
        ledger, name = self.trainer.ledger, self.trainer.member.name
        manifest = ledger.manifest(first)
        entry = manifest.entry(name) if manifest else None
        if entry and not (self.trainer.session.carried and ledger.has_shard(name, first, entry.shards[0])):
            return True
        return self._counts_us(first + 1, last)

    def pass_over(self, gap: LedPast) -> int:
        """Take a later anchor past lost payloads, and keep our feedback if possible."""
        trainer, leads = self.trainer, self.trainer.control.rank == 0
        trainer.log(str(gap))
        lost = leads and trainer.patience(partial(self._is_lost, gap.round, gap.anchor))
        return self._past(agree(trainer.control, lost), gap.anchor)

    def _past(self, emptied: bool, anchor: int = 0) -> int:
        """Continue from a later anchor. The feedback stays if no update of ours counts in the rounds between.
        Otherwise unknown parts of it were sent."""
        trainer = self.trainer
        if emptied:
            trainer.outer.drop_feedback()
            trainer.checkpoint.forget_starts()
            trainer.exchange.starts.clear()
            trainer.log(
                f"rounds from {trainer.open} on count updates of ours, and cannot be trained again because "
                "payloads are gone: the error feedback is emptied"
            )
        elif trainer.session.carried:
            self._settle_open()
        elif trainer.losses:
            trainer.fold_open()
        trainer.session.unsaved = True
        trainer.session.pending, trainer.params, trainer.session.carried = None, None, False
        return self._from_bucket(self._agreed_last_round(), anchor, fresh=False)

    def _settle_open(self) -> None:
        """c -> e of the open round, by our own counted update alone."""
        trainer, t = self.trainer, self.trainer.open
        manifest = trainer.ledger.manifest(t)
        if entry := manifest.entry(trainer.member.name) if manifest else None:
            read = partial(trainer.ledger.get_shard, entry.replica, t)
            try:
                shards = {i: trainer.patience(partial(read, entry.shards[i])) for i in trainer.outer.writes}
                listed, known = trainer.outer.unpack(shards), entry.incarnation in trainer.exchange.starts
                trainer.outer.settle(listed, known)
            except Refused as reason:
                trainer.outer.drop_feedback()
                trainer.log(f"round {t}: our update cannot be read ({reason}); the error feedback is emptied")

    def _counts_us(self, first: int, last: int) -> bool:
        """Whether one of these rounds counts an update of ours. Manifests are never deleted."""
        ledger, name = self.trainer.ledger, self.trainer.member.name
        for start in range(first, last + 1, AT_ONCE):
            calls = [partial(ledger.manifest, t) for t in range(start, min(start + AT_ONCE, last + 1))]
            found = together(calls)
            if any(manifest and manifest.entry(name) for manifest in found):
                return True
        return False

    def _agreed_last_round(self) -> int:
        leads = self.trainer.control.rank == 0
        mine = self.trainer.patience(self.trainer.ledger.last_round) if leads else 0
        return share_json(self.trainer.control, mine, whole_number)[0]

    def _from_bucket(self, last: int, first: int = 0, *, fresh: bool = True) -> int:
        """Take the newest usable anchor, or that of round `first`; the loop then replays the rounds after it.
        Only a `fresh` process, which has restored no state, still holds the theta^(0) that it drew."""
        self.trainer.exchange.from_bucket = True
        for start in chain([first] if first else [], self._agreed_anchors(last)):
            digest, tensors = self._read_anchor(start)
            readable = all_true(self.trainer.control, bool(digest))
            if not readable or not self._has_digest(start, tensors, digest):
                continue
            self.trainer.outer.restore_anchor(tensors, tensors if start else None)
            self.trainer.hold(start)
            self.trainer.losses = []
            return start
        if self.trainer.ledger.run.start or not fresh:
            raise RunError("no anchor of this run can be read from its bucket now; trying again")
        self.trainer.hold(0)
        return 0

    def _agreed_anchors(self, last: int) -> Iterator[int]:
        """Rounds with an anchor, newest first; the leader looks for the next one only when needed."""
        leads = self.trainer.control.rank == 0
        anchors = self.trainer.ledger.anchors_down(last) if leads else iter(())
        while (start := share_json(self.trainer.control, next(anchors, -1), _round_or_none)[0]) >= 0:
            yield start

    def _has_digest(self, round_number: int, tensors: Mapping[str, Tensor], digest: str) -> bool:
        """Whether these tensors have the digest that the anchor's writer states and contributors signed."""
        names = self.trainer.ledger.shards
        parts = {i: shard_digest(tensors, names[i]) for i in self.trainer.outer.reads}
        if self.trainer.exchange.hold_anchor(round_number, parts) == digest:
            return True
        self.trainer.log(f"the anchor of round {round_number} is not what it states; trying the one before")
        return False

    def _read_anchor(self, round_number: int) -> tuple[str, dict[str, Tensor]]:
        try:
            read = partial(self.trainer.ledger.read_anchor, round_number, self.trainer.outer.reads)
            return self.trainer.patience(read)
        except (StoreError, RunStopped):
            raise  # it may be whole but unreachable; or nothing in this run is to be trusted
        except RunError as error:
            self.trainer.log(f"{error}; trying the one before")
            return "", {}


def _round_or_none(value: Any) -> int:
    return -1 if value == -1 else whole_number(value)


def _numbers_and_starts(value: Any) -> tuple[set[int], set[str]]:
    numbers, starts = value
    return set(whole_numbers(numbers)), {str(start) for start in starts}
