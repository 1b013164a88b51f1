"""Several replicas that advance together as one computation: every tensor carries a leading replica axis."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.layout.stages import EMBEDDING, stage_of
from isthmus.model.adam import FusedAdamW
from isthmus.model.inner import InnerOpt
from isthmus.model.llama import forward, rope_table, token_losses
from isthmus.subspace.boundaries import (
    BasisSet,
    as_sent,
    boundary_functions,
    forward_key,
    projected,
    projected_names,
)


class Stack:
    """R replicas with weights of their own (R, ...), or, when `shared`, M replicas that average every
    gradient and so hold one set of weights between them: the per-step AdamW baseline."""

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
        compiled: dict | None = None,
        recorded: bool = False,
    ) -> None:
        """`compiled` holds the compiled forwards of stacks built before; None: nothing is compiled.
        `recorded` steps are launched as one graph where they can be, which keeps a step's memory."""
        self.recipe, self.members, self.bases, self.shared = recipe, tuple(members), bases, shared
        self.dtype, self.grad_accum_steps = dtype, grad_accum_steps
        device = table.device
        lead = () if shared else (len(members),)
        self.params = {
            name: tensor.expand(*lead, *tensor.shape).clone().requires_grad_()
            for name, tensor in anchor.items()
        }
        with_feedback = recipe.outer.method == "sparseloco"
        self.feedback = (
            {name: torch.zeros_like(p) for name, p in self.params.items()} if with_feedback else {}
        )
        if shared and recipe.subspace.adaptation:
            table = self.params[
                "tok_embeddings.weight"
            ].detach()  # synchronised every step, so it is never stale
        self.table = table
        wide = next(iter(anchor.values())).dtype
        self.rope = tuple(t.to(device) for t in rope_table(recipe.model, recipe.model.context, wide))
        modified = self._modified(device)
        self.copies = self._bf16_copies(modified)
        self.opt = InnerOpt(
            self.params,
            recipe.inner,
            recipe.num_inner_steps,
            stacked=not shared,
            groups=self._clip_groups(device),
            modified=modified,
            copies=self.copies,
        )
        self.compiled, self.recorded = compiled, recorded and self.opt.fused is not None
        self._build_boundaries()

    def _build_boundaries(self) -> None:
        """As boundaries are now: they compress, or they open."""
        recipe, members, bases = self.recipe, self.members, self.bases
        rows = recipe.inner.batch // self.grad_accum_steps if self.shared else 1
        self.boundary_fns, self.opening = (
            boundary_functions(recipe, members, bases, self.table, rows),
            bases.opening,
        )
        self._losses = self._member_losses
        if self.compiled is not None:  # stacks that cross alike are the same function: compile it once
            key = (len(members), *(forward_key(recipe, member, bases) for member in members))
            self._losses = self.compiled.setdefault(key, torch.compile(self._member_losses, dynamic=False))
        self._work = gpu.Replayed(self._step) if self.recorded else self._step

    def _bf16_copies(self, modified: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leaves in bf16 for the matrices that a bf16 forward reads in bf16 anyway: no cast in either
        direction, and half the bytes of gradient. Not where gradients of grad_accum_steps are added up."""
        if self.dtype != torch.bfloat16 or self.grad_accum_steps > 1 or self.shared or modified:
            return {}
        if not FusedAdamW.fits(self.params):
            return {}
        return {
            name: p.detach().bfloat16().requires_grad_()
            for name, p in self.params.items()
            if p.dim() == 3 and name != EMBEDDING
        }

    def _clip_groups(self, device: torch.device) -> Tensor | None:
        """(R, T) stage numbers, where every stage clips on its own."""
        if self.recipe.inner.clip_scope == "replica" or self.shared:
            return None
        layers = self.recipe.model.layers
        stages = [[stage_of(name, layers, m.config.stages) for name in self.params] for m in self.members]
        return torch.tensor(stages, device=device)

    def _modified(self, device: torch.device) -> dict[str, Tensor]:
        """The matrices of Table 5d and which replicas treat them so."""
        if not self.recipe.subspace.modified_adamw:
            return {}
        chosen = [set(projected_names(self.recipe, member)) for member in self.members]
        masks = {name: [name in names for names in chosen] for name in self.params}
        if self.shared:
            masks = {name: mask[:1] for name, mask in masks.items()}
        return {name: torch.tensor(mask, device=device) for name, mask in masks.items() if any(mask)}

    def _member_losses(self, params: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """(R,) losses of tokens (R, B, L + 1), every replica through its own boundaries."""
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        if self.shared:
            inputs = inputs.flatten(0, 1)
        logits = forward(params, inputs, self.recipe.model, self.rope, self.boundary_fns, self.dtype)
        return token_losses(logits.view(*targets.shape, -1), targets)

    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        """All replicas stand at the anchor."""
        if self.opening != self.bases.opening:  # finishing begins
            self._build_boundaries()
        if self.shared:
            return
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(anchor[name].expand_as(param))
            self.opt.refresh_copies()
            self._project_weights()

    def inner_step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One InnerOpt update of every replica (eq. 1); its losses and gradient norms (R,), still on the
        device."""
        self.opt.advance()
        return self._work(tokens)

    def _step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What of it the device does. Gradients are not accumulated by autograd, which would look for the
        stream that each weight was made on."""
        self.opt.zero_grad()
        params = self.params | self.copies
        losses = torch.zeros(len(self.members), device=tokens.device, dtype=torch.float64)
        weight = 1 / (self.grad_accum_steps * (len(self.members) if self.shared else 1))
        for piece in tokens.chunk(self.grad_accum_steps, dim=1):
            piece_losses = self._losses(params, piece)
            grads = torch.autograd.grad(piece_losses.sum() * weight, list(params.values()))
            for param, grad in zip(params.values(), grads, strict=True):
                param.grad = grad if param.grad is None else param.grad.add_(grad)
            losses += piece_losses.detach().double() / self.grad_accum_steps
        norms = self.opt.update()
        with torch.no_grad():
            self._project_weights()
        return losses, norms

    def _project_weights(self) -> None:
        """Table 5b: compressed replicas' W_p1 and W_p2 return to S after every step."""
        if not self.recipe.subspace.weight_projection:
            return
        for rows, member in self._alike():
            weights = {name: p.detach()[rows] for name, p in self.params.items()}
            for name, weight in projected(self.recipe, member, self.bases, weights).items():
                for tensors in (self.params, self.copies):
                    if name in tensors:
                        tensors[name].detach()[rows] = weight.to(tensors[name].dtype)

    def _alike(self) -> list[tuple[slice, Member]]:
        """Neighbours that project the same matrices onto the same U, and one of them."""
        if self.shared:  # one set of weights, without a leading axis
            return [(slice(None), self.members[0])]
        groups: list[tuple[slice, Member]] = []
        for row, member in enumerate(self.members):
            if groups and member.config is groups[-1][1].config and self.recipe.subspace.basis == "global":
                groups[-1] = (slice(groups[-1][0].start, row + 1), member)
            else:
                groups.append((slice(row, row + 1), member))
        return groups

    def row(self, tensors: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
        """One replica's tensors, as views."""
        return {name: tensor.detach()[i] for name, tensor in tensors.items()}

    def sent_from(self, i: int, anchor: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One replica's weights, as its pseudo-gradient is taken from them."""
        return as_sent(self.recipe, self.members[i], self.bases, self.row(self.params, i), anchor)

    def state(self) -> dict[str, Tensor]:
        named = self.opt.state() | {f"feedback/{name}": t for name, t in self.feedback.items()}
        if self.shared:
            named |= {f"params/{name}": p.detach() for name, p in self.params.items()}
        return named

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        with torch.no_grad():
            self.opt.restore(state, step_count)
            for name, tensor in self.feedback.items():
                tensor.copy_(state[f"feedback/{name}"])
            if self.shared:
                for name, param in self.params.items():
                    param.copy_(state[f"params/{name}"])

    def move(self, device: torch.device | str) -> None:
        """Park on the host, or come back: storage moves, the tensors keep their identity."""
        self.opt.zero_grad()
        for tensor in (*self.params.values(), *self.opt.first.values(), *self.opt.second.values()):
            tensor.data = tensor.data.to(device)
        for tensor in (*self.feedback.values(), *self.copies.values()):
            tensor.data = tensor.data.to(device)
