"""What a replica has trained, sent and kept: nothing may be counted twice, and nothing undone.

With beta = 1 the sum is simple. All that the last timeline trained is in what the manifests list, or in the
error feedback, or was emptied with a line that says so. And each inner step inside a counted payload is one
of that timeline.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from in_process import Fleet, Process
from torch import Tensor
from torch.testing import assert_close

from isthmus.config import Recipe
from isthmus.runtime.trainer import Trainer
from isthmus.sparse.topk import decode

Tensors = dict[str, Tensor]
Steps = frozenset[tuple[int, int]]  # (round, inner step)


def undiscounted(recipe: Recipe) -> Recipe:
    """beta = 1, so that sums can be compared."""
    return replace(recipe, outer=replace(recipe.outer, feedback_decay=1.0))


class Books:
    """Of one replica of a fleet. `places` are the checkpoints that it saves, as (round, inner steps)."""

    def __init__(self, process: Process, places: set[tuple[int, int]], noise: float = 0.0) -> None:
        """With `noise` each start trains to other weights, as a GPU may."""
        self.process, self.places, self.noise = process, places, noise
        self.before: Callable[[Trainer], None] = lambda trainer: None
        self.total: Tensors = {}  # all pseudo-gradients of this timeline
        self.lost: Tensors = {}  # what of them was emptied
        self.steps: Steps = frozenset()
        self.saved: dict[int, tuple[Tensors, Tensors, Steps]] = {}
        self.sent: dict[tuple[int, str], Steps] = {}  # by round and start
        self.trained: list[list[int]] = []  # rounds, by start
        process.prepare = self.open

    def open(self, trainer: Trainer) -> None:
        """A start: whatever it does with its feedback is written down."""
        self.trainer, outer, checkpoint = trainer, trainer.outer, trainer.checkpoint
        self.total = {name: torch.zeros_like(e) for name, e in trainer.feedback.items()}
        self.lost = {name: torch.zeros_like(e) for name, e in trainer.feedback.items()}
        self.steps, rounds = frozenset(), list[int]()
        self.trained.append(rounds)
        chance = torch.Generator().manual_seed(self.process.num_starts)
        encode, fold, settle, drop = outer.encode, outer.fold, outer.settle, outer.drop_feedback
        session, save, restore = trainer.session, checkpoint.save, trainer.restore
        deliver = session.exchange.deliver

        def add(params: Mapping[str, Tensor]) -> None:
            for name, p in params.items():
                self.total[name] += trainer.anchor[name] - p
            self.steps |= {(session.round, h) for h in range(1, len(trainer.losses) + 1)}

        def encoding(params: Mapping[str, Tensor], again: bool = False):
            rounds.append(session.round)
            if not again:
                params = {
                    name: p + self.noise * torch.randn(p.shape, dtype=p.dtype, generator=chance)
                    for name, p in params.items()
                }
                add(params)
            return encode(params, again)

        def folding(params: Mapping[str, Tensor]) -> None:
            add(params)
            fold(params)

        def emptying(work: Callable[[], None]) -> None:
            before = {name: e.clone() for name, e in trainer.feedback.items()}
            work()
            for name, e in trainer.feedback.items():
                self.lost[name] += before[name] - e

        def settling(listed, known: bool) -> None:
            if known:
                settle(listed, known)
            else:
                emptying(lambda: settle(listed, known))

        def saving(place, files) -> None:
            save(place, files)
            copies = [{name: t.clone() for name, t in some.items()} for some in (self.total, self.lost)]
            self.saved[place.number(checkpoint.inner_steps)] = copies[0], copies[1], self.steps

        def restoring(place, files) -> None:
            restore(place, files)
            total, lost, self.steps = self.saved[place.number(checkpoint.inner_steps)]
            self.total = {name: t.clone() for name, t in total.items()}
            self.lost = {name: t.clone() for name, t in lost.items()}

        def delivering(round_number: int, mine) -> None:
            self.sent[round_number, trainer.session.incarnation] = self.steps
            deliver(round_number, mine)

        outer.encode, outer.fold, outer.settle = encoding, folding, settling
        outer.drop_feedback = lambda: emptying(drop)
        checkpoint.save, trainer.restore, session.exchange.deliver = saving, restoring, delivering
        checkpoint.is_due = lambda edge: (session.round, len(trainer.losses)) in self.places
        self.before(trainer)

    def check(self) -> None:
        """Of all that was trained nothing is twice in the model, and nothing missing."""
        ledger, name, kept = self.process.fleet.ledger, self.process.name, self.trainer.feedback
        found = {key: e + self.lost[key] for key, e in kept.items()}
        for t in range(1, ledger.last_round() + 1):
            entry = ledger.manifest(t).entry(name)
            if entry is None or (t, entry.incarnation) not in self.sent:  # or another process sent it
                continue
            assert self.sent[t, entry.incarnation] <= self.steps, f"round {t} counts what is trained no more"
            shards = {shard.index: ledger.get_shard(name, t, shard) for shard in entry.shards}
            for key, payload in self.trainer.outer.unpack(shards).items():
                found[key] += decode(payload)
        for key, total in self.total.items():
            assert_close(found[key], total, rtol=0, atol=1e-9)

    @property
    def emptied(self) -> bool:
        return any(bool(t.any()) for t in self.lost.values())


def run(fleet: Fleet, *books: Books) -> None:
    """To the end: one history, and all books are right."""
    fleet.go()
    fleet.check_one_history()
    for each in books:
        each.check()
