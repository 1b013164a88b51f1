"""What one replica's update does to held-out text: the score by which an update is judged (docs/protocol.md,
Scores).

The same function for the simulator and for closers. It needs the whole model, so a stage cannot score.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.config import Recipe
from isthmus.data.corpus import TokenView
from isthmus.data.tokens import drawn_batches
from isthmus.model.llama import head_losses, head_weights, layer, rope_table, stream
from isthmus.outer.codec import Payloads, PlainCodec
from isthmus.replica.evaluate import rows_that_fit


class UpdateScorer:
    """Scores the updates to one round after another. `begin` says from where, and on which text."""

    def __init__(
        self,
        recipe: Recipe,
        held_out: TokenView,
        codec: PlainCodec,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` is that of the stream, `codec` the one that applies rounds on this device."""
        self.recipe, self.held_out, self.codec = recipe, held_out, codec
        self.device, self.dtype = device, dtype
        self.rows = rows_that_fit(recipe, device)
        self.anchor: Mapping[str, Tensor] = {}
        self.batches: list[Tensor] = []
        self.before: float | None = None  # the anchor's loss, once it is needed

    def begin(self, anchor: Mapping[str, Tensor], draw: bytes) -> None:
        """`draw` chooses the held-out windows; whoever does not know it cannot prepare for them. The anchor
        is read when an update is scored, and never changed."""
        recipe = self.recipe
        self.anchor, self.before = anchor, None
        self.batches = drawn_batches(
            self.held_out, recipe.inner.batch, recipe.model.context, recipe.score.batches, draw
        )

    @torch.no_grad()
    def score(self, update: Payloads) -> float:
        """Held-out loss at anchor - eta * update, less that at the anchor, in nats: below zero it helps."""
        if self.before is None:
            self.before = self._loss(self.anchor)
        moved = {name: tensor.clone() for name, tensor in self.anchor.items()}
        self.codec.step(moved, [update], self.recipe.outer.step_size)  # as a round that counts it alone
        return self._loss(moved) - self.before

    def _loss(self, params: Mapping[str, Tensor]) -> float:
        """The mean over all tokens of the batches, through no boundary: what a full replica has."""
        model = self.recipe.model
        near = {name: tensor.to(self.dtype) for name, tensor in params.items()}
        rope = rope_table(model, model.context, next(iter(params.values())).dtype, self.device)
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for batch in self.batches:
            for part in batch.to(self.device).split(self.rows):
                x = stream(near, part[:, :-1], model, rope, None, self.dtype, layer)
                total += head_losses(head_weights(near), x, part[:, 1:], model).double() * len(part)
                count += len(part)
        return float(total) / count
