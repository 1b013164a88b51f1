"""Matrix products whose weight gradient is computed later: the second half of a split backward."""

from typing import Any

import torch
from torch import Tensor


class Debt:
    """The weight gradients that one micro-batch still owes: for each product its weight, x and dL/dy."""

    def __init__(self) -> None:
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def settle(self) -> None:
        """Add them to `.grad`, with the arithmetic of autograd: in the stream's precision, summed in the
        weight's."""
        for weight, x, grad in self.products:
            own = (grad.flatten(0, -2).mT @ x.flatten(0, -2)).to(weight.dtype)  # (O, D)
            weight.grad = own if weight.grad is None else weight.grad.add_(own)
        self.products.clear()


class Postponed:
    """In a weight's place: multiplies by it, and notes in `debt` what its gradient needs."""

    def __init__(self, weight: Tensor, debt: Debt) -> None:
        self.weight, self.debt = weight, debt

    def __call__(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.debt)


class _Product(torch.autograd.Function):
    """x W^T; its backward stops at x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, debt: Debt) -> Tensor:
        read = weight.to(x.dtype)
        ctx.save_for_backward(x, read)
        ctx.weight, ctx.debt = weight, debt
        return x @ read.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, read = ctx.saved_tensors
        ctx.debt.products.append((ctx.weight, x, grad))
        return grad @ read, None, None
