"""InnerOpt of eq. 1: AdamW with warm-up, cosine and clipping, for one replica or a stack of them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.config import InnerConfig
from isthmus.model.adam import FusedAdamW


def learning_rate(step: int, config: InnerConfig, total_steps: int) -> float:
    """Linear warm-up from `warmup_start`, then cosine down to `final_lr`, as shares of the peak."""
    if step < config.warmup_steps:
        share = config.warmup_start + (1 - config.warmup_start) * step / config.warmup_steps
    else:
        length = max(1, (config.schedule_steps or total_steps) - config.warmup_steps)
        progress = min(1.0, (step - config.warmup_steps) / length)
        share = config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


def squared_norms(grads: Mapping[str, Tensor], stacked: bool) -> Tensor:
    """(R, T): the squared norm of each of the T gradients of each replica."""
    first = 1 if stacked else 0
    norms = [torch.linalg.vector_norm(g, dim=tuple(range(first, g.dim()))) for g in grads.values()]
    return torch.stack(norms, dim=-1).square().reshape(-1, len(norms))


def clip_scales(
    squares: Tensor, limit: float, groups: Tensor | None, squared_norm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What gradients with these squared norms (R, T) are multiplied by to keep a norm of `limit`, (R, T), and
    each replica's norm (R,) before it.

    groups (R, T) numbers the stage of each of the T tensors where every stage clips on its own; None: one
    norm over the whole replica. squared_norm (R,) is given where these gradients are one stage's only: the
    sum over all of its replica's. Nothing here waits for the device.
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
    """Scale each replica's gradients down to a norm of `limit`; returns the norms (R,) before it."""
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
    """AdamW on named tensors; its moments outlive the rounds and are never averaged (METHOD 1.1).

    `modified` names the d-sided matrices that take the row-constant second moment of Table 5d, with a mask
    (R,) of the replicas that do. `copies` are bf16 leaves that stand for some of the weights in the forward
    and take their gradients; they are for stacks on a GPU (see `adam`), and are kept equal to the weights.
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
    ) -> None:
        self.params, self.config, self.total_steps = dict(params), config, total_steps
        self.stacked, self.groups, self.modified = stacked, groups, dict(modified or {})
        self.step_count = 0  # updates taken: what the moments have seen
        self.missed = 0  # inner steps of the run that this replica was away for
        plain = [p for name, p in self.params.items() if name not in self.modified]
        self.adamw = torch.optim.AdamW(
            plain,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Both moments exist from the start, so that a checkpoint before the first step has the same shape
        # as any other.
        self.first = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.copies = dict(copies or {})
        quick = stacked and not self.modified and FusedAdamW.fits(self.params)
        self.fused = FusedAdamW(self.params, self.first, self.second, self.copies) if quick else None
        if self.copies and not quick:
            raise ValueError("copies of weights are for stacks on a GPU that take plain AdamW")
        self._bind()

    def _bind(self) -> None:
        """Let torch's optimiser work on our moments."""
        for name, p in self.params.items():
            if name not in self.modified:
                step = torch.tensor(float(self.step_count), dtype=torch.float32, device=p.device)
                self.adamw.state[p] = {
                    "step": step,
                    "exp_avg": self.first[name],
                    "exp_avg_sq": self.second[name],
                }

    def lr(self) -> float:
        """The learning rate of the step to come."""
        return learning_rate(self.step_count + self.missed, self.config, self.total_steps)

    def follow(self, inner_step: int) -> None:
        """The step to come is this one of the run: a replica that was away takes the run's learning rate,
        while its moments count only what they have seen."""
        self.missed = inner_step - self.step_count

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """(R,) of the gradients in `.grad`: what a stage adds to the squared norm of its replica."""
        return squared_norms(self._grads(), self.stacked).sum(1)

    def _grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.params.items()}

    def step(self, squared_norm: Tensor | None = None) -> Tensor:
        """One update from the gradients in `.grad`; returns each replica's gradient norm.

        A stage hands in the squared norm (1,) of its whole replica, to be clipped by that.
        """
        self.advance()
        return self.update(squared_norm)

    def advance(self) -> None:
        """Count the step to come and set its learning rate: all of a step that is the host's."""
        lr = self.lr()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.step_count += 1
        if self.fused:
            self.fused.prepare(lr, self.config, self.step_count)

    @torch.no_grad()
    def update(self, squared_norm: Tensor | None = None) -> Tensor:
        """The rest of the step: all of it that is the device's."""
        limit = self.config.clip or math.inf
        if self.fused:
            scales, norms = clip_scales(self.fused.squares(), limit, self.groups, squared_norm)
            self.fused.step(scales, self.config)
            return norms
        norms = clip_(self._grads(), limit, self.groups, self.stacked, squared_norm)
        self.adamw.step()
        lr = self.adamw.param_groups[0]["lr"]
        for name, mask in self.modified.items():
            self._modified_step(name, mask, lr)
        return norms

    def _modified_step(self, name: str, mask: Tensor, lr: float) -> None:
        """AdamW whose second moment is one number per input feature where mask is set (Table 5d)."""
        p, c = self.params[name], self.config
        square = p.grad.square()  # (R, D, in): constant over the d outputs keeps m / sqrt(v) in Col(U)
        shared = square.mean(-2, keepdim=True).expand_as(square)
        square = torch.where(mask.view(-1, 1, 1) if self.stacked else mask.view(1, 1), shared, square)
        first, second = self.first[name], self.second[name]
        first.lerp_(p.grad, 1 - c.beta1)
        second.mul_(c.beta2).add_(square, alpha=1 - c.beta2)
        p.mul_(1 - lr * c.weight_decay)
        unbiased = (second / (1 - c.beta2**self.step_count)).sqrt_().add_(c.eps)
        p.addcdiv_(first, unbiased, value=-lr / (1 - c.beta1**self.step_count))

    def zero_grad(self) -> None:
        for p in (*self.params.values(), *self.copies.values()):
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, as named tensors."""
        named = {f"first/{name}": t for name, t in self.first.items()}
        return named | {f"second/{name}": t for name, t in self.second.items()}

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        for name in self.params:
            self.first[name].copy_(state[f"first/{name}"])
            self.second[name].copy_(state[f"second/{name}"])
        self.step_count = step_count
        self._bind()

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """After weights were set from outside."""
        for name, copy in self.copies.items():
            copy.copy_(self.params[name])
