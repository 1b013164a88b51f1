"""A process that starts: it restores its private state, or begins from the bucket."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.model.digest import shard_digest
from isthmus.outer.exchange import Contribution
from isthmus.protocol.rescue import LedPast
from isthmus.protocol.trust import Refused
from isthmus.replica.control_group import agree, all_true, share_json, whole_number, whole_numbers
from isthmus.runtime.middle import PARAMS, Middle
from isthmus.runtime.private_state import Files, Update
from isthmus.runtime.trainer import Trainer
from isthmus.store import StoreError


class Recovery:
    """Brings a trainer to where its replica was (docs/protocol.md, Crash points). All processes of a replica
    take the same steps together."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def resume(self) -> int:
        """Restore what is on this disk, or start from the bucket; how many rounds are done."""
        try:
            return self._resume()
        except LedPast as gap:
            return self.pass_over(gap)

    def pass_over(self, gap: LedPast) -> int:
        """Payloads on our way are lost, and a later anchor is there: take it, and keep what is ours."""
        trainer, t = self.trainer, gap.round
        updates = [number for number in trainer.state.updates() if number >= t]
        if trainer.pending is not None:
            trainer.settle_pending(t)
            updates = [number for number in updates if number > t]
        if trainer.middle:
            trainer.carry_middle()
        if updates:  # what the feedback held went out with updates that cannot be trained again
            trainer.outer.drop_feedback()
        trainer.log(str(gap))
        return self._from_bucket(self._agreed_last_round(), gap.anchor)

    def _resume(self) -> int:
        states, updates = self._common()
        if (middle := self._middle(max(states, default=0))) is not None:
            return self._restore_middle(*middle, {t for t in updates if t >= middle[0].round})
        for round_number in sorted(states, reverse=True):
            files, why = self._readable(round_number)
            if not all_true(self.trainer.control, files is not None) or files is None:
                before = [t for t in states if t < round_number]
                instead = f"that of round {max(before)} is taken" if before else "and there is none before it"
                why = why or "another process of this replica cannot read its part"
                self.trainer.log(f"{why}; the state of round {round_number} is lost, {instead}")
                continue
            self.trainer.state.drop_after(round_number)
            newer = {number for number in updates if number > round_number}
            self.trainer.state.drop_updates(newer.__contains__)
            self.trainer.record.came_back(round_number, newer)
            return self._train_again(self._restore(round_number, files, newer), newer)
        if updates and self._began_at(min(updates)):
            return self._train_again(self._from_bucket(min(updates) - 1), updates)
        self.trainer.state.drop_updates(lambda number: False)
        last = self._agreed_last_round()
        start = self._from_bucket(last)
        if last:
            self.trainer.log(
                f"no private state here: joining at round {last} from the bucket with a fresh optimiser and "
                "an empty error feedback"
            )
        return start

    def _common(self) -> tuple[set[int], set[int]]:
        """Rounds whose states, and rounds whose updates, all processes of the replica have."""
        updates = [t for t in self.trainer.state.updates() if self._whole_update(t)]
        mine = [self.trainer.state.rounds(), sorted(updates)]
        states, updates = zip(*share_json(self.trainer.control, mine, _two_sets), strict=True)
        return set.intersection(*states), set.intersection(*updates)

    def _whole_update(self, round_number: int) -> bool:
        """Is the update of a round on this disk, as it was sent?"""
        try:
            update = self.trainer.saved_update(round_number)
            if update is not None:  # files of 0.2 and before have no hash that would tell
                self.trainer.outer.unpack(update.shards)
            return update is not None
        except (ConfigError, Refused) as reason:
            self.trainer.log(f"{reason}; the saved update of round {round_number} is lost")
            return False

    def _began_at(self, round_number: int) -> bool:
        """Was this the first round of a replica that came without state, and can it be trained again?"""
        update = self.trainer.saved_update(round_number)
        first = update is not None and update.step_count == self.trainer.recipe.outer.inner_steps
        return all_true(self.trainer.control, first) and not self._swept(round_number)

    def _train_again(self, done: int, updates: Collection[int]) -> int:
        """Rounds whose update was saved and whose state was not: train them once more from the state before.

        The update stays as it was sent, and may have been counted since. What training gives anew is the
        optimiser and the error feedback: e <- beta e + Delta - what was sent.
        """
        for round_number in range(done + 1, max(updates, default=done) + 1):
            counted, own = self.trainer.exchange.closed(round_number), []
            if round_number in updates:
                self.trainer.log(f"training round {round_number} again, from which only the update was saved")
                update = self.trainer.saved_update(round_number)
                own = self.trainer.train_round(round_number - 1, lambda h: None, update)
            if counted is None and not own:
                break  # it is still open, and ours to train
            self.trainer.apply(
                round_number, self.trainer.exchange.close(round_number, own) if counted is None else counted
            )
            done = round_number
        return done

    def _readable(self, round_number: int) -> tuple[dict[str, dict[str, Tensor]] | None, str]:
        """A saved round's files, or None and which of them is damaged."""
        path = self.trainer.state.folder / f"round-{round_number:06d}"
        try:
            files = self.trainer.state.load(round_number)
            for file, named in self.trainer.state_files().items():
                there = files.get(file, {})
                odd = [name for name, t in named.items() if name not in there or there[name].shape != t.shape]
                if odd:
                    return (
                        None,
                        f"{path / file}.safetensors is damaged: it does not hold {odd[0]} in its shape",
                    )
        except ConfigError as reason:
            return None, str(reason)
        try:
            update = Update.from_tensors(files.get("pending", {}))
            if set(update.shards) != set(self.trainer.outer.writes):
                raise Refused("it holds other shards than this process sends")
            self.trainer.outer.unpack(update.shards)
        except (ConfigError, Refused) as reason:
            return None, f"{path / 'pending'}.safetensors is damaged: {reason}"
        return files, ""

    def _restore(self, round_number: int, files: dict[str, dict[str, Tensor]], newer: Collection[int]) -> int:
        """Our own optimiser, error feedback and unsettled update; then the round they wait for."""
        self.trainer.outer.restore(files)
        update = Update.from_tensors(files["pending"])
        self.trainer.step_count = update.step_count
        self.trainer.replica.restore(files["optimiser"], self.trainer.step_count)
        self.trainer.status.restore(update.told)
        self.trainer.pending = Contribution(self.trainer.member.name, update.shards, self.trainer.pop_facts())
        if self._swept(round_number):
            self.trainer.settle_pending(round_number)
            return self._past_a_sweep(round_number, newer)
        self.trainer.hold(round_number - 1)
        self.trainer.log(f"back with the state of round {round_number}")
        counted = self.trainer.exchange.closed(round_number)
        if counted is None:
            counted = self.trainer.exchange.close(round_number, [self.trainer.pending])
        self.trainer.apply(round_number, counted)
        return round_number

    def _past_a_sweep(self, round_number: int, newer: Collection[int]) -> int:
        """The payloads that lead on from our anchor are gone: take a later one, and keep what is ours."""
        if newer:  # what the feedback held went out with updates that cannot be trained again
            self.trainer.outer.drop_feedback()
        self.trainer.record.skipped(newer)
        last = self._agreed_last_round()
        self.trainer.log(f"back with the state of round {round_number}, and with the anchor of a later one")
        return self._from_bucket(last)

    def _middle(self, newest: int) -> tuple[Middle, Files] | None:
        """The middle of a round after the newest state, if all processes of the replica have it whole."""
        found = self._readable_middle(newest)
        mine = [found[0].round, found[0].num_steps] if found else []
        theirs = share_json(self.trainer.control, mine, whole_numbers)
        if found and any(each != mine for each in theirs):
            self.trainer.log("the processes of this replica have saved different middles; none is taken")
            self.trainer.state.drop_middle()
            return None
        return found

    def _readable_middle(self, newest: int) -> tuple[Middle, Files] | None:
        try:
            found = self.trainer.state.load_middle()
            if found is None or found[0].round <= newest:
                return None
            about, files = found
            if about.num_steps >= self.trainer.recipe.outer.inner_steps:
                raise ConfigError("it has all inner steps of its round")
            wanted = {**self.trainer.state_files(), PARAMS: self.trainer.replica.named_parameters()}
            for file, named in wanted.items():
                there = files.get(file, {})
                for name, tensor in named.items():
                    if name not in there or there[name].shape != tensor.shape:
                        raise ConfigError(f"{file} does not hold {name} in its shape")
        except ConfigError as reason:
            self.trainer.log(f"the saved middle of a round is lost: {reason}")
            return None
        return found

    def _restore_middle(self, about: Middle, files: Files, updates: Collection[int]) -> int:
        """An open round goes on after the inner steps that it had. One that was settled meanwhile does not:
        `apply` gives them to the error feedback."""
        trainer, t = self.trainer, about.round
        trainer.outer.restore(files)
        trainer.step_count, trainer.measured.fresh_steps = about.step_count, about.carried
        trainer.replica.restore(files["optimiser"], about.step_count + about.num_steps)
        trainer.middle = about, {name: p.to(trainer.device) for name, p in files[PARAMS].items()}
        trainer.record.came_back(t - 1, updates)
        trainer.log(f"back in round {t}, after {about.num_steps} of its inner steps")
        if self._swept(t):
            trainer.carry_middle()
            return self._past_a_sweep(t, updates)
        trainer.hold(t - 1)
        return self._train_again(t - 1, updates)

    def _swept(self, round_number: int) -> bool:
        """May the round's payloads be gone? Those up to the second-newest anchor are swept."""
        look = partial(self._looks_swept, round_number)
        return agree(self.trainer.control, self.trainer.control.rank == 0 and self.trainer.patience(look))

    def _looks_swept(self, round_number: int) -> bool:
        anchors = self.trainer.ledger.believed_anchors(2)
        if not anchors or round_number > anchors[0]:
            return False
        return round_number <= min(anchors[1:], default=0) or not self.trainer.ledger.has_payloads(
            round_number
        )

    def _agreed_last_round(self) -> int:
        leads = self.trainer.control.rank == 0
        mine = self.trainer.patience(self.trainer.ledger.last_round) if leads else 0
        return share_json(self.trainer.control, mine, whole_number)[0]

    def _from_bucket(self, last: int, first: int = 0) -> int:
        """The newest anchor that can be believed, or that of round `first`; the loop then replays the rounds
        after it."""
        self.trainer.exchange.from_bucket = True
        for start in chain([first] if first else [], self._agreed_anchors(last)):
            digest, tensors = self._read_anchor(start)
            readable = all_true(self.trainer.control, bool(digest))
            if not readable or not self._has_digest(start, tensors, digest):
                continue
            self.trainer.outer.restore_anchor(tensors, tensors if start else None)
            self.trainer.hold(start)
            return start
        if self.trainer.ledger.run.start:
            raise RunError("theta^(0) of this run cannot be read from its bucket; trying again")
        self.trainer.hold(0)
        return 0

    def _agreed_anchors(self, last: int) -> Iterator[int]:
        """Rounds with an anchor, newest first: the leader looks for the next one only when it is needed."""
        leads = self.trainer.control.rank == 0
        anchors = self.trainer.ledger.anchors_down(last) if leads else iter(())
        while (start := share_json(self.trainer.control, next(anchors, -1), _round_or_none)[0]) >= 0:
            yield start

    def _has_digest(self, round_number: int, tensors: Mapping[str, Tensor], digest: str) -> bool:
        """Whoever wrote an anchor states its digest, and contributors signed it: are these the tensors?"""
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
            raise  # it may be whole, and only out of reach; or nothing of this run is to be believed
        except RunError as error:
            self.trainer.log(f"{error}; trying the one before")
            return "", {}


def _round_or_none(value: Any) -> int:
    return -1 if value == -1 else whole_number(value)


def _two_sets(value: Any) -> tuple[set[int], set[int]]:
    states, updates = value
    return set(whole_numbers(states)), set(whole_numbers(updates))
