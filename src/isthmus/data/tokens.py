"""Batches of token windows: a pure function of (replica, inner step).

No cursor is kept. A replica that restarts asks for its step and gets the same tokens, as does the simulator,
so recovery can neither lose nor repeat data.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from isthmus.config import Recipe
from isthmus.data.corpus import Corpus, TokenView
from isthmus.data.order import Permutation
from isthmus.errors import ConfigError
from isthmus.layout.deal import Deal


class Batches:
    """Deal the windows of a split to `num_replicas` replicas, `batch` at a time or each its own number, with
    each pass newly shuffled.

    A window is context + 1 tokens: inputs and targets. Windows start `context` apart, so the last token of
    one is the first of the next, and each token is a target once per pass. `num_replicas` counts the recipe's
    replicas, present or not. In a fleet that changes, `deal` sets our share.
    """

    def __init__(
        self, view: TokenView, seed: int, num_replicas: int, batch: int | Sequence[int], context: int
    ) -> None:
        self.view, self.seed = view, seed
        self.num_replicas, self.context = num_replicas, context
        self.sizes = (batch,) * num_replicas if isinstance(batch, int) else tuple(batch)
        self.offsets = (0, *accumulate(self.sizes))  # of each replica within an inner step, and the total
        self.num_sequences, batch = num_windows(view, context), max(self.sizes)
        if self.num_sequences < batch:
            raise ConfigError(
                f"the {view.name} part has {len(view):,} tokens, too few for {batch} x {context + 1}; "
                f"it needs {batch * context + 1:,}: prepare more text, or lower batch or context"
            )
        self._permutations: dict[int, Permutation] = {}
        self._deal: Deal | None = None

    @classmethod
    def of(cls, recipe: Recipe, view: TokenView) -> "Batches":
        """Return the batches of a recipe's fleet, by the members' numbers."""
        sizes = [recipe.batch_of(member.config) for member in recipe.fleet()]
        return cls(view, recipe.seed, recipe.num_replicas, sizes, recipe.model.context)

    def deal(self, deal: Deal) -> None:
        """Restrict `at` to one replica's share of one round, because the fleet may change."""
        self._deal = deal

    def at(self, replica: int, inner_step: int) -> Tensor:
        """Return a replica's batch at an inner step, counted over the whole run: (B, L + 1) int64."""
        if self._deal:
            return self._read(self._deal.place(inner_step), self._deal.batch)
        if not 0 <= replica < self.num_replicas:
            raise IndexError(f"replica {replica} of {self.num_replicas}")
        return self._read(inner_step * self.offsets[-1] + self.offsets[replica], self.sizes[replica])

    def stacked(self, inner_step: int, replicas: range | None = None) -> Tensor:
        """Gather neighbouring replicas' equal batches at one inner step in one read: (R, B, L + 1) int64."""
        some = range(self.num_replicas) if replicas is None else replicas
        first, stop = self.offsets[some.start], self.offsets[some.stop]
        windows = self._read(inner_step * self.offsets[-1] + first, stop - first)
        return windows.view(len(some), self.sizes[some.start], self.context + 1)

    def passes(self, inner_steps: int) -> float:
        """Return how often a run of this many inner steps reads the whole split."""
        return inner_steps * self.offsets[-1] / self.num_sequences

    def sequences(self, first: int, count: int) -> np.ndarray:
        """Return the windows at positions first..first + count of the whole run's order: (count,) int64."""
        if first < 0:
            raise IndexError(f"position {first} in the order of batches; inner steps count from 0")
        pass_number, position = np.divmod(np.arange(first, first + count, dtype=np.int64), self.num_sequences)
        chosen = np.empty(count, dtype=np.int64)
        for number in np.unique(pass_number):
            inside = pass_number == number
            chosen[inside] = self._permutation(int(number))(position[inside])
        return chosen

    def _read(self, first: int, count: int) -> Tensor:
        starts = self.sequences(first, count) * self.context
        return torch.from_numpy(self.view.windows(starts, self.context + 1))

    def _permutation(self, number: int) -> Permutation:
        if number not in self._permutations:
            self._permutations = {number: Permutation(self.num_sequences, self.seed, number)}
        return self._permutations[number]


def validation_batches(corpus: Corpus, batch: int, context: int, num_batches: int) -> list[Tensor]:
    """Return the same held-out windows for everyone, spread evenly over the split: each (B, L + 1) int64.

    A small split gives fewer batches; one too small for a single batch gives one smaller batch.
    """
    view = corpus.validation
    num_sequences = num_windows(view, context)
    if num_sequences < 1:
        raise ConfigError(
            f"the validation part has {len(view):,} tokens, too few for one window of {context + 1}; "
            "hold out more text, or lower context"
        )
    batch = min(batch, num_sequences)
    count = num_scored(view, batch, context, num_batches)
    starts = np.arange(count, dtype=np.int64) * num_sequences // count * context
    return list(torch.from_numpy(view.windows(starts, context + 1)).split(batch))


def num_scored(view: TokenView, batch: int, context: int, num_batches: int) -> int:
    """Count the windows of `validation_batches`, in whole batches if there is one."""
    num_sequences = num_windows(view, context)
    batch = min(batch, num_sequences)
    return batch * max(1, min(num_batches, num_sequences // max(batch, 1)))


def few_held_out(corpus: Corpus, batch: int, context: int, num_batches: int) -> str | None:
    """Return the warning for a corpus that holds out less than its recipe wants; None if it is enough."""
    found = num_scored(corpus.validation, batch, context, num_batches) * context
    wanted = num_batches * batch * context
    if found >= wanted:
        return None
    return (
        f"{corpus.name} holds out {len(corpus.validation):,} tokens: losses are over {found:,}, not the "
        f"{wanted:,} of data.eval_batches x inner.batch x context; a larger --validation gives more"
    )


def num_windows(view: TokenView, context: int) -> int:
    return max(0, (len(view) - 1) // context)
