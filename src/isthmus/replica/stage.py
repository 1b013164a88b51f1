"""One stage between its boundaries: a micro-batch forward, and its backward, whole or in two parts."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.errors import ConfigError, RunError
from isthmus.layout.stages import EMBEDDING, boundaries, stage_names, table_name
from isthmus.model.llama import Params, embed, head_weights, init_params, init_tensor, rope_table, run_layers
from isthmus.model.parts import parts
from isthmus.replica.base import precision_dtypes
from isthmus.replica.links import TOKEN_TYPES, Frame, TensorSpec
from isthmus.replica.split_backward import DeferredGradients, DeferredWeight
from isthmus.replica.trainable import Trainable
from isthmus.subspace import OpenBoundary, SubspaceBoundary, learned_part
from isthmus.subspace.boundaries import BasisSet
from isthmus.subspace.wire import Direction, wire_of


class Stage(Trainable):
    """A slice of layers with its own weights, InnerOpt and, when compressed, the anchor's embedding table.

    Tensors cross a boundary in the wire's format, both ways; inside the stage they have the stream's. Every
    micro-batch in flight keeps its activations until its backward, and its layers' products until the second
    part of a split backward. The head's weight gradient is never deferred: that would keep the logits'
    gradient in memory.
    """

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        index: int,
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        compiled: bool = False,
    ) -> None:
        """`compiled`: see `parts`; a split backward, which defers products, is not compiled."""
        model, num_stages = recipe.model, member.config.stages
        if recipe.subspace.grassmann_every and member.config.compressed:
            raise ConfigError(
                "subspace.grassmann_every is for the simulator only; real stages keep the U they drew; set 0"
            )
        master_dtype, self.dtype = precision_dtypes(precision)
        device = torch.device(device)

        drawn = init_params(model, recipe.seed, stage_names(model, num_stages)[index])
        params = {name: tensor.to(device, master_dtype) for name, tensor in drawn.items()}
        bases, half = BasisSet(recipe, device, master_dtype), self.dtype == torch.bfloat16
        super().__init__(recipe, [member], params, bases, bf16_copies=half)
        self.member, self.index = member, index
        self.wire = wire_of(member.config.wire, recipe.batch_of(member.config) * model.context, compiled)
        self.sound: dict[str, Tensor] = {}  # by side: whether a step's frames were sound, if known
        self.outside: Tensor | None = None  # tokens sent since `pop_outside` outside the wire's range
        self.first, self.last = index == 0, index == num_stages - 1
        edges = (0, *boundaries(model, num_stages), model.layers)
        self.layers = range(edges[index], edges[index + 1])
        # Every stage draws the table itself. Without adaptation (Table 5a) it keeps this first value.
        self.table = self._first_table() if member.config.compressed else None
        self.before, self.after = self._boundary(index - 1), self._boundary(index)
        self.rope = rope_table(model, model.context, master_dtype, device)
        # Each micro-batch in flight: its input (None at the first stage) and its output.
        self.activations: dict[int, tuple[Tensor | None, Tensor]] = {}
        self.split = recipe.inner.backward == "split"
        self.parts = parts(compiled and not self.split, recipe.inner.recompute)
        self.deferred: dict[int, DeferredGradients] = {}  # for micro-batches in flight, in a split backward

    def _first_table(self) -> Tensor:
        if self.first:
            return self.params[EMBEDDING].detach().clone()
        model = self.recipe.model
        drawn = init_tensor(EMBEDDING, model.shapes()[EMBEDDING], model, self.recipe.seed)
        return drawn.to(self.device, self.master_dtype)

    def _boundary(self, number: int) -> OpenBoundary | SubspaceBoundary:
        if self.table is None or not 0 <= number < self.member.config.stages - 1:
            return OpenBoundary()
        return self.bases.boundary(self.member, number, self.table)

    def open_boundaries(self, round_number: int) -> bool:
        """Set the boundaries of this outer round; True if they differ from the previous round's."""
        changed = self.bases.begin_round(round_number)
        if changed:
            self.before, self.after = self._boundary(self.index - 1), self._boundary(self.index)
        return changed

    def frames(self) -> tuple[Frame, Frame]:
        """A micro-batch's frames on a link, forward and back. Both sides know the shapes."""
        model, rows = self.recipe.model, self._stream_shape()[0]
        # One id more than there are positions: the last stage finds its targets in the same frame.
        ids = TensorSpec("tokens", (rows, model.context + 1), TOKEN_TYPES[model.token_bytes])
        stream = self.wire.spec(self._stream_shape())
        return (TensorSpec("activations", *stream), ids), (TensorSpec("gradients", *stream),)

    def _stream_shape(self) -> tuple[int, int, int]:
        """(B, L, K) of one micro-batch on a link."""
        recipe, config = self.recipe, self.member.config
        dim = recipe.model.width if self.bases.opening else config.subspace_dim(recipe.model.width)
        return recipe.batch_of(config) // recipe.micro_batches_of(config), recipe.model.context, dim

    def _received(self, side: str, data: Tensor, dtype: torch.dtype) -> Tensor:
        """A frame from the stage "before" or "after" as a stream (B, L, K)."""
        shape = self._stream_shape()
        if (tuple(data.shape), data.dtype) != self.wire.spec(shape):
            raise self.refusal(side, f"it has {data.nbytes:,} bytes and not those of this wire")
        z, sound = self.wire.decode(data, shape, dtype, "forward" if side == "before" else "back")
        if sound is not None:
            self.sound[side] = sound & self.sound.get(side, sound)
        return z

    def _sent(self, z: Tensor, direction: Direction) -> Tensor:
        """A stream (B, L, K) as a frame."""
        data, outside = self.wire.encode(z, direction)
        if outside is not None:
            self.outside = outside if self.outside is None else self.outside + outside
        return data

    def pop_outside(self) -> int | None:
        """Tokens sent since the last call that were outside the wire's range; None if the wire has none."""
        count, self.outside = self.outside, None
        return None if count is None else int(count)

    def refusal(self, side: str, why: str) -> RunError:
        """The error for a frame from the stage "before" or "after"."""
        neighbour = self.index - 1 if side == "before" else self.index + 1
        who = f"replica {self.member.name}: stage {neighbour} sent stage {self.index}"
        return RunError(f"{who} a frame that is none of this run: {why}")

    def forward(self, micro_batch: int, tokens: Tensor, z_in: Tensor | None = None) -> Tensor:
        """tokens (B, L + 1), z_in (B, L, K) except at the first stage -> z_out (B, L, K), both as on the
        wire; at the last stage the loss: this micro-batch's share of the batch's mean, scaled by 1/m."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        leaf = None
        weights, model = self.leaves, self.recipe.model
        if z_in is None:
            x = embed(weights, inputs, self.dtype)  # (B, L, D)
        else:
            leaf = self._received("before", z_in, self.dtype).detach().requires_grad_()
            x = self.before.expand(leaf, inputs)  # (B, L, K) -> (B, L, D)
            if self.recipe.model.boundary_tables:
                learned = weights[table_name(self.index - 1)]
                x = x + learned_part(self.before, learned, inputs, self.dtype)
        layer_params = self._layer_params(micro_batch, weights)
        x = run_layers(layer_params, self.layers, x, model, self.rope, self.parts.layer)
        if self.last:
            loss = self.parts.head_losses(head_weights(weights, model), x, targets, model)
            out = loss / self.recipe.micro_batches_of(self.member.config)
        else:
            out = self.after.compress(x, inputs)  # (B, L, D) -> (B, L, K)
        self.activations[micro_batch] = (leaf, out)
        return out.detach() if self.last else self._sent(out.detach(), "forward")

    def _layer_params(self, micro_batch: int, weights: Params) -> Params:
        if not self.split:
            return weights
        deferred = self.deferred[micro_batch] = DeferredGradients()
        products = {
            name: DeferredWeight(p, self.params[name], deferred)
            for name, p in weights.items()
            if name.startswith("layers.") and p.dim() == 2
        }
        # `linear`, the only reader of matrices, also accepts `DeferredWeight`.
        return cast(Params, {**weights, **products})

    def backward(self, micro_batch: int, grad: Tensor | None = None) -> Tensor | None:
        """Gradient of z_out (B, L, K), None at the last stage -> gradient of z_in (B, L, K), None at the
        first; both as on the wire."""
        back = self.backward_input(micro_batch, grad)
        self.backward_weight(micro_batch)
        return back

    def backward_input(self, micro_batch: int, grad: Tensor | None = None) -> Tensor | None:
        """The part of `backward` that the stage before waits for."""
        leaf, out = self.activations.pop(micro_batch)
        out.backward(None if grad is None else self._received("after", grad, out.dtype))
        self.collect_grads()
        return None if leaf is None or leaf.grad is None else self._sent(leaf.grad, "back")

    def backward_weight(self, micro_batch: int) -> None:
        """The rest of `backward`, in the order of the micro-batches."""
        if self.split:
            self.deferred.pop(micro_batch).accumulate()

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations it keeps."""
        return max(len(self.activations), len(self.deferred))

    def begin_step(self) -> None:
        self.activations.clear()
        self.deferred.clear()
        self.sound.clear()
        self.zero_grad()

    def squared_norm(self) -> Tensor:
        """The squared norm (1,) of this stage's gradients: its share of the replica's."""
        return self.opt.squared_norm()

    def step(self, squared_norm: float, inner_step: int) -> None:
        """One InnerOpt update, clipped by this norm: the whole replica's, or the stage's own."""
        self.advance(inner_step)
        self.update(torch.tensor([squared_norm], dtype=self.master_dtype, device=self.device))

    @torch.no_grad()
    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        self.set_weights(anchor)
        if self.table is not None and self.recipe.subspace.adaptation:
            self.table.copy_(anchor[EMBEDDING])  # eqs. 3-4: T_perp follows the table all replicas agreed on

    @torch.no_grad()
    def go_on(self, anchor: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        """Continue inside a round: T_perp is that of its start, but the weights have moved."""
        self.begin_round(anchor)
        for name, param in self.params.items():
            param.copy_(params[name])  # as saved: another projection could change a bit
        self.opt.refresh_copies()
