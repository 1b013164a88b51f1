"""The usefulness of each counted update, from the history alone: `isthmus ledger show --usefulness`."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.layout.stages import EMBEDDING
from isthmus.outer.codec import Payloads, PlainCodec
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.replay import Replay
from isthmus.replica.evaluate import Scorer, rows_that_fit
from isthmus.subspace.boundaries import BasisSet, forward_key


def usefulness(
    ledger: Ledger, batches: Sequence[Tensor], first: int, last: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Replay the rounds from `first` to `last`; for each, yield the effect of every counted update alone."""
    replay = Replay(ledger, first - 1)
    scorer = UpdateScorer(ledger.run.recipe, batches, replay.outer.codec, replay.dtype)
    for manifest in ledger.between(replay.round + 1, last):
        t = manifest.round
        updates = replay.updates(manifest)
        if t >= first:
            members = {member.name: member for member in ledger.at(t).recipe.fleet()}
            scorer.begin(replay.anchor, t)
            yield t, {name: scorer.score(update, members[name]) for name, update in updates.items()}
        replay.apply(manifest, updates)


class UpdateScorer:
    """Score updates round by round, starting where `begin` says."""

    def __init__(
        self, recipe: Recipe, batches: Sequence[Tensor], codec: PlainCodec, dtype: torch.dtype
    ) -> None:
        """Take held-out text as `batches`, each (B, L + 1), and the stream's `dtype`."""
        self.recipe, self.codec, cpu = recipe, codec, torch.device("cpu")
        self.anchor: Mapping[str, Tensor] = {}
        self.before: dict[tuple, float] = {}  # the anchor's losses by forward, computed on demand
        bases = BasisSet(recipe, cpu, torch.float64 if dtype == torch.float64 else torch.float32)
        self.scorer = Scorer(recipe, batches, bases, cpu, dtype, rows=rows_that_fit(recipe, cpu))

    def begin(self, anchor: Mapping[str, Tensor], round_number: int) -> None:
        """Start from this anchor. Scoring reads it and never changes it."""
        self.anchor = anchor
        self.before.clear()
        self.scorer.bases.begin_round(round_number)

    @torch.no_grad()
    def score(self, update: Payloads, author: Member | None = None) -> float:
        """Return the held-out loss at anchor - eta * update, less that at the anchor, in nats: negative
        helps.

        The loss is that of the whole model. A compressed author trained a different function, the model with
        its boundaries; the better of the two counts.
        """
        moved = {name: tensor.clone() for name, tensor in self.anchor.items()}
        self.codec.step(moved, [update], self.recipe.outer.step_size)  # like a round that counts only it
        score = self._loss(moved) - self._before(None)
        if author is None or not author.config.compressed:
            return score
        return min(score, self._loss(moved, author) - self._before(author))

    def _before(self, author: Member | None) -> float:
        """Return the anchor's loss, computed once for each forward."""
        key = forward_key(self.recipe, author, self.scorer.bases) if author else ()
        if key not in self.before:
            self.before[key] = self._loss(self.anchor, author)
        return self.before[key]

    def _loss(self, params: Mapping[str, Tensor], through: Member | None = None) -> float:
        return self.scorer.loss(params, params[EMBEDDING], through)
