"""The three held-out losses of METHOD 0.4: as a full forward, as a pipelined forward, and mixed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.data.corpus import Corpus
from isthmus.data.tokens import validation_batches
from isthmus.model.llama import forward, rope_table, token_losses
from isthmus.replica.crossings import BasisSet, crossings_of, forward_key


class Scorer:
    """Scores an anchor on fixed held-out text, through the boundaries of every replica."""

    def __init__(
        self, recipe: Recipe, corpus: Corpus, bases: BasisSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.recipe, self.bases, self.dtype, self.device = recipe, bases, dtype, device
        self.members = recipe.fleet()
        batches = validation_batches(
            corpus, recipe.inner.batch, recipe.model.context, recipe.data.eval_batches
        )
        self.held_out = [batch.to(device).long() for batch in batches]
        self.rope = tuple(t.to(device) for t in rope_table(recipe.model, recipe.model.context, bases.dtype))

    @torch.no_grad()
    def score(
        self, anchor: Mapping[str, Tensor], table: Tensor
    ) -> dict[str, float | dict[str, float] | None]:
        """`table` is the embedding that compressed boundaries subtract: the anchor's own, unless it is
        frozen."""
        by_forward: dict[tuple, float] = {(): self._loss(anchor, table, None)}
        per_member = []
        for member in self.members:
            key = forward_key(self.recipe, member, self.bases)
            if key not in by_forward:
                by_forward[key] = self._loss(anchor, table, member)
            per_member.append(by_forward[key])
        pipelined = [loss for loss, m in zip(per_member, self.members, strict=True) if m.config.stages > 1]
        return {
            "loss_full": by_forward[()],
            "loss_pipelined": sum(pipelined) / len(pipelined) if pipelined else None,
            "loss_mixed": sum(per_member) / len(per_member),
            "loss_by_kind": by_kind(self.members, per_member),
        }

    def _loss(self, anchor: Mapping[str, Tensor], table: Tensor, member: Member | None) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self.held_out:
            crossings = crossings_of(self.recipe, [member], self.bases, table, len(batch)) if member else None
            logits = forward(anchor, batch[:, :-1], self.recipe.model, self.rope, crossings, self.dtype)
            total += token_losses(logits, batch[:, 1:]).double() * len(batch)
        return (total / sum(map(len, self.held_out))).item()


def by_kind(members: Sequence[Member], values: Sequence[float]) -> dict[str, float]:
    """Mean over the replicas of each [[replicas]] table."""
    kinds: dict[str, list[float]] = {}
    for member, value in zip(members, values, strict=True):
        kinds.setdefault(member.config.name, []).append(value)
    return {name: sum(group) / len(group) for name, group in kinds.items()}
