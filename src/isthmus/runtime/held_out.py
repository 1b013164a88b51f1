"""Measure the held-out loss of a run that no machine records: one member reports it with its update.

It needs the whole model and the corpus, so a full replica measures it, between two rounds and on its own
device. Unless the recipe names the replica, it is the first full replica that gave to the round. All know
which that is, and if it goes away the next one takes over.
"""

import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.data.corpus import Corpus
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import init_tensor
from isthmus.protocol.ledger import Ledger
from isthmus.replica.evaluate import Scorer, rows_that_fit
from isthmus.runlog.facts import HeldOut
from isthmus.subspace.boundaries import BasisSet

SHARE = 20  # it takes at most 1/SHARE of the time, unless this replica was named for it


class HeldOutLoss:
    """Measures the anchor of this process, which holds the whole model."""

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        ledger: Ledger,
        corpus: Corpus,
        anchor: Mapping[str, Tensor],
        dtype: torch.dtype,
        asked: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`asked`: the value of `join --score`; None: use the recipe's. `dtype` is that of the stream."""
        self.recipe, self.member, self.ledger, self.corpus = recipe, member, ledger, corpus
        self.anchor, self.dtype, self.asked, self.clock = anchor, dtype, asked, clock
        self.scorer: Scorer | None = None
        self.first_table: Tensor | None = None
        self.not_before = -math.inf

    def is_ours(self, round_number: int) -> bool:
        """Whether this replica measures theta^(t)."""
        if self.asked is not None:
            return self.asked
        by = self.recipe.data.eval_by
        if by != "auto":
            return by == self.member.name
        manifest = self.ledger.manifest(round_number) if round_number else None
        gave = {entry.replica for entry in manifest.entries} if manifest else None
        full = [m.name for m in self.ledger.at(max(1, round_number)).recipe.fleet() if m.config.parts == 1]
        there = [name for name in full if gave is None or name in gave]
        return bool(there) and there[0] == self.member.name

    def after(self, round_number: int) -> HeldOut | None:
        """The loss of theta^(t), if it is wanted and ours to measure."""
        wanted = self.recipe.is_scored(round_number) and self.is_ours(round_number)
        named = self.asked or self.recipe.data.eval_by == self.member.name
        spared = named or round_number in (0, self.recipe.outer.rounds)
        if not wanted or (self.clock() < self.not_before and not spared):
            return None
        began = self.clock()
        found = self._measure(round_number)
        ended = self.clock()
        self.not_before = ended + SHARE * (ended - began)
        return found

    def _measure(self, round_number: int) -> HeldOut | None:
        recipe = self.ledger.at(max(1, round_number)).recipe
        if self.scorer is None or self.scorer.recipe != recipe:
            self.scorer = self._make(recipe)
        self.scorer.bases.begin_round(round_number)
        scores = self.scorer.score(self.anchor, self._table())
        self._give_back()
        full, mixed = scores["loss_full"], scores["loss_mixed"]
        if full is None or mixed is None or not (math.isfinite(full) and math.isfinite(mixed)):
            return None
        return HeldOut(round=round_number, full=full, pipelined=scores["loss_pipelined"], mixed=mixed)

    def _give_back(self) -> None:
        """Free cached memory if the GPU's is scarce: the inner steps need what the forwards used."""
        device = self.anchor[EMBEDDING].device
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if free < total // 4:
                torch.cuda.empty_cache()

    def _make(self, recipe: Recipe) -> Scorer:
        weights = self.anchor[EMBEDDING]
        bases = BasisSet(recipe, weights.device, weights.dtype)
        rows = rows_that_fit(recipe, weights.device)
        return Scorer(recipe, self.corpus, bases, weights.device, self.dtype, rows=rows)

    def _table(self) -> Tensor:
        """The embedding that compressed boundaries subtract."""
        anchor = self.anchor[EMBEDDING]
        if self.recipe.subspace.adaptation:
            return anchor
        if self.first_table is None:  # then T_perp stays at its first value
            shape = tuple(anchor.shape)
            self.first_table = init_tensor(EMBEDDING, shape, self.recipe.model, self.recipe.seed).to(anchor)
        return self.first_table
