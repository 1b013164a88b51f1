"""What one replica's update does to held-out text: the score by which an update is judged (docs/protocol.md,
Scores).

The same function for the simulator and for closers. It needs the whole model, so a stage cannot score.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.data.corpus import TokenView
from isthmus.data.tokens import drawn_batches
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import head_losses, head_weights, layer, rope_table, stream
from isthmus.outer.codec import Payloads, PlainCodec
from isthmus.replica.evaluate import rows_that_fit
from isthmus.subspace.boundaries import BasisSet, boundary_functions, forward_key


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
        self.before: dict[tuple, float] = {}  # the anchor's losses, by forward, once they are needed
        self.bases = BasisSet(recipe, device, torch.float64 if dtype == torch.float64 else torch.float32)

    def begin(self, anchor: Mapping[str, Tensor], round_number: int, draw: bytes) -> None:
        """`draw` chooses the held-out windows; whoever does not know it cannot prepare for them. The anchor
        is read when an update is scored, and never changed."""
        recipe = self.recipe
        self.anchor = anchor
        self.before.clear()
        self.bases.begin_round(round_number)
        self.batches = drawn_batches(
            self.held_out, recipe.inner.batch, recipe.model.context, recipe.score.batches, draw
        )

    @torch.no_grad()
    def score(self, update: Payloads, author: Member | None = None) -> float:
        """Held-out loss at anchor - eta * update, less that at the anchor, in nats: below zero it helps.

        The loss is that of the whole model. A compressed author has trained another function, the model with
        its boundaries: where its update seems to do harm, the better of the two counts.
        """
        moved = {name: tensor.clone() for name, tensor in self.anchor.items()}
        self.codec.step(moved, [update], self.recipe.outer.step_size)  # as a round that counts it alone
        score = self._loss(moved) - self._before(None)
        if author is None or not author.config.compressed or score <= self.recipe.score.bound:
            return score
        return min(score, self._loss(moved, author) - self._before(author))

    def _before(self, author: Member | None) -> float:
        """The anchor's loss, once for each forward."""
        key = forward_key(self.recipe, author, self.bases) if author else ()
        if key not in self.before:
            self.before[key] = self._loss(self.anchor, author)
        return self.before[key]

    def _loss(self, params: Mapping[str, Tensor], through: Member | None = None) -> float:
        """The mean over all tokens of the batches, through a replica's boundaries or through none."""
        model = self.recipe.model
        near = {name: tensor.to(self.dtype) for name, tensor in params.items()}
        rope = rope_table(model, model.context, self.bases.dtype, self.device)
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for batch in self.batches:
            for part in batch.to(self.device).split(self.rows):
                edges = {}
                if through:
                    table = params[EMBEDDING]
                    edges = boundary_functions(
                        self.recipe, [through], self.bases, table, len(part), params=near
                    )
                x = stream(near, part[:, :-1], model, rope, edges, self.dtype, layer)
                total += head_losses(head_weights(near), x, part[:, 1:], model).double() * len(part)
                count += len(part)
        return float(total) / count
