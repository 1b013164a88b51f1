"""The three held-out losses, full, pipelined and mixed (docs/method.md, Three losses)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.data.corpus import Corpus
from isthmus.data.tokens import validation_batches
from isthmus.model.llama import RunLayer, head_weights, rope_table, stream
from isthmus.model.parts import parts
from isthmus.runlog.row import Scores, by_kind
from isthmus.subspace.boundaries import BasisSet, boundary_functions, forward_key, projected

LOGIT_BYTES = 1 << 30  # of float32 logits at a time, if a Scorer shares its device with a fleet


class Scorer:
    """Scores an anchor on fixed held-out text, through the boundaries of every replica."""

    def __init__(
        self,
        recipe: Recipe,
        text: Corpus | Sequence[Tensor],
        bases: BasisSet,
        device: torch.device,
        dtype: torch.dtype,
        recorded: bool = False,
        *,
        rows: int | None = None,
        compiled: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`text`: a corpus, or held-out batches (B, L + 1). `recorded`: on a GPU with spare memory, launch
        the forwards as one graph. `rows`: the number of sequences at a time instead of whole batches.
        `compiled`: see `parts`. `check` is called before each layer, and may end the scoring by an
        exception."""
        self.recipe, self.bases, self.dtype, self.device = recipe, bases, dtype, device
        self.rows, self.parts = rows, parts(compiled)
        self.run_layer = checked(self.parts.layer, check) if check else self.parts.layer
        self.members = recipe.fleet()
        size = recipe.inner.batch, recipe.model.context, recipe.data.eval_batches
        batches = validation_batches(text, *size) if isinstance(text, Corpus) else text
        self.held_out = [batch.to(device).long() for batch in batches]
        self.rope = rope_table(recipe.model, recipe.model.context, bases.dtype, device)
        self.recorded = recorded
        self.recordings: dict[tuple, gpu.Replayed] = {}

    @torch.no_grad()
    def score(self, anchor: Mapping[str, Tensor], table: Tensor) -> Scores:
        """The losses. `table` is the embedding that compressed boundaries subtract: the anchor's own, unless
        frozen."""
        keys = [forward_key(self.recipe, member, self.bases) for member in self.members]
        forwards: dict[tuple, Member | None] = {(): None}  # one member for each distinct forward
        for key, member in zip(keys, self.members, strict=True):
            forwards.setdefault(key, member)
        by_forward = dict(zip(forwards, self._losses(anchor, table, forwards).tolist(), strict=True))
        per_member = [by_forward[key] for key in keys]
        pipelined = [loss for loss, m in zip(per_member, self.members, strict=True) if m.config.stages > 1]
        return {
            "loss_full": by_forward[()],
            "loss_pipelined": sum(pipelined) / len(pipelined) if pipelined else None,
            "loss_mixed": sum(per_member) / len(per_member),
            "loss_by_kind": by_kind(self.members, per_member),
        }

    @torch.no_grad()
    def loss(self, params: Mapping[str, Tensor], table: Tensor, member: Member | None = None) -> float:
        """The loss of one forward: the whole model's, or through a member's boundaries."""
        near = {name: tensor.to(self.dtype) for name, tensor in params.items()} if self.rows else None
        return self._loss(params, near, table, member).item()

    def _losses(
        self, anchor: Mapping[str, Tensor], table: Tensor, forwards: Mapping[tuple, Member | None]
    ) -> Tensor:
        """Return each forward's loss, on the device."""

        def work() -> tuple[Tensor]:
            # With batches in parts, each weight is read many times below.
            near = {name: tensor.to(self.dtype) for name, tensor in anchor.items()} if self.rows else None
            return (torch.stack([self._loss(anchor, near, table, m) for m in forwards.values()]),)

        if not self.recorded:
            return work()[0]
        # Finishing changes the forwards, not the tensors they read.
        recording = self.recordings.setdefault((id(anchor), id(table), *forwards), gpu.Replayed(work))
        return recording()[0]

    def _loss(
        self,
        anchor: Mapping[str, Tensor],
        near: Mapping[str, Tensor] | None,
        table: Tensor,
        member: Member | None,
    ) -> Tensor:
        """Return the loss of one forward. `near`: the anchor in the stream's precision, if a copy exists."""
        weights = dict(near or anchor)
        if member is not None:
            weights |= projected(self.recipe, member, self.bases, anchor)
        total = torch.zeros((), dtype=gpu.wide(self.device), device=self.device)
        for batch in self.held_out:
            for part in batch.split(self.rows or len(batch)):
                total += self._part_loss(weights, part, table, member).to(total.dtype) * len(part)
        return total / sum(map(len, self.held_out))

    def _part_loss(
        self, weights: Mapping[str, Tensor], part: Tensor, table: Tensor, member: Member | None
    ) -> Tensor:
        """Return the loss of a part (B, L + 1)."""
        model, boundary_fns = self.recipe.model, {}
        if member:
            boundary_fns = boundary_functions(
                self.recipe, [member], self.bases, table, len(part), params=weights
            )
        x = stream(weights, part[:, :-1], model, self.rope, boundary_fns, self.dtype, self.run_layer)
        return self.parts.head_losses(head_weights(weights, model), x, part[:, 1:], model)


def checked(run_layer: RunLayer, check: Callable[[], None]) -> RunLayer:
    def run(*args: Any) -> Tensor:
        check()
        return run_layer(*args)

    return run


def rows_that_fit(recipe: Recipe, device: torch.device) -> int:
    """How many sequences to score at a time on a device that a fleet also uses."""
    most = LOGIT_BYTES
    if device.type == "cuda":
        most = min(most, torch.cuda.get_device_properties(device).total_memory // 64)
    return min(recipe.inner.batch, max(1, most // (recipe.model.context * recipe.model.vocab * 4)))
