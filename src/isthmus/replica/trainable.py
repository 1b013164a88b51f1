"""The inner step, written once: full replicas, stages and stacks of replicas train their weights with it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.layout.stages import EMBEDDING, is_looked_up, stage_of
from isthmus.model.adam import FusedAdamW
from isthmus.model.inner import InnerOpt
from isthmus.subspace.boundaries import BasisSet, projected, projected_names
from isthmus.subspace.embedding import split


class Trainable:
    """Named weights with their InnerOpt (eq. 1 of arXiv 2601.02360).

    `stacked` weights have the replicas of `members` as leading axis, (R, ...). Otherwise there is one set of
    weights: a full replica's, a stage's, or the one that all `members` share.

    An inner step is `zero_grad`, then gradients into `.grad`, then `advance` and `update`. Its forward reads
    the weights in `leaves`.
    """

    def __init__(
        self,
        recipe: Recipe,
        members: Sequence[Member],
        params: Mapping[str, Tensor],
        bases: BasisSet,
        *,
        stacked: bool = False,
        bf16_copies: bool = False,
    ) -> None:
        """`bf16_copies` are made if the fused step can keep them (see `adam`)."""
        self.recipe, self.members, self.bases, self.stacked = recipe, tuple(members), bases, stacked
        self.params = {name: p.requires_grad_() for name, p in params.items()}
        first = next(iter(self.params.values()))
        self.master_dtype, self.device = first.dtype, first.device
        self.table: Tensor | None = None  # compressed replicas keep its part outside S for a round
        modified = self._modified()
        possible = bf16_copies and not modified and FusedAdamW.fits(self.params)
        self.copies = self._bf16_copies() if possible else {}
        self.opt = InnerOpt(
            self.params,
            recipe.inner,
            recipe.num_inner_steps,
            stacked=stacked,
            groups=self._clip_groups(),
            modified=modified,
            copies=self.copies,
        )

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that the forward reads and autograd differentiates: weights or bf16 copies."""
        return self.params | self.copies

    def _bf16_copies(self) -> dict[str, Tensor]:
        """Leaves for the matrices that a bf16 forward reads in bf16: they need no cast in either direction,
        and their gradients take half the bytes."""
        return {
            name: p.detach().bfloat16().requires_grad_()
            for name, p in self.params.items()
            if p.dim() == 2 + self.stacked and not is_looked_up(name)
        }

    def _clip_groups(self) -> Tensor | None:
        """(R, T) stage numbers, if every stage clips on its own."""
        if self.recipe.inner.clip_scope == "replica" or not self.stacked:
            return None
        model = self.recipe.model
        stages = [[stage_of(name, model, m.config.stages) for name in self.params] for m in self.members]
        return torch.tensor(stages, device=self.device)

    def _modified(self) -> dict[str, Tensor]:
        """The matrices of Table 5d, each with a mask of the replicas that modify AdamW for it."""
        if not self.recipe.subspace.modified_adamw:
            return {}
        rows = self.members if self.stacked else self.members[:1]
        chosen = [set(projected_names(self.recipe, member)) for member in rows]
        masks = {name: [name in names for names in chosen] for name in self.params}
        return {name: torch.tensor(mask, device=self.device) for name, mask in masks.items() if any(mask)}

    @torch.no_grad()
    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Set every replica to these values, which have no leading axis."""
        for name, param in self.params.items():
            param.copy_(values[name].expand_as(param))
        self.opt.refresh_copies()
        self._project_weights()

    def zero_grad(self) -> None:
        self.opt.zero_grad()

    def advance(self, inner_step: int | None = None) -> None:
        """The host's part of an update: its number and its learning rate, those of this inner step of the
        run. Without a number, count the updates."""
        self.opt.advance(inner_step)

    @torch.no_grad()
    def collect_grads(self) -> None:
        """Add the copies' gradients to those of their weights, in the precision of the weights, between the
        parts of a batch whose gradients accumulate."""
        for name, copy in self.copies.items():
            if copy.grad is not None:
                weight = self.params[name]
                weight.grad = copy.grad.float() if weight.grad is None else weight.grad.add_(copy.grad)
                copy.grad = None

    @torch.no_grad()
    def update(self, squared_norm: Tensor | None = None) -> Tensor:
        """The device's part: clip, AdamW, and project the weights into S if Table 5b applies.

        Return the gradient norms (R,) before clipping. A stage clips by the squared norm (1,) of its whole
        replica.
        """
        keeps_t_perp = self._keeps_t_perp()
        if keeps_t_perp:
            self._decay_embedding()
        norms = self.opt.update(squared_norm, (EMBEDDING,) if keeps_t_perp else ())
        self._project_weights()
        return norms

    def _keeps_t_perp(self) -> bool:
        """Whether weight decay leaves T_perp alone. Weights shared by full and compressed replicas count as
        full replicas' weights. Fully open boundaries have no T_perp."""
        if self.bases.opening and self.recipe.finish.how == "full":
            return False
        compressed = [member.config.compressed for member in self.members]
        some = any(compressed) if self.stacked else all(compressed)
        return some and EMBEDDING in self.params and not self.recipe.subspace.decay_t_perp

    def _decay_embedding(self) -> None:
        """AdamW's weight decay of TE; in compressed replicas only of T_S = TE - T_perp. There T_S is trained,
        and T_perp is constant in a round (sec. 2.4). T_perp's exempt part shrinks as boundaries open."""
        rate = self.opt.current_lr * self.recipe.inner.weight_decay
        for rows, member in self._alike():
            embedding = self.params[EMBEDDING].detach()[rows]
            if member.config.compressed:
                assert self.table is not None, "compressed replicas have a table"
                t_perp = split(self.table, self.bases.get(member, 0))[1]
                embedding.lerp_(t_perp * (1 - self.bases.share), rate)
            else:
                embedding.mul_(1 - rate)

    def _project_weights(self) -> None:
        """Table 5b: project W_p1 and W_p2 of compressed replicas back into S."""
        if not self.recipe.subspace.weight_projection:
            return
        for rows, member in self._alike():
            weights = {name: p.detach()[rows] for name, p in self.params.items()}
            for name, weight in projected(self.recipe, member, self.bases, weights).items():
                for tensors in (self.params, self.copies):
                    if name in tensors:
                        tensors[name].detach()[rows] = weight.to(tensors[name].dtype)

    def _alike(self) -> list[tuple[slice, Member]]:
        """Group neighbours that project the same matrices onto the same U, each group with one member."""
        if not self.stacked:
            return [(slice(None), self.members[0])]
        groups: list[tuple[slice, Member]] = []
        for row, member in enumerate(self.members):
            if groups and member.config is groups[-1][1].config and self.recipe.subspace.basis == "global":
                groups[-1] = (slice(groups[-1][0].start, row + 1), member)
            else:
                groups.append((slice(row, row + 1), member))
        return groups
