"""InnerOpt of eq. 1: AdamW, or Muon for the layers' matrices, with warm-up, cosine and clipping, for one
replica or a stack of them."""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from isthmus.config import InnerConfig
from isthmus.layout.learning_rate import learning_rate
from isthmus.model import muon
from isthmus.model.adam import FusedAdamW


def squared_norms(grads: Mapping[str, Tensor], stacked: bool) -> Tensor:
    """Return (R, T): the squared norm of each of the T gradients of each replica."""
    first = 1 if stacked else 0
    norms = [torch.linalg.vector_norm(g, dim=tuple(range(first, g.dim()))) for g in grads.values()]
    return torch.stack(norms, dim=-1).square().reshape(-1, len(norms))


def clip_scales(
    squares: Tensor, limit: float, groups: Tensor | None, squared_norm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return factors (R, T) that clip gradients with these squared norms (R, T) to a norm of `limit`, and
    each replica's norm (R,) before clipping.

    groups (R, T) numbers each tensor's stage if every stage clips separately; None: one norm over the whole
    replica. A stage passes the squared norm (R,) of its whole replica. Nothing here waits for the device.
    """
    if squared_norm is not None:
        totals = squared_norm.view(-1, 1).expand_as(squares)
    else:
        squared_norm = squares.sum(1)
        if groups is None:
            totals = squared_norm[:, None].expand_as(squares)
        else:
            totals = torch.zeros_like(squares).scatter_add_(1, groups, squares).gather(1, groups)
    return (limit / (totals.sqrt() + 1e-6)).clamp(max=1.0), squared_norm.sqrt()


def clip_(
    grads: Mapping[str, Tensor],
    limit: float,
    groups: Tensor | None,
    stacked: bool,
    squared_norm: Tensor | None = None,
) -> Tensor:
    """Scale each replica's gradients down to a norm of `limit`; return the norms (R,) before clipping."""
    if squared_norm is None:
        squares = squared_norms(grads, stacked)  # (R, T)
    else:
        squares = squared_norm.new_zeros(len(squared_norm), len(grads))
    scale, norms = clip_scales(squares, limit, groups, squared_norm)
    if scale.device.type != "cpu" or bool((scale < 1).any()):
        for g, factor in zip(grads.values(), scale.unbind(1), strict=True):
            g.mul_(factor.view(-1, *[1] * (g.dim() - 1)) if stacked else factor.view(()))
    return norms


class InnerOpt:
    """AdamW on named tensors. Its moments persist across rounds (docs/method.md, The inner optimiser). Muon
    has one moment per matrix.

    `modified` names the d-sided matrices with the row-constant second moment of Table 5d, each with a mask
    (R,) of the replicas that use it. `copies` are bf16 leaves that the forward reads instead of some weights.
    They are for a GPU (see `adam`) and stay equal to the weights. With `split`, `params` are rows of weights
    that several processes hold.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        config: InnerConfig,
        total_steps: int,
        *,
        stacked: bool = False,
        groups: Tensor | None = None,
        modified: Mapping[str, Tensor] | None = None,
        copies: Mapping[str, Tensor] | None = None,
        split: muon.SplitMatrices | None = None,
    ) -> None:
        self.params, self.config, self.total_steps = dict(params), config, total_steps
        self.stacked, self.groups, self.modified = stacked, groups, dict(modified or {})
        self.step_count = 0  # updates that the moments have seen
        # Both moments exist from the start, so a checkpoint before the first step has the usual shape.
        self.first = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.muon = muon.chosen(self.params, stacked) if config.optimizer == "muon" else []
        with_second = [name for name in self.params if name not in set(self.muon)]
        self.second = {name: torch.zeros_like(self.params[name]) for name in with_second}
        self.copies, self.split = dict(copies or {}), split if config.optimizer == "muon" else None
        quick = not self.modified and not self.split and FusedAdamW.fits(self.params)
        rows = len(next(iter(self.params.values()))) if stacked else 1
        self.fused = FusedAdamW(self.params, self.first, self.second, self.copies, rows) if quick else None
        if self.copies and not quick:
            raise ValueError("copies of weights are for a GPU, and for plain AdamW")
        self.lr = config.lr  # of the next update
        self._count_steps()

    def _count_steps(self) -> None:
        """Set torch's counts of updates, one per tensor, on its device."""
        self.steps = {
            name: torch.tensor(float(self.step_count), dtype=torch.float32, device=p.device)
            for name, p in self.params.items()
            if name in self.second and name not in self.modified and not self.fused
        }

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """Return (R,) of the gradients in `.grad`: a stage's part of its replica's squared norm."""
        if self.fused:
            return self.fused.squares().sum(1)
        return squared_norms(self._grads(), self.stacked).sum(1)

    def _grads(self) -> dict[str, Tensor]:
        return {name: _grad(p) for name, p in self.params.items()}

    def step(self, squared_norm: Tensor | None = None, inner_step: int | None = None) -> Tensor:
        """Update once from the gradients in `.grad`; return each replica's gradient norm."""
        self.advance(inner_step)
        return self.update(squared_norm)

    def advance(self, inner_step: int | None = None) -> None:
        """Do the host's part of an update: count it and set its learning rate.

        A replica that was away passes the run's inner step. It uses that step's learning rate, while its
        moments count only the updates that they have seen.
        """
        step = self.step_count if inner_step is None else inner_step
        self.lr = learning_rate(step, self.config, self.total_steps)
        self.step_count += 1
        if self.fused:
            self.fused.prepare(self.lr, self.config, self.step_count)

    @torch.no_grad()
    def update(self, squared_norm: Tensor | None = None, undecayed: Collection[str] = ()) -> Tensor:
        """Do the device's part: clip, then step. A stage clips by the squared norm (1,) of its replica. The
        caller decays the weights in `undecayed`."""
        c, limit = self.config, self.config.clip or math.inf
        if self.fused:
            known = squared_norm is not None
            squares = squared_norm.new_zeros(1, len(self.params)) if known else self.fused.squares()
            scales, norms = clip_scales(squares, limit, self.groups, squared_norm)
            self.fused.step(scales, c, undecayed)
            self.fused.muon_step(self.muon, scales, c)
            return norms
        grads = self._grads()
        norms = clip_(grads, limit, self.groups, self.stacked, squared_norm)
        self._plain_step(c.weight_decay, [name for name in self.steps if name not in undecayed])
        self._plain_step(0.0, [name for name in self.steps if name in undecayed])
        matrices = {name: self.params[name] for name in self.muon}
        muon.muon_step(matrices, grads, self.first, self.lr, c.weight_decay, self.split)
        for name, mask in self.modified.items():
            self._modified_step(name, mask, self.lr)
        return norms

    def _plain_step(self, weight_decay: float, names: Collection[str]) -> None:
        """Update these weights by torch's AdamW, without its optimiser class, which imports torch's compiler:
        that would delay the start of every process by seconds."""
        if not names:
            return
        c = self.config
        adamw(
            [self.params[name] for name in names],
            [_grad(self.params[name]) for name in names],
            [self.first[name] for name in names],
            [self.second[name] for name in names],
            [],
            [self.steps[name] for name in names],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=self.lr,
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.eps,
            weight_decay=weight_decay,
        )

    @property
    def current_lr(self) -> float | Tensor:
        """The prepared update's learning rate: on the device if a recorded step rereads it."""
        return self.fused.now[0] if self.fused else self.lr

    def _modified_step(self, name: str, mask: Tensor, lr: float) -> None:
        """Update by AdamW with one second moment per input feature if mask is set (Table 5d)."""
        p, c = self.params[name], self.config
        grad = _grad(p)
        square = grad.square()  # (R, D, in): constant over the d outputs keeps m / sqrt(v) in Col(U)
        shared = square.mean(-2, keepdim=True).expand_as(square)
        square = torch.where(mask.view(-1, 1, 1) if self.stacked else mask.view(1, 1), shared, square)
        first, second = self.first[name], self.second[name]
        first.lerp_(grad, 1 - c.beta1)
        second.mul_(c.beta2).add_(square, alpha=1 - c.beta2)
        p.mul_(1 - lr * c.weight_decay)
        unbiased = (second / (1 - c.beta2**self.step_count)).sqrt_().add_(c.eps)
        p.addcdiv_(first, unbiased, value=-lr / (1 - c.beta1**self.step_count))

    def zero_grad(self) -> None:
        for p in (*self.params.values(), *self.copies.values()):
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return all that a resumed run needs, as named tensors."""
        named = {f"first/{name}": t for name, t in self.first.items()}
        return named | {f"second/{name}": t for name, t in self.second.items()}

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        for kind, moments in (("first", self.first), ("second", self.second)):
            for name, moment in moments.items():
                moment.copy_(state[f"{kind}/{name}"])
        self.step_count = step_count
        self._count_steps()

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Call this after setting the weights from outside."""
        for name, copy in self.copies.items():
            copy.copy_(self.params[name])


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None, "an update needs a gradient for every weight"
    return param.grad
