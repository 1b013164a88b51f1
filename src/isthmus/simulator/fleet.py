"""M replicas on one device, stacked or in turns."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.data.ahead import ReadAhead
from isthmus.data.corpus import Corpus
from isthmus.data.tokens import Batches
from isthmus.errors import RunError
from isthmus.layout.learning_rate import learning_rate
from isthmus.layout.stages import EMBEDDING
from isthmus.layout.traffic import shards
from isthmus.model.llama import forward, init_params, token_losses
from isthmus.outer import outer_method
from isthmus.outer.clip import EARLIER, history_clips, history_factor, update_norm
from isthmus.outer.exchange import Contribution
from isthmus.outer.sparseloco import SparseLoCo
from isthmus.outer.weights import round_weights
from isthmus.planner.memory import SimulatorPlan, parts_of, stacked_members
from isthmus.replica.base import precision_dtypes
from isthmus.replica.evaluate import Scorer
from isthmus.replica.stack import Stack
from isthmus.runlog.row import Scores
from isthmus.sparse import Bundle
from isthmus.subspace import grassmann_step
from isthmus.subspace.boundaries import BasisSet, boundary_functions

Progress = Callable[[int], None]  # called with the inner steps done in this round


class SimulatedFleet:
    """Every replica of a recipe in this process: a Fleet for the outer-round loop."""

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        device: torch.device,
        precision: str,
        plan: SimulatorPlan,
        compiled: bool,
        first: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`first` is theta^(0); without it, the recipe's seed draws one."""
        self.recipe, self.device, self.plan = recipe, device, plan
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels, graphs and events use the current device
        self.members = recipe.fleet()
        master_dtype, self.dtype = precision_dtypes(precision)
        self.batches = Batches.of(recipe, corpus.train)
        self.bases = BasisSet(recipe, device, master_dtype)
        # Recorded work keeps its memory: record only a single stack, and only in half of the free memory.
        self.recorded = (
            compiled
            and gpu.usable(device)
            and plan.group == len(self.members)
            and 2 * plan.predicted_bytes < torch.cuda.mem_get_info(device)[0]
        )
        self.scorer = Scorer(recipe, corpus, self.bases, device, self.dtype, self.recorded)
        self.anchor = {
            name: tensor.to(device, master_dtype)
            for name, tensor in (first or init_params(recipe.model, recipe.seed)).items()
        }
        # Without adaptation (Table 5a) T_perp stays at its first value, whatever the embedding does.
        table = self.anchor[EMBEDDING] if recipe.subspace.adaptation else self.anchor[EMBEDDING].clone()
        self.table = table
        self.shared = recipe.outer.method == "adamw"
        self.outer = None if self.shared else outer_method(recipe.outer, self.anchor)
        self.stacks = [
            Stack(
                recipe,
                members,
                self.anchor,
                table,
                self.bases,
                dtype=self.dtype,
                grad_accum_steps=parts_of(recipe, members[0].config, plan.grad_accum_steps),
                shared=self.shared,
                compiled=compiled,
                recorded=self.recorded,
            )
            for members in stacked_members(recipe, plan.group)
        ]
        if self.shared:
            self.anchor = {name: p.detach() for name, p in self.stacks[0].params.items()}
            self.table = self.stacks[0].table
        if plan.parked:
            for stack in self.stacks:
                stack.move("cpu")
        self.shards = shards(recipe)
        # The norms of each replica's last updates, for rounds without a median.
        self.sent_norms = {member.name: deque[float](maxlen=EARLIER) for member in self.members}
        self.tokens = [ReadAhead(partial(self._read, stack), device) for stack in self.stacks]
        self.losses = self.norms = torch.zeros(0)  # the last round's (H, M); its last inner step's (M,)
        self.outside: dict[str, int | None] = {}  # of the last round, see Stack.pop_outside

    def train_round(self, round_index: int, progress: Progress) -> list[Contribution]:
        """H inner steps of every replica, then their contributions."""
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        contributions: list[Contribution] = []
        self.bases.begin_round(round_index + 1)
        steps = self.recipe.outer.inner_steps
        for turn, stack in enumerate(self.stacks):
            if self.plan.parked:
                stack.move(self.device)
            stack.begin_round(self.anchor)
            taken, step_norms, pace = [], torch.zeros(1), gpu.Pace(self.device)
            for h in range(steps):
                step_losses, step_norms = stack.inner_step(self.tokens[turn].at(round_index * steps + h))
                taken.append(step_losses)
                if self.device.type == "cpu":  # on a GPU this check would make the host wait
                    self._check_finite(step_losses[None], stack.members, round_index, h)
                pace.launched()
                progress((turn * steps + h + 1) // len(self.stacks))
            stack.zero_grad()  # frees memory for the end of the round and for the other stacks
            try:
                contributions += self._contribute(stack, self.outer) if self.outer else []
            finally:  # check a GPU's losses even after a failure, which a loss that is not finite may explain
                losses.append(torch.stack(taken).cpu())  # (H, R)
                self._check_finite(losses[-1], stack.members, round_index, 0)
            norms.append(step_norms.detach().cpu().double().expand(len(stack.members)))
            if self.plan.parked:
                stack.move("cpu")
        self.losses, self.norms = torch.cat(losses, dim=1), torch.cat(norms)
        counts = [count for stack in self.stacks for count in stack.pop_outside()]
        self.outside = {member.name: count for member, count in zip(self.members, counts, strict=True)}
        return contributions

    def _read(self, stack: Stack, inner_step: int) -> Tensor:
        """The tokens of a stack: (R, B, L + 1)."""
        first = stack.members[0].index
        return self.batches.stacked(inner_step, range(first, first + len(stack.members)))

    def _contribute(self, stack: Stack, outer: SparseLoCo) -> list[Contribution]:
        """Every replica's payload, packed shard by shard, as it would leave its machines."""
        # A GPU encodes the stack at once. A CPU encodes one replica after the other, to keep memory low.
        at_once = self.device.type == "cuda" and outer.codec.keep < outer.codec.side**2
        rows = range(len(stack.members))
        contributions: list[Contribution] = []
        for some in [rows] if at_once else [[i] for i in rows]:
            members = [stack.members[i] for i in some]
            try:
                sent = outer.contribute_all(
                    [stack.sent_from(i, self.anchor) for i in some],
                    [stack.row(stack.feedback, i) for i in some],
                )
            except ValueError as error:
                raise RunError(f"replica {', '.join(m.name for m in members)}: {error}") from error
            # [shard][replica]
            packed = [outer.codec.pack_all([bundle.part(shard) for bundle in sent]) for shard in self.shards]
            contributions += [
                Contribution(member.name, {s: shard[r] for s, shard in enumerate(packed)})
                for r, member in enumerate(members)
            ]
        return contributions

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> None:
        """Decode what the exchange returned and take the anchor to theta^(t)."""
        if self.outer:
            weights = round_weights(self.recipe, [one.replica for one in contributions])
            # Shard by shard, as in a pipelined replica, where each machine sums its own.
            sent = (self._unpacked(contributions, i) for i in range(len(self.shards)))
            factors = None
            if history_clips(self.recipe.outer, len(contributions)):
                sent = list(sent)  # at most two updates
                factors = self._history_factors(contributions, sent)
            for shard in sent:
                self.outer.apply(shard, weights, factors)
        self._turn_basis(round_number * self.recipe.outer.inner_steps - 1)

    def _unpacked(self, contributions: Sequence[Contribution], shard: int) -> list[Bundle]:
        assert self.outer
        return self.outer.codec.unpack_all([one.shards[shard] for one in contributions])

    def _history_factors(
        self, contributions: Sequence[Contribution], sent: Sequence[Sequence[Bundle]]
    ) -> list[float]:
        """The factors that `clip_factors` computes in a real fleet from the norms in manifests."""
        factors = []
        for r, one in enumerate(contributions):
            norm, earlier = update_norm([shard[r] for shard in sent]), self.sent_norms[one.replica]
            factors.append(history_factor(norm, earlier))
            if factors[-1] == 1.0:  # a replica that stays too large must not become its own measure
                earlier.append(norm)
        return factors

    def _turn_basis(self, inner_step: int) -> None:
        """Table 5c: every `grassmann_every` inner steps, turn each U toward the activation gradients."""
        every = self.recipe.subspace.grassmann_every
        if not every or (inner_step + 1) % every or self.bases.opening:  # a boundary that opens keeps its U
            return
        covariances: dict[str, Tensor] = {}
        for member in self.members:
            if member.config.compressed:
                key = self.bases.key(member, 0)
                tokens = self.batches.at(member.index, inner_step).to(self.device).long()
                covariance = self._gradient_covariance(member, tokens)
                covariances[key] = covariances[key] + covariance if key in covariances else covariance
        for key, covariance in covariances.items():
            basis = self.bases.bases[key]
            basis.copy_(grassmann_step(basis.double(), covariance, self.recipe.subspace.grassmann_lr))

    def _gradient_covariance(self, member: Member, tokens: Tensor) -> Tensor:
        """Sum of g^T g (D, D) over the last boundary of this replica, at the anchor."""
        boundary_fns = boundary_functions(
            self.recipe, [member], self.bases, self.table, len(tokens), params=self.anchor
        )
        last = max(boundary_fns)
        rows, inner = boundary_fns[last][0]
        caught: list[Tensor] = []

        def probe(x: Tensor, ids: Tensor) -> Tensor:
            caught.append(inner(x, ids).requires_grad_())
            return caught[-1]

        boundary_fns[last] = [(rows, probe)]
        params = {name: t.detach() for name, t in self.anchor.items()}
        with torch.enable_grad():
            logits = forward(
                params, tokens[:, :-1], self.recipe.model, self.scorer.rope, boundary_fns, self.dtype
            )
            (grad,) = torch.autograd.grad(token_losses(logits, tokens[:, 1:]), caught)
        flat = grad.flatten(0, -2).double()  # (B L, D)
        return flat.mT @ flat

    def evaluate(self) -> Scores:
        """The three held-out losses at the anchor."""
        return self.scorer.score(self.anchor, self.table)

    def _check_finite(self, losses: Tensor, members: Sequence[Member], round_index: int, first: int) -> None:
        bad = (~losses.isfinite()).nonzero()
        if len(bad) == 0:
            return
        h, row = bad[0].tolist()
        step = round_index * self.recipe.outer.inner_steps + first + h
        lr = learning_rate(step, self.recipe.inner, self.recipe.num_inner_steps)
        raise RunError(
            f"replica {members[row].name}: the loss is {losses[h, row].item()} at inner step {step + 1} "
            f"(round {round_index + 1}), learning rate {lr:.3g}; the last good round is on disk. Try a lower "
            "inner.lr, a longer inner.warmup_steps or a smaller inner.clip"
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All that a resumed run needs, by file: the anchor, the outer method, each stack."""
        extra = {f"basis/{key}": basis for key, basis in self.bases.bases.items()}
        extra |= self.outer.state() if self.outer else {}
        extra |= {
            f"norms/{name}": torch.tensor(norms, dtype=torch.float64)
            for name, norms in self.sent_norms.items()
            if norms
        }
        files = {"anchor": dict(self.anchor), "outer": extra}
        return files | {f"stack-{i}": stack.state() for i, stack in enumerate(self.stacks)}

    def restore(self, files: dict[str, dict[str, Tensor]], rounds: int) -> None:
        extra = files.get("outer", {})  # SparseLoCo without boundaries has no extra state
        with torch.no_grad():
            for name, tensor in self.anchor.items():
                tensor.copy_(files["anchor"][name])
            for key, basis in self.bases.bases.items():
                basis.copy_(extra[f"basis/{key}"])
            if self.outer:
                self.outer.restore(extra)
        for name, norms in self.sent_norms.items():
            norms.extend(extra[key].tolist() if (key := f"norms/{name}") in extra else ())
        for i, stack in enumerate(self.stacks):
            stack.restore(files[f"stack-{i}"], rounds * self.recipe.outer.inner_steps)
        self.bases.begin_round(rounds)
