"""Matrix products whose weight gradient is computed later: the second half of a split backward."""

from typing import Any

import torch
from torch import Tensor


class DeferredGradients:
    """The weight gradients that one micro-batch still owes: for each product its weight, x and dL/dy."""

    def __init__(self) -> None:
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add them to `.grad` as autograd does: computed in the stream's type, summed in the weight's."""
        for weight, x, grad in self.products:
            own = (grad.flatten(0, -2).mT @ x.flatten(0, -2)).to(weight.dtype)  # (O, D)
            weight.grad = own if weight.grad is None else weight.grad.add_(own)
        self.products.clear()


class DeferredWeight:
    """A stand-in for a weight: multiplies by it, and notes in `deferred` what its gradient needs."""

    def __init__(self, read: Tensor, weight: Tensor, deferred: DeferredGradients) -> None:
        """`read` is the weight, or a copy of it in the stream's type."""
        self.read, self.weight, self.deferred = read, weight, deferred

    def __call__(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.read.detach(), self.weight, self.deferred)


class _Product(torch.autograd.Function):
    """x W^T; its backward stops at x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Tensor, weight: Tensor, deferred: DeferredGradients) -> Tensor:
        read = read.to(x.dtype)
        ctx.save_for_backward(x, read)
        ctx.weight, ctx.deferred = weight, deferred
        return x @ read.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, read = ctx.saved_tensors
        ctx.deferred.products.append((ctx.weight, x, grad))
        return grad @ read, None, None, None
