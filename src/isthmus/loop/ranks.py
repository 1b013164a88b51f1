"""The processes of one replica under torchrun: who owns which tensors, and how values move between them.

With DDP rank 0 owns all tensors. With FSDP2 shards are dealt to ranks by size. An owner keeps the anchor and
the error feedback; one tensor at a time is gathered from all ranks, and sent back to them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from isthmus.loop.tensors import values, whole
from isthmus.replica.control_group import ControlGroup, SingleProcess

WAIT = timedelta(days=30)  # a round may wait for other replicas as long as it takes


class Control:
    """Some of the ranks share bytes, through a gloo group of their own."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks`: global numbers, of which ours is one."""
        self.group: Any = dist.new_group(
            list(ranks), timeout=WAIT, backend="gloo", use_local_synchronization=True
        )
        self.rank, self.size = list(ranks).index(dist.get_rank()), len(ranks)

    def share(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        most = max(int(size) for size in sizes)
        mine = torch.tensor([*data, *bytes(most - len(data))], dtype=torch.uint8)
        found = [torch.zeros(most, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(found, mine, group=self.group)
        return [bytes(part[: int(size)].tolist()) for part, size in zip(found, sizes, strict=True)]

    def leave(self) -> None:
        """Do nothing: the group ends with its processes."""


class Ranks:
    """All processes of this replica. They make the same calls in the same order."""

    def __init__(self, process_group: Any = None) -> None:
        """`process_group`: of the replica; by default all ranks, if torch.distributed is in use."""
        self.group = process_group
        self.control: ControlGroup = SingleProcess()
        self.numbers = [0]
        if dist.is_available() and dist.is_initialized():
            self.numbers = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            if len(self.numbers) > 1:
                self.control = Control(self.numbers)
        self.rank, self.size = self.control.rank, self.control.size

    def share(self, value: Any) -> list[Any]:
        """A value that JSON can hold, from every rank."""
        if self.size == 1:
            return [value]
        return [json.loads(data) for data in self.control.share(json.dumps(value).encode())]

    def deal(self, parameters: Mapping[str, Tensor], shards: Sequence[Sequence[str]]) -> None:
        """Decide who owns which shard. Sets `owners`, `own`, and `session`, the control group of the ranks
        that own any; None if this rank owns none."""
        cut = any(isinstance(p, DTensor) for p in parameters.values())
        num_owners = min(self.size, len(shards)) if cut else 1
        sizes = [sum(parameters[name].numel() for name in names) for names in shards]
        loads, self.owners = [0] * num_owners, dict[str, int]()
        for index in sorted(range(len(shards)), key=lambda i: -sizes[i]):
            rank = loads.index(min(loads))
            loads[rank] += sizes[index]
            self.owners |= dict.fromkeys(shards[index], rank)
        self.own = [name for name in parameters if self.owners[name] == self.rank]
        self.session: ControlGroup | None = None
        if self.rank < num_owners:
            self.session = Control(self.numbers[:num_owners]) if num_owners > 1 else SingleProcess()

    def gather(self, parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of the tensors in `anchor`, as `values` gives them."""
        found = {}
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor) or name in anchor:
                full = whole(parameter)
                if name in anchor:
                    found[name] = values(full, anchor[name])
        return found

    @torch.no_grad()
    def scatter(self, parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> None:
        """Copy the anchor into the parameters of all ranks."""
        for name, parameter in parameters.items():
            if name in anchor:
                full = anchor[name].to(parameter.device, parameter.dtype)
            else:
                full = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)
            if self.size > 1:
                dist.broadcast(full, self.numbers[self.owners[name]], group=self.group)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))
            else:
                parameter.copy_(full)
