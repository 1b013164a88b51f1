"""The whole model in one place: one process, or several on one machine that share every batch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.data.ahead import ReadAhead
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import init_params
from isthmus.replica.base import Wish, precision_dtypes
from isthmus.replica.clock import Clock
from isthmus.replica.process_groups import Store, lost_processes, make_group
from isthmus.replica.stack import Stack
from isthmus.subspace.boundaries import BasisSet

LOOPBACK = "127.0.0.1"
BUCKET_BYTES = 25 * 2**20  # of gradients per message


class FullReplica:
    """A Replica without stages: a stack of one.

    If several processes share it, each takes its rows of every batch and they average their gradients. All
    have the same weights, and only process 0 communicates with the outside.
    """

    round_trip_seconds, wish_delay = 0.0, 0

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        batches: Batches,
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        grad_accum_steps: int = 0,
        process_group: Any = None,
        compiled: bool = False,
    ) -> None:
        """`process_group` comes from `share_batches`; without it this process is the replica. Without
        `grad_accum_steps` a batch is split as the recipe says."""
        self.process_group: Any = process_group
        self.rank = process_group.rank() if process_group else 0
        self.num_processes = process_group.size() if process_group else 1
        grad_accum_steps = grad_accum_steps or recipe.micro_batches_of(member.config)
        if recipe.batch_of(member.config) % (grad_accum_steps * self.num_processes):
            raise ConfigError(
                f"inner.batch is {recipe.batch_of(member.config)}, which {self.num_processes} processes in "
                f"{grad_accum_steps} accumulation steps do not divide; change inner.batch or their number"
            )
        self.recipe, self.member = recipe, member
        self.device = torch.device(device)
        self.tokens = ReadAhead(
            lambda step: batches.at(member.index, step).chunk(self.num_processes)[self.rank], self.device
        )
        self.clock = Clock(self.device)
        master_dtype, dtype = precision_dtypes(precision)
        drawn = init_params(recipe.model, recipe.seed)
        first = {name: tensor.to(self.device, master_dtype) for name, tensor in drawn.items()}
        self.stack = Stack(
            recipe,
            [member],
            first,
            first[EMBEDDING],
            BasisSet(recipe, self.device, master_dtype),
            dtype=dtype,
            grad_accum_steps=grad_accum_steps,
            shared=True,  # so its weights have no leading axis, which would slow a CPU
            compiled=compiled,
            recorded=compiled and not process_group,
            reduce_grads=self._average if process_group else None,
        )
        self.norms: Tensor | None = None

    @property
    def grad_norm(self) -> float:
        return math.nan if self.norms is None else self.norms.item()

    def begin_round(self, anchor: Mapping[str, Tensor] | None) -> None:
        """Start from the anchor: process 0 has it, and the others receive it from there."""
        self._receive(self.named_parameters(), anchor)
        self.stack.opt.refresh_copies()

    def go_on(self, anchor: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        self.begin_round(params)

    def agree(self, wish: Wish) -> Wish:
        return wish

    @torch.no_grad()
    def _receive(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor] | None) -> None:
        for name, tensor in tensors.items():
            if values is not None:
                tensor.copy_(values[name])
            if self.process_group:
                with self._faults():
                    self.process_group.broadcast(tensor, 0).wait()

    def inner_step(self, inner_step: int) -> Tensor:
        with self.clock, self._faults():
            own = self.tokens.at(inner_step)  # (B, L + 1)
            losses, self.norms = self.stack.inner_step(own[None], inner_step)
            if self.process_group:
                self._average([losses])
        return losses[0]

    @torch.no_grad()
    def _average(self, tensors: Sequence[Tensor]) -> None:
        """Average over the processes in place; all get the same bits."""
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            self.process_group.allreduce([flat]).wait()
            flat /= self.num_processes
            for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def _faults(self) -> AbstractContextManager[None]:
        return lost_processes(self.member.name, self.rank) if self.process_group else nullcontext()

    def named_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.stack.params.items()}

    def state(self) -> dict[str, Tensor]:
        return self.stack.opt.state()

    def restore(self, state: Mapping[str, Tensor] | None, step_count: int) -> None:
        """Restore the moments: process 0 has them, and the others receive them; all know the count."""
        self._receive(self.state(), state)
        self.stack.opt.restore(self.state(), step_count)

    def pop_counts(self) -> dict[str, int]:
        return {}  # no stages

    def pop_outside(self) -> None:
        return None

    def close(self) -> None:
        self.process_group = None


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group the tensors in order, up to BUCKET_BYTES each."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    yield bucket


def share_batches(
    store: Store, rank: int, num_processes: int, device: torch.device | str, timeout_seconds: float = 600.0
) -> Any:
    """The process group of a full replica: NCCL between GPUs, else gloo on loopback."""
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    return make_group("nccl" if cuda else "gloo", store, rank, num_processes, LOOPBACK, timeout)
