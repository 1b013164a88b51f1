"""The three held-out losses, full, pipelined and mixed (docs/method.md, Three losses), and the bias that
compressed boundaries bring in."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.data.corpus import Corpus
from isthmus.data.tokens import validation_batches
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import forward, rope_table, token_losses
from isthmus.runlog.row import Bias, Scores, by_kind
from isthmus.subspace.bias import drift, outside, watched
from isthmus.subspace.boundaries import BasisSet, boundary_functions, forward_key, projected


class Scorer:
    """Scores an anchor on fixed held-out text, through the boundaries of every replica."""

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        bases: BasisSet,
        device: torch.device,
        dtype: torch.dtype,
        recorded: bool = False,
    ) -> None:
        """`recorded`: on a GPU with memory to spare, the forwards are launched as one graph."""
        self.recipe, self.bases, self.dtype, self.device = recipe, bases, dtype, device
        self.members = recipe.fleet()
        batches = validation_batches(
            corpus, recipe.inner.batch, recipe.model.context, recipe.data.eval_batches
        )
        self.held_out = [batch.to(device).long() for batch in batches]
        self.rope = rope_table(recipe.model, recipe.model.context, bases.dtype, device)
        self.frozen: Tensor | None = None  # the table that the round under way trains with
        self.recorded = recorded
        self.recordings: dict[tuple, gpu.Replayed] = {}

    def hold(self, table: Tensor) -> None:
        """Freeze the embedding at a round's start: its part outside S is constant until the round's end."""
        if any(member.config.compressed for member in self.members):
            self.frozen = table.detach().clone() if self.frozen is None else self.frozen.copy_(table)

    @torch.no_grad()
    def score(self, anchor: Mapping[str, Tensor], table: Tensor) -> Scores:
        """`table` is the embedding that compressed boundaries subtract: the anchor's own, unless it is
        frozen."""
        keys = [forward_key(self.recipe, member, self.bases) for member in self.members]
        forwards: dict[tuple, Member | None] = {(): None}  # one member for each that differs
        for key, member in zip(keys, self.members, strict=True):
            forwards.setdefault(key, member)
        losses, dropped = (tensor.tolist() for tensor in self._measured(anchor, table, forwards))
        by_forward = dict(zip(forwards, losses, strict=True))
        per_member = [by_forward[key] for key in keys]
        rest = iter(dropped)
        shares = {
            key: [next(rest) for _ in range(member.config.stages - 1)]
            for key, member in forwards.items()
            if member and member.config.compressed
        }
        pipelined = [loss for loss, m in zip(per_member, self.members, strict=True) if m.config.stages > 1]
        return {
            "loss_full": by_forward[()],
            "loss_pipelined": sum(pipelined) / len(pipelined) if pipelined else None,
            "loss_mixed": sum(per_member) / len(per_member),
            "loss_by_kind": by_kind(self.members, per_member),
            "bias": self._bias(anchor[EMBEDDING], shares),
        }

    def _measured(
        self, anchor: Mapping[str, Tensor], table: Tensor, forwards: Mapping[tuple, Member | None]
    ) -> tuple[Tensor, Tensor]:
        """Each forward's loss, and the shares that all compressed boundaries dropped; on the device."""

        def work() -> tuple[Tensor, Tensor]:
            shares: list[Tensor] = []
            losses = [self._loss(anchor, table, member, shares) for member in forwards.values()]
            return torch.stack(losses), torch.stack(shares) if shares else losses[0].new_zeros(0)

        if not self.recorded:
            return work()
        # Finishing changes the forwards, not the tensors they read.
        recording = self.recordings.setdefault((id(anchor), id(table), *forwards), gpu.Replayed(work))
        losses, shares = recording()
        return losses, shares

    def _bias(self, embedding: Tensor, shares: Mapping[tuple, Sequence[float]]) -> dict[str, Bias]:
        """By compressed kind: the share of energy that each boundary drops, and the embedding's drift out of
        S in this round, both means over the kind's replicas."""
        groups: dict[str, list[Member]] = {}
        for member in self.members:
            if member.config.compressed:
                groups.setdefault(member.config.name, []).append(member)
        bias: dict[str, Bias] = {}
        for name, group in groups.items():
            rows = [shares[forward_key(self.recipe, member, self.bases)] for member in group]
            drifts = self._drifts(embedding, group)
            bias[name] = {
                "outside": [sum(column) / len(column) for column in zip(*rows, strict=True)],
                "drift": sum(drifts) / len(drifts) if drifts else None,
            }
        return bias

    def _drifts(self, embedding: Tensor, group: Sequence[Member]) -> list[float]:
        if self.frozen is None:
            return []
        edges = range(group[0].config.stages - 1)
        bases = {self.bases.key(m, b): self.bases.get(m, b) for m in group for b in edges}
        return [drift(embedding, self.frozen, basis).item() for basis in bases.values()]

    def _loss(
        self, anchor: Mapping[str, Tensor], table: Tensor, member: Member | None, shares: list[Tensor]
    ) -> Tensor:
        """Appends to `shares` what each compressed boundary dropped of the first held-out batch."""
        if member is not None:
            anchor = dict(anchor) | projected(self.recipe, member, self.bases, anchor)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(self.held_out):
            boundary_fns = (
                boundary_functions(self.recipe, [member], self.bases, table, len(batch)) if member else {}
            )
            if member and member.config.compressed and number == 0:
                for boundary, edge in enumerate(sorted(boundary_fns)):
                    ((rows, cross),) = boundary_fns[edge]
                    measure = outside(self.bases.get(member, boundary), table)
                    boundary_fns[edge] = [(rows, watched(cross, measure, shares))]
            logits = forward(anchor, batch[:, :-1], self.recipe.model, self.rope, boundary_fns, self.dtype)
            total += token_losses(logits, batch[:, 1:]).double() * len(batch)
        return total / sum(map(len, self.held_out))
