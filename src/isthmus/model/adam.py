"""InnerOpt's step on a GPU: two kernels per tensor, for one replica or a stack of them."""

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import InnerConfig
from isthmus.model import muon

BLOCK = 2048


class FusedAdamW:
    """Clips and updates tensors of `rows` stacked replicas, (R, ...), or of one replica, by AdamW.

    `copies` holds bf16 leaves by name, which the forward reads instead of the weight. The gradient is theirs,
    or the weight's if it was accumulated over micro-batches in the weight's precision.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
        rows: int,
    ) -> None:
        self.params, self.first, self.second, self.copies, self.rows = params, first, second, copies, rows
        self.counts = [-(-(p.numel() // self.rows) // BLOCK) for p in params.values()]
        self.starts = [0, *accumulate(self.counts)]
        device = next(iter(params.values())).device
        self.table = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self.now = torch.zeros(3, device=device)  # learning rate, and the bias corrections of the moments

    @staticmethod
    def fits(params: Mapping[str, Tensor]) -> bool:
        return all(
            gpu.usable(p.device) and p.dtype == torch.float32 and p.is_contiguous() for p in params.values()
        )

    def grad(self, name: str) -> Tensor:
        grad = self.params[name].grad
        if grad is None:
            grad = self.copies[name].grad
        assert grad is not None, "an update needs a gradient for every weight"
        return grad.contiguous()

    def squares(self) -> Tensor:
        """Return (R, T): the squared norm of every gradient of every replica."""
        kernels = _kernels()
        num_blocks = self.starts[-1]
        parts = torch.empty(self.rows, num_blocks, device=self.table.device)
        for t, (name, p) in enumerate(self.params.items()):
            kernels.squares_kernel[(self.counts[t], self.rows)](
                self.grad(name), p.numel() // self.rows, parts[:, self.starts[t] :], num_blocks, BLOCK=BLOCK
            )
        sums = torch.empty(self.rows, len(self.counts), device=self.table.device)
        kernels.sums_kernel[(len(self.counts), self.rows)](
            parts, self.table, num_blocks, sums, len(self.counts), BLOCK=1024
        )
        return sums

    def prepare(self, lr: float, config: InnerConfig, count: int) -> None:
        """Set the number of the next update and its learning rate, on the device, where a recorded step
        rereads them."""
        now = [lr, 1 / (1 - config.beta1**count), (1 - config.beta2**count) ** -0.5]
        self.now.copy_(torch.tensor(now), non_blocking=True)

    def step(self, scales: Tensor, config: InnerConfig, undecayed: Collection[str] = ()) -> None:
        """Update everything with a second moment, with gradients multiplied by scales (R, T). Weights in
        `undecayed` do not decay."""
        kernels = _kernels()
        scales = scales.contiguous()
        for t, (name, p) in enumerate(self.params.items()):
            if name not in self.second:
                continue  # Muon's
            kernels.adamw_kernel[(self.counts[t], self.rows)](
                p, self.first[name], self.second[name], self.grad(name), self.copies.get(name, p),
                scales[:, t:], p.numel() // self.rows, scales.shape[1], self.now,
                0.0 if name in undecayed else config.weight_decay, config.beta1, config.beta2, config.eps,
                BLOCK=BLOCK, COPIED=name in self.copies,
            )  # fmt: skip

    def muon_step(self, names: Collection[str], scales: Tensor, config: InnerConfig) -> None:
        """Update these matrices like `muon.muon_step`, with gradients multiplied by scales (R, T). Before and
        after the products, each number is read and written once."""
        kernels = _kernels()
        scales = scales.contiguous()
        number = {name: t for t, name in enumerate(self.params)}
        for some in muon.batches({name: self.params[name].shape for name in names}):
            shape = self.params[some[0]].shape
            each, blocks = shape.numel() // self.rows, self.counts[number[some[0]]]
            updates = torch.empty(len(some), *shape, dtype=torch.bfloat16, device=scales.device)
            for name, update in zip(some, updates, strict=True):
                kernels.momentum_kernel[(blocks, self.rows)](
                    self.first[name], self.grad(name), update, scales[:, number[name] :], each,
                    scales.shape[1], muon.MOMENTUM, BLOCK=BLOCK,
                )  # fmt: skip
            steps = muon.orthogonalised(updates.view(-1, *shape[-2:])).contiguous().view(updates.shape)
            for name, step in zip(some, steps, strict=True):
                p = self.params[name]
                kernels.move_kernel[(blocks, self.rows)](
                    p, step, self.copies.get(name, p), each, self.now, config.weight_decay,
                    muon.rms_factor(*shape[-2:]), BLOCK=BLOCK, COPIED=name in self.copies,
                )  # fmt: skip


def _kernels() -> Any:
    """Import the kernels, on a GPU. The type is Any: pyright sees functions where Triton makes kernels."""
    from isthmus.model import adam_kernels

    return adam_kernels
