"""Muon, the InnerOpt for the layers' matrices: momentum with its singular values made equal.

Equals `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw" (arXiv 2502.16982), also for stacks of replicas
and for all matrices of a shape at once. A stage orthogonalises its own matrices, so links carry nothing more.
The processes of a sharded replica hold rows of every matrix, and exchange them (`replica.sharded`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

MOMENTUM = 0.95
STEPS = 5
# p(x) = a x + b x^3 + c x^5 moves every singular value in [0, 1] close to 1 in a few steps.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7
LARGEST_BATCH = 2**26  # most entries of matrices stacked for one product, which bounds its memory


def chosen(params: Mapping[str, Tensor], stacked: bool) -> list[str]:
    """Return the layers' matrices. Embedding, head and norms stay with AdamW."""
    return [name for name, p in params.items() if name.startswith("layers.") and p.dim() == 2 + stacked]


def in_work_precision(matrices: Tensor) -> Tensor:
    """Convert to bf16, whose error is harmless here. Float64 stays: such runs are compared digit by digit."""
    return matrices if matrices.dtype == torch.float64 else matrices.bfloat16()


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return approximately U V^T of each matrix U S V^T (N, m, n), by Newton-Schulz."""
    x = in_work_precision(matrices)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller product
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


def rms_factor(rows: int, cols: int) -> float:
    """Return the factor that gives an orthogonal matrix the RMS of AdamW's updates, to share its lr."""
    return 0.2 * math.sqrt(max(rows, cols))


class SplitMatrices(Protocol):
    """Matrices of which this process holds some rows, or none."""

    shapes: Mapping[str, torch.Size]  # of the whole matrices

    def orthogonalised(self, names: Sequence[str], updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's rows of what `orthogonalised` makes of these matrices, all of one shape."""
        ...


@torch.no_grad()
def muon_step(
    params: Mapping[str, Tensor],  # (..., m, n)
    grads: Mapping[str, Tensor],
    momenta: Mapping[str, Tensor],
    lr: float,
    weight_decay: float,
    split: SplitMatrices | None = None,
) -> None:
    """Update once with Nesterov momentum, in place."""
    shapes = split.shapes if split else {name: p.shape for name, p in params.items()}
    for names in batches(shapes):
        updates = {}
        for name in names:
            if name in params:
                grad, momentum = grads[name], momenta[name]
                momentum.lerp_(grad, 1 - MOMENTUM)
                updates[name] = in_work_precision(grad.lerp(momentum, MOMENTUM))
        rows, cols = shapes[names[0]][-2:]
        if split:
            steps = split.orthogonalised(names, updates)
        else:
            whole = orthogonalised(torch.cat([update.view(-1, rows, cols) for update in updates.values()]))
            parts = whole.split([update.numel() // (rows * cols) for update in updates.values()])
            steps = dict(zip(names, parts, strict=True))
        rate = lr * rms_factor(rows, cols)
        for name in updates:
            p = params[name]
            p.mul_(1 - lr * weight_decay).sub_(steps[name].view(p.shape).to(p.dtype) * rate)


def batches(shapes: Mapping[str, torch.Size]) -> list[list[str]]:
    """Group names of tensors of one shape, as many together as LARGEST_BATCH allows."""
    by_shape: dict[torch.Size, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    batches = []
    for shape, names in by_shape.items():
        most = max(1, LARGEST_BATCH // shape.numel())
        batches += [names[at : at + most] for at in range(0, len(names), most)]
    return batches
