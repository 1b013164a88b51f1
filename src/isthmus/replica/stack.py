"""Several replicas that advance together as one computation; a full replica is a stack of one."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.layout.stages import EMBEDDING
from isthmus.layout.wire import INT_BITS
from isthmus.model.llama import head_weights, rope_table, stream
from isthmus.model.parts import parts
from isthmus.replica.trainable import Trainable
from isthmus.subspace.boundaries import BasisSet, as_sent, boundary_functions


class Stack(Trainable):
    """R replicas with separate weights (R, ...), or, if `shared`, M replicas that average every gradient and
    so have one set of weights: a full replica, and the per-step AdamW baseline."""

    table: Tensor

    def __init__(
        self,
        recipe: Recipe,
        members: Sequence[Member],
        anchor: Mapping[str, Tensor],
        table: Tensor,
        bases: BasisSet,
        *,
        dtype: torch.dtype,
        grad_accum_steps: int = 1,
        shared: bool = False,
        compiled: bool = False,
        recorded: bool = False,
        reduce_grads: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """`compiled`: see `parts`. `recorded` steps are launched as one graph if possible, which keeps a
        step's memory allocated. `reduce_grads` averages gradients, in place, with those of other
        processes."""
        lead = () if shared else (len(members),)
        params = {name: t.expand(*lead, *t.shape).clone() for name, t in anchor.items()}
        # Gradients that accumulate over parts of a batch keep the precision of the weights.
        half = dtype == torch.bfloat16 and grad_accum_steps == 1
        super().__init__(recipe, members, params, bases, stacked=not shared, bf16_copies=half)
        self.shared, self.dtype, self.grad_accum_steps = shared, dtype, grad_accum_steps
        with_feedback = recipe.outer.method == "sparseloco" and not shared
        self.feedback = {n: torch.zeros_like(p) for n, p in self.params.items()} if with_feedback else {}
        # Weights that are synchronised in every step have an embedding that is never stale.
        never_stale = shared and recipe.subspace.adaptation
        self.table = self.params[EMBEDDING].detach() if never_stale else table
        self.rope = rope_table(recipe.model, recipe.model.context, self.master_dtype, self.device)
        self.parts = parts(compiled, recipe.inner.recompute)
        self.compiled, self.recorded = compiled, recorded and self.opt.fused is not None
        self.reduce_grads = reduce_grads
        self._build_boundaries()

    def _build_boundaries(self) -> None:
        """Build this round's boundaries: compressing, or opening."""
        recipe, members, bases = self.recipe, self.members, self.bases
        rows = recipe.batch_of(members[0].config) // self.grad_accum_steps if self.shared else 1
        # Tokens of each row with values outside the range of a few-bit wire, in either direction.
        self.outside = torch.zeros(len(members) * rows, dtype=torch.long, device=self.device)
        self.boundary_fns = boundary_functions(
            recipe,
            members,
            bases,
            self.table,
            rows,
            params=self.leaves,
            outside=self.outside,
            compiled=self.compiled,
        )
        self.opening = bases.opening
        self._work = gpu.Replayed(self._step) if self.recorded else self._step

    def _member_losses(self, params: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """(R,) losses of tokens (R, B, L + 1), every replica through its own boundaries."""
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        if self.shared:
            inputs = inputs.flatten(0, 1)
        model, run_layer = self.recipe.model, self.parts.layer
        x = stream(params, inputs, model, self.rope, self.boundary_fns, self.dtype, run_layer)
        return self.parts.head_losses(head_weights(params, model), x, targets, model)

    def pop_outside(self) -> list[int | None]:
        """The tokens of each replica since the last call that were outside the range of its wire; None if
        that is not a few-bit wire."""
        counts = self.outside.view(len(self.members), -1).sum(1).tolist()
        self.outside.zero_()
        return [
            count if member.config.wire in INT_BITS else None
            for member, count in zip(self.members, counts, strict=True)
        ]

    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        """Set all replicas to the anchor's values; weights that they share are the anchor."""
        if self.opening != self.bases.opening:  # finishing begins
            self._build_boundaries()
        if not self.shared:
            self.set_weights(anchor)

    def inner_step(self, tokens: Tensor, inner_step: int | None = None) -> tuple[Tensor, Tensor]:
        """One InnerOpt update of every replica (eq. 1) on tokens (R, B, L + 1).

        Return losses and gradient norms (R,), still on the device. `inner_step` counts over the run, for a
        replica that was away.
        """
        self.advance(inner_step)
        losses, norms = self._work(tokens)
        return losses, norms

    def _step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The device's part of a step. Autograd returns the gradients instead of accumulating them: for that
        it would look up the stream on which each weight was made."""
        self.zero_grad()
        leaves = self.leaves
        losses = torch.zeros(len(self.members), device=tokens.device, dtype=gpu.wide(tokens.device))
        weight = 1 / (self.grad_accum_steps * (len(self.members) if self.shared else 1))
        for part in tokens.chunk(self.grad_accum_steps, dim=1):
            part_losses = self._member_losses(leaves, part)
            grads = torch.autograd.grad(part_losses.sum() * weight, list(leaves.values()))
            for leaf, grad in zip(leaves.values(), grads, strict=True):
                leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)
            losses += part_losses.detach().to(losses.dtype) / self.grad_accum_steps
        if self.reduce_grads:
            self.reduce_grads([leaf.grad for leaf in leaves.values() if leaf.grad is not None])
        return losses, self.update()

    def row(self, tensors: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
        """One replica's tensors, as views."""
        return {name: tensor.detach()[i] for name, tensor in tensors.items()}

    def sent_from(self, i: int, anchor: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One replica's weights, in the form that its pseudo-gradient uses."""
        return as_sent(self.recipe, self.members[i], self.bases, self.row(self.params, i), anchor)

    def state(self) -> dict[str, Tensor]:
        """All named tensors that a resumed run needs."""
        named = self.opt.state() | {f"feedback/{name}": t for name, t in self.feedback.items()}
        if self.shared:
            named |= {f"params/{name}": p.detach() for name, p in self.params.items()}
        return named

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        """Continue from `state` as it was after `step_count` inner steps."""
        self.opt.restore(state, step_count)
        for name, tensor in self.feedback.items():
            tensor.copy_(state[f"feedback/{name}"])
        if self.shared:  # to the last bit, so they are not projected again
            for name, param in self.params.items():
                param.copy_(state[f"params/{name}"])

    def move(self, device: torch.device | str) -> None:
        """Move the storage to the host or back; the tensors keep their identity."""
        self.zero_grad()
        for tensors in (self.params, self.copies, self.opt.first, self.opt.second, self.feedback):
            for tensor in tensors.values():
                tensor.data = tensor.data.to(device)
