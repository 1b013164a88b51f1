"""Scores of updates for the closer of this process, which has the whole model and held-out text."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.config import Recipe
from isthmus.data.corpus import TokenView
from isthmus.outer.codec import PlainCodec
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.shards import unpack_shards
from isthmus.replica.usefulness import UpdateScorer


class UpdateScores:
    """A `ScoreUpdate`. While a round is open nobody changes the anchor, so it is read where it lies.

    It needs room for one more copy of the weights while it scores, and gives it back.
    """

    def __init__(
        self,
        recipe: Recipe,
        ledger: Ledger,
        anchor: Mapping[str, Tensor],
        codec: PlainCodec,
        held_out: TokenView,
        dtype: torch.dtype,
    ) -> None:
        self.ledger, self.anchor, self.codec = ledger, anchor, codec
        device = next(iter(anchor.values())).device
        self.scorer = UpdateScorer(recipe, held_out, codec, device, dtype)
        self.begun: tuple[int, bytes] | None = None

    def __call__(self, name: str, round_number: int, draw: bytes, shards: Mapping[int, bytes]) -> float:
        if self.begun != (round_number, draw):
            self.begun = round_number, draw
            self.scorer.begin(self.anchor, round_number, draw)
        members = {member.name: member for member in self.ledger.at(round_number).recipe.fleet()}
        return self.scorer.score(unpack_shards(self.ledger, shards, self.codec.unpack_many), members[name])
