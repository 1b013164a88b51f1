"""The whole model in one place: one process, or several on one machine that share every batch."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.config import Member, Recipe
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError, RunError
from isthmus.model.inner import InnerOpt
from isthmus.model.llama import forward, init_params, rope_table, token_losses
from isthmus.replica.base import types_of
from isthmus.replica.process_groups import group

LOOPBACK = "127.0.0.1"


class _Loss(nn.Module):
    """tokens (B, L + 1) -> their mean loss: what torch's data parallelism wraps."""

    def __init__(self, params: Mapping[str, Tensor], recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__()
        self.names, self.config, self.dtype = tuple(params), recipe.model, dtype
        self.weights = nn.ParameterList(params.values())
        first = next(iter(params.values()))
        rope = rope_table(self.config, self.config.context, first.dtype)
        self.rope = tuple(t.to(first.device) for t in rope)

    def forward(self, tokens: Tensor) -> Tensor:
        params = dict(zip(self.names, self.weights, strict=True))
        logits = forward(params, tokens[:, :-1], self.config, self.rope, None, self.dtype)
        return token_losses(logits, tokens[:, 1:])


class FullReplica:
    """A Replica without stages. Where several processes share it, each takes its rows of every batch and DDP
    averages their gradients; all hold the same weights, and only number 0 talks to the outside."""

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        batches: Batches,
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        grad_accum_steps: int = 1,
        rank: int = 0,
        num_processes: int = 1,
        compiled: bool = False,
    ) -> None:
        """pieces: parts of a batch that run one after another, for memory. With num_processes above 1,
        `share_batches` comes first."""
        if recipe.inner.batch % (grad_accum_steps * num_processes):
            raise ConfigError(
                f"inner.batch is {recipe.inner.batch}, which {num_processes} processes in {grad_accum_steps} "
                "accumulation steps do not divide; change inner.batch or their number"
            )
        self.recipe, self.member, self.batches, self.grad_accum_steps = (
            recipe,
            member,
            batches,
            grad_accum_steps,
        )
        self.device, self.rank, self.num_processes = torch.device(device), rank, num_processes
        wide, dtype = types_of(precision)
        drawn = init_params(recipe.model, recipe.seed)
        self.params = {name: nn.Parameter(t.to(self.device, wide)) for name, t in drawn.items()}
        self.loss: Any = _Loss(self.params, recipe, dtype)
        if num_processes > 1:
            on_cuda = [self.device] if self.device.type == "cuda" else None
            with self._faults():
                self.loss = DistributedDataParallel(self.loss, device_ids=on_cuda)
        if compiled:
            self.loss = torch.compile(self.loss, dynamic=False)
        self.opt = InnerOpt(self.params, recipe.inner, recipe.num_inner_steps)
        self.norm: Tensor | None = None

    @property
    def grad_norm(self) -> float:
        return math.nan if self.norm is None else self.norm.item()

    def begin_round(self, anchor: Mapping[str, Tensor] | None) -> None:
        """Number 0 is given the anchor; the others have it from there."""
        self._take(self.params, anchor)

    @torch.no_grad()
    def _take(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor] | None) -> None:
        for name, tensor in tensors.items():
            if self.rank == 0:
                tensor.copy_(values[name])
            if self.num_processes > 1:
                with self._faults():
                    dist.broadcast(tensor.detach(), src=0)

    def inner_step(self, inner_step: int) -> Tensor:
        self.opt.zero_grad()
        self.opt.follow(inner_step)
        tokens = self.batches.at(self.member.index, inner_step)
        own = tokens.chunk(self.num_processes)[self.rank].to(self.device).long()  # (B, L + 1)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._faults():
            for i, piece in enumerate(own.chunk(self.grad_accum_steps)):
                # The processes' gradients meet once, in the last piece.
                wait = self.num_processes > 1 and i + 1 < self.grad_accum_steps
                with self.loss.no_sync() if wait else nullcontext():
                    loss = self.loss(piece) / self.grad_accum_steps
                    loss.backward()
                total += loss.detach()
            if self.num_processes > 1:
                dist.all_reduce(total)
                total /= self.num_processes
        self.norm = self.opt.step()[0]
        return total

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            lost = any(word in str(error) for word in ("by peer", "imed out", "pair closure"))
            if self.num_processes > 1 and lost:
                raise RunError(
                    f"replica {self.member.name}: process {self.rank} lost the other processes of the replica"
                ) from None
            raise

    def named_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.params.items()}

    def state(self) -> dict[str, Tensor]:
        return self.opt.state()

    def restore(self, state: Mapping[str, Tensor] | None, step_count: int) -> None:
        """Number 0 is given the state; the others have it from there, and know the count."""
        self._take(self.opt.state(), state)
        self.opt.restore(self.opt.state(), step_count)

    def pop_counts(self) -> dict[str, int]:
        return {}  # there are no stages

    def close(self) -> None:
        if self.num_processes > 1:
            dist.destroy_process_group()


def share_batches(
    store: dist.Store,
    rank: int,
    num_processes: int,
    device: torch.device | str,
    timeout_seconds: float = 600.0,
) -> None:
    """Make the process group of a full replica: NCCL between GPUs, gloo on loopback for the rest.

    DDP works on torch's default group only, so a process belongs to at most one such replica.
    """
    patience = timedelta(seconds=timeout_seconds)

    def on_loopback(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return group("gloo", store, rank, size, LOOPBACK, timeout)

    if "loopback" not in dist.Backend.backend_list:
        dist.Backend.register_backend("loopback", on_loopback, devices=["cpu"])
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:loopback,cuda:nccl" if cuda else "cpu:loopback",
        store=store,
        rank=rank,
        world_size=num_processes,
        timeout=patience,
    )
