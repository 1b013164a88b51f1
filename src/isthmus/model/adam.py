"""InnerOpt's step on a GPU in three kernels, whatever the number of tensors and replicas."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import InnerConfig

BLOCK = 4096


class FusedAdamW:
    """Clipping and AdamW of stacked tensors (R, ...), of which some have a bf16 copy that takes the gradient.

    `copies` holds the bf16 leaves that the forward reads, by name; a weight without one takes its gradient.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
    ) -> None:
        self.names, self.copies = list(params), dict(copies)
        self.params, self.first, self.second = params, first, second
        tensors = list(params.values())
        self.device, self.rows = tensors[0].device, len(tensors[0])
        self.halves = [self._blocks(half) for half in (False, True)]
        self.pointers: Tensor | None = None
        self.told: list[int] = []

    @staticmethod
    def fits(params: Mapping[str, Tensor]) -> bool:
        return all(
            gpu.usable(p.device) and p.dtype == torch.float32 and p.is_contiguous() for p in params.values()
        )

    def _blocks(self, half: bool) -> tuple[Tensor, ...] | None:
        """Of the tensors with, or without, a copy: for each block its tensor, its start, the end of the
        replica's part there and that part's place in an (R, T) table; for each part its first block and its
        place."""
        tensor, first, size, place, begin, cells = [], [], [], [], [0], []
        for t, name in enumerate(self.names):
            if (name in self.copies) != half:
                continue
            each = self.params[name].numel() // self.rows
            count = -(-each // BLOCK)
            for row in range(self.rows):
                tensor.append(torch.full((count,), t, dtype=torch.int32))
                first.append(torch.arange(count) * BLOCK + row * each)
                size.append(torch.full((count,), (row + 1) * each))
                place.append(torch.full((count,), row * len(self.names) + t))
                begin.append(begin[-1] + count)
                cells.append(row * len(self.names) + t)
        if not tensor:
            return None
        parts = [*map(torch.cat, (tensor, first, size, place)), torch.tensor(begin), torch.tensor(cells)]
        return tuple(part.to(self.device) for part in parts)

    def _refresh(self) -> None:
        """Pointers of everything; gradients are new tensors at every step."""
        grads = {name: self.copies.get(name, p).grad for name, p in self.params.items()}
        addresses = [
            tensor.data_ptr()
            for name, p in self.params.items()
            for tensor in (p, self.first[name], self.second[name], grads[name], self.copies.get(name, p))
        ]
        if addresses != self.told:
            table = torch.tensor(addresses)
            table = table.pin_memory() if self.device.type == "cuda" else table
            self.pointers, self.told = table.to(self.device, non_blocking=True), addresses

    def squares(self) -> Tensor:
        """(R, T): the squared norm of every gradient of every replica."""
        from isthmus.model import adam_kernels

        self._refresh()
        grads = self.pointers.view(-1, 5)[:, 3].contiguous()
        table = torch.zeros(self.rows * len(self.names), device=self.device)
        for half, blocks in enumerate(self.halves):
            if blocks is None:
                continue
            tensor, first, size, _, begin, cells = blocks
            parts = torch.empty(len(tensor), device=self.device)
            adam_kernels.squares_kernel[(len(tensor),)](
                grads, tensor, first, size, parts, BLOCK=BLOCK, HALF=bool(half)
            )
            sums = torch.empty(len(cells), device=self.device)
            adam_kernels.gather_kernel[(len(cells),)](parts, begin, sums, WIDTH=1024)
            table[cells] = sums
        return table.view(self.rows, len(self.names))

    def step(self, scales: Tensor, lr: float, config: InnerConfig, count: int) -> None:
        """Update number `count` with the gradients times scales (R, T), at this learning rate."""
        from isthmus.model import adam_kernels

        beta1, beta2 = config.beta1, config.beta2
        scales = scales.contiguous()
        for half, blocks in enumerate(self.halves):
            if blocks is None:
                continue
            tensor, first, size, place, _, _ = blocks
            adam_kernels.adamw_kernel[(len(tensor),)](
                self.pointers, tensor, first, size, place, scales, lr, config.weight_decay,
                beta1, beta2, config.eps,
                1 / (1 - beta1**count), (1 - beta2**count) ** -0.5, BLOCK=BLOCK, HALF=bool(half),
            )  # fmt: skip
