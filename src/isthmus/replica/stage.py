"""One stage between its boundaries: a micro-batch forward, a micro-batch backward, whole or in two parts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.errors import ConfigError
from isthmus.layout.stages import EMBEDDING, boundaries, stage_names
from isthmus.model.inner import InnerOpt
from isthmus.model.llama import embed, head, init_tensor, rope_table, run_layers, token_losses
from isthmus.replica.base import types_of
from isthmus.replica.links import TOKEN_TYPES, Layout, Part
from isthmus.replica.split_backward import Debt, Postponed
from isthmus.subspace import OpenBoundary, SubspaceBoundary
from isthmus.subspace.boundaries import BasisSet, projected, projected_names
from isthmus.subspace.wire import WIRE_TYPES


class Stage:
    """A slice of layers with its own leaves, InnerOpt and, when compressed, the anchor's embedding table.

    What crosses a boundary is of the wire's type, both ways; inside the stage it is cast to the stream's.
    Every micro-batch in flight keeps its activations until its backward, the products of layers until the
    last part of it. The head's weight gradient is never postponed: it would keep the logits' gradient.
    """

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        index: int,
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.recipe, self.member, self.index = recipe, member, index
        self.device = torch.device(device)
        self.wide, self.dtype = types_of(precision)
        self.wire = WIRE_TYPES[member.config.wire]
        model, num_stages = recipe.model, member.config.stages
        if recipe.subspace.grassmann_every and member.config.compressed:
            raise ConfigError(
                "subspace.grassmann_every is for the simulator only; real stages keep the U they drew; set 0"
            )
        self.first, self.last = index == 0, index == num_stages - 1
        edges = (0, *boundaries(model.layers, num_stages), model.layers)
        self.layers = range(edges[index], edges[index + 1])
        self.names = stage_names(model, num_stages)[index]
        self.params = {name: self._drawn(name).requires_grad_() for name in self.names}
        # Every stage draws the table itself. Without adaptation (Table 5a) this first value is kept.
        self.table = self._drawn(EMBEDDING) if member.config.compressed else None
        self.bases = BasisSet(recipe, self.device, self.wide)
        self.before, self.after = self._boundary(index - 1), self._boundary(index)
        self.rope = tuple(t.to(self.device) for t in rope_table(model, model.context, self.wide))
        written = set(projected_names(recipe, member)) & set(self.names)
        modified = written if recipe.subspace.modified_adamw else ()
        self.opt = InnerOpt(
            self.params,
            recipe.inner,
            recipe.num_inner_steps,
            modified={name: torch.tensor([True], device=self.device) for name in modified},
        )
        self.held: dict[int, tuple[Tensor | None, Tensor]] = {}  # micro-batch -> what came in, what went out
        self.splits = recipe.inner.backward == "split"
        self.debts: dict[int, Debt] = {}  # of micro-batches in flight, where backwards are split

    def _drawn(self, name: str) -> Tensor:
        model = self.recipe.model
        return init_tensor(name, model.shapes()[name], model, self.recipe.seed).to(self.device, self.wide)

    def _boundary(self, number: int) -> OpenBoundary | SubspaceBoundary:
        if self.table is None or not 0 <= number < self.member.config.stages - 1:
            return OpenBoundary()
        return self.bases.boundary(self.member, number, self.table)

    def follow_round(self, round_number: int) -> bool:
        """Boundaries as they are in this outer round. True where they cross otherwise than in the last."""
        changed = self.bases.begin_round(round_number)
        if changed:
            self.before, self.after = self._boundary(self.index - 1), self._boundary(self.index)
        return changed

    def frames(self) -> tuple[Layout, Layout]:
        """How one micro-batch crosses a link: forward, and back. Both sides know it, so no shape travels."""
        model, inner = self.recipe.model, self.recipe.inner
        rows, dim = inner.batch // inner.micro_batches, self.member.config.subspace_dim(model.width)
        stream = (rows, model.context, model.width if self.bases.opening else dim)
        # One id more than there are positions: the last stage finds its targets in the same frame.
        ids = Part("tokens", (rows, model.context + 1), TOKEN_TYPES[model.token_bytes])
        return (Part("activations", stream, self.wire), ids), (Part("gradients", stream, self.wire),)

    def forward(self, micro_batch: int, tokens: Tensor, z_in: Tensor | None = None) -> Tensor:
        """tokens (B, L + 1), z_in (B, L, K) but at the first stage -> z_out (B, L, K); at the last, the loss.

        The loss is this micro-batch's share of the batch's mean: scaled by 1/m.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        leaf = None
        if self.first:
            x = embed(self.params, inputs, self.dtype)  # (B, L, D)
        else:
            leaf = z_in.to(self.dtype).detach().requires_grad_()
            x = self.before.expand(leaf, inputs)  # (B, L, K) -> (B, L, D)
        x = run_layers(self._layer_params(micro_batch), self.layers, x, self.recipe.model, self.rope)
        if self.last:
            logits = head(self.params, x, self.recipe.model)  # (B, L, V)
            out = token_losses(logits, targets) / self.recipe.inner.micro_batches
        else:
            out = self.after.compress(x, inputs)  # (B, L, D) -> (B, L, K)
        self.held[micro_batch] = (leaf, out)
        return out.detach() if self.last else out.detach().to(self.wire)

    def _layer_params(self, micro_batch: int) -> Mapping[str, Tensor | Postponed]:
        if not self.splits:
            return self.params
        debt = self.debts[micro_batch] = Debt()
        return {
            name: Postponed(p, debt) if name.startswith("layers.") and p.dim() == 2 else p
            for name, p in self.params.items()
        }

    def backward(self, micro_batch: int, grad: Tensor | None = None) -> Tensor | None:
        """grad of z_out (B, L, K), none at the last stage -> grad of z_in (B, L, K), none at the first."""
        back = self._backward_input(micro_batch, grad)
        self._backward_weight(micro_batch)
        return back

    def backward_input(self, micro_batch: int, grad: Tensor | None = None) -> Tensor | None:
        """The part of `backward` that the stage before waits for."""
        return self._backward_input(micro_batch, grad)

    def backward_weight(self, micro_batch: int) -> None:
        """The rest of it, in the order of the micro-batches."""
        self._backward_weight(micro_batch)

    def _backward_input(self, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        leaf, out = self.held.pop(micro_batch)
        out.backward(None if grad is None else grad.to(out.dtype))
        return None if leaf is None else leaf.grad.to(self.wire)

    def _backward_weight(self, micro_batch: int) -> None:
        if self.splits:
            self.debts.pop(micro_batch).settle()

    @property
    def num_in_flight(self) -> int:
        """Micro-batches of which it keeps activations."""
        return max(len(self.held), len(self.debts))

    def begin_step(self) -> None:
        self.held.clear()
        self.debts.clear()
        self.opt.zero_grad()

    def squared_norm(self) -> float:
        """Of this stage's gradients: its share of the replica's."""
        return self.opt.squared_norm().item()

    @torch.no_grad()
    def step(self, squared_norm: float) -> None:
        """One InnerOpt update, clipped by this norm: the whole replica's, or the stage's own."""
        self.opt.step(torch.tensor([squared_norm], dtype=self.wide, device=self.device))
        self._project_weights()

    @torch.no_grad()
    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        for name, param in self.params.items():
            param.copy_(anchor[name])
        if self.table is not None and self.recipe.subspace.adaptation:
            self.table.copy_(anchor[EMBEDDING])  # eqs. 3-4: T_perp follows the table all replicas agreed on
        self._project_weights()

    def _project_weights(self) -> None:
        """Table 5b: W_p1 and W_p2 return to S."""
        weights = {name: p.detach() for name, p in self.params.items()}
        for name, weight in projected(self.recipe, self.member, self.bases, weights).items():
            weights[name].copy_(weight)
