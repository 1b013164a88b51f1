"""A full replica that fits in no single process: torch's FSDP2 cuts every weight between the processes."""

import ctypes
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from isthmus.config import Member, Recipe
from isthmus.data.ahead import ReadAhead
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError
from isthmus.layout.stages import EMBEDDING, stage_names
from isthmus.model import muon
from isthmus.model.inner import InnerOpt
from isthmus.model.llama import embed, head_names, init_tensor, rope_table
from isthmus.model.parts import parts
from isthmus.replica.base import Wish, precision_dtypes
from isthmus.replica.clock import Clock
from isthmus.replica.control_group import ControlGroup, SingleProcess
from isthmus.replica.full import LOOPBACK
from isthmus.replica.process_groups import Store, lost_processes, make_group

# Between rounds a process may be uploading while the others already wait for it.
TIMEOUT_SECONDS = 1800.0
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 2**18  # from malloc.h; blocks of this size and more get a separate mapping


class ShardedReplica:
    """A Replica without stages, cut between the processes of one machine.

    In the inner step (eq. 1) every process has its rows of every weight, gradient and moment; a layer is
    whole only while it runs. In the outer step (eq. 2) process r owns the weights that stage r would train if
    there were as many stages: it holds their anchor and error feedback and encodes their payload. So no
    process ever holds the whole model there either. `begin_round` and `named_parameters` convert the weights
    between the two cuts, one tensor at a time. All processes make every call.
    """

    round_trip_seconds, wish_delay = 0.0, 0

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        batches: Batches,
        mesh: DeviceMesh,
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        compiled: bool = False,
        control: ControlGroup | None = None,
    ) -> None:
        """`mesh` comes from `shard_mesh`. The hosts of its processes agree between inner steps through
        `control`."""
        self.control = control or SingleProcess()
        self.recipe, self.member = recipe, member
        self.rank, self.num_processes = mesh.get_local_rank(), mesh.size()
        batch, self.num_parts = recipe.batch_of(member.config), recipe.micro_batches_of(member.config)
        if batch % (self.num_processes * self.num_parts):
            raise ConfigError(
                f"inner.batch is {batch}, which {self.num_processes} processes do not divide; "
                "change one of them"
            )
        self.device, self.clock = torch.device(device), Clock(torch.device(device))
        self.tokens = ReadAhead(
            lambda step: batches.at(member.index, step).chunk(self.num_processes)[self.rank], self.device
        )
        self.master_dtype, dtype = precision_dtypes(precision)
        self.shapes = recipe.model.shapes()
        owned = stage_names(recipe.model, self.num_processes)
        self.owners = {name: rank for rank, names in enumerate(owned) for name in names}
        with self._faults():
            self.model = _Model(recipe, mesh, self.device, self.master_dtype, dtype, compiled)
        self.params = self.model.weights()
        # Rows are split as by torch.chunk: a short tensor may leave none for the last processes.
        self.local = {n: rows for n, p in self.params.items() if (rows := _rows(p)).numel()}
        split = _SplitMatrices(self.params, self.num_processes)
        self.opt = InnerOpt(self.local, recipe.inner, recipe.num_inner_steps, split=split)
        self.norms: Tensor | None = None

    @property
    def grad_norm(self) -> float:
        return math.nan if self.norms is None else self.norms.item()

    @torch.no_grad()
    def begin_round(self, anchor: Mapping[str, Tensor]) -> None:
        """Start from the anchor: each process has the part that it owns; the others receive their rows."""
        with self._faults():
            for name, owner in self.owners.items():
                whole = self._padded(anchor[name]) if owner == self.rank else None
                received = self._empty(name, 1)
                dist.scatter(received, self._pieces(whole), src=owner)
                if name in self.local:
                    self.local[name].copy_(received[: len(self.local[name])])

    def go_on(self, anchor: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        self.begin_round(params)

    def agree(self, wish: Wish) -> Wish:
        """Agree between the hosts; the devices work on meanwhile."""
        return Wish(max(int(word[0]) for word in self.control.share(bytes([wish]))))

    @torch.no_grad()
    def named_parameters(self) -> dict[str, Tensor]:
        """The whole weights that this process owns, gathered now: later inner steps do not change them."""
        found = {}
        with self._faults():
            for name, owner in self.owners.items():
                whole = self._empty(name, self.num_processes) if owner == self.rank else None
                own = self.local.get(name)
                rows = self._empty(name, 1).zero_() if own is None else _filled(own, self._share(name))
                dist.gather(rows, self._pieces(whole), dst=owner)
                if whole is not None:
                    found[name] = whole[: self.shapes[name][0]]
        return found

    def _share(self, name: str) -> int:
        """Rows per process; the last ones may have fewer."""
        return -(-self.shapes[name][0] // self.num_processes)

    def _empty(self, name: str, shares: int) -> Tensor:
        shape = (shares * self._share(name), *self.shapes[name][1:])
        return torch.empty(shape, dtype=self.master_dtype, device=self.device)

    def _padded(self, whole: Tensor) -> Tensor:
        """Pad the tensor to equal rows for every process."""
        num_rows = -(-len(whole) // self.num_processes) * self.num_processes
        return _filled(whole.to(self.device, self.master_dtype), num_rows)

    def _pieces(self, whole: Tensor | None) -> list[Tensor] | None:
        return None if whole is None else list(whole.chunk(self.num_processes))

    def inner_step(self, inner_step: int) -> Tensor:
        """One InnerOpt update of the whole replica (eq. 1); its loss, the same in every process."""
        with self.clock, self._faults():
            own = self.tokens.at(inner_step)  # (B, L + 1)
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            for part in own.chunk(self.num_parts):
                mean = self.model(part[:, :-1], part[:, 1:]) / self.num_parts
                mean.backward()  # each layer's gradients are averaged as they appear, cut, and accumulated
                loss += mean.detach().double()
            for name, rows in self.local.items():
                rows.grad = _rows(self.params[name].grad)
            square = self.opt.squared_norm().double().sum()
            totals = torch.stack([square, loss / self.num_processes])
            dist.all_reduce(totals)
            self.opt.advance(inner_step)
            self.norms = self.opt.update(totals[:1].to(self.master_dtype))
            self.opt.zero_grad()
            self.model.zero_grad()
        return totals[1]

    def state(self) -> dict[str, Tensor]:
        """This process's rows of both moments."""
        return self.opt.state()

    def restore(self, state: Mapping[str, Tensor], step_count: int) -> None:
        with torch.no_grad():
            self.opt.restore(state, step_count)

    def pop_counts(self) -> dict[str, int]:
        return {}  # no stages

    def pop_outside(self) -> None:
        return None

    def close(self) -> None:
        dist.destroy_process_group()

    def _faults(self) -> AbstractContextManager[None]:
        return lost_processes(self.member.name, self.rank)


class _SplitMatrices:
    """Muon between processes that each hold rows of every matrix: they deal the matrices of a shape among
    themselves, exchange rows, orthogonalise what they were dealt, and exchange the results.

    Each matrix is orthogonalised once, and crosses the link twice in bf16: 4 bytes a weight and step more
    than AdamW. A process holds at most its deal of whole matrices, `muon.LARGEST_BATCH` entries in all.
    """

    def __init__(self, params: Mapping[str, Tensor], num_processes: int) -> None:
        matrices = muon.chosen(params, stacked=False)
        self.shapes: Mapping[str, torch.Size] = {name: params[name].shape for name in matrices}
        self.num_processes = num_processes
        self.like = next(iter(params.values()))

    def orthogonalised(self, names: Sequence[str], updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        (rows, cols), n = self.shapes[names[0]], self.num_processes
        share, each = -(-rows // n), -(-len(names) // n)  # rows of a matrix, matrices: for each process
        dtype = muon.in_work_precision(self.like.new_empty(0)).dtype
        sent = torch.zeros(each, n, share, cols, dtype=dtype, device=self.like.device)
        for place, name in zip(sent.flatten(0, 1), names, strict=False):  # matrix i goes to process i % n
            if name in updates:
                place[: len(updates[name])] = updates[name]
        whole = _exchanged(sent.transpose(0, 1)).transpose(0, 1).reshape(each, n * share, cols)
        whole[:, :rows] = muon.orthogonalised(whole[:, :rows])
        back = _exchanged(whole.view(each, n, share, cols).transpose(0, 1)).transpose(0, 1).flatten(0, 1)
        return {
            name: place[: len(updates[name])]
            for place, name in zip(back, names, strict=False)
            if name in updates
        }


def _exchanged(pieces: Tensor) -> Tensor:
    """pieces[r] goes to process r; return what all have sent here, in their order."""
    sent = pieces.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8))
    return received


class _Unit(nn.Module):
    """Weights that are gathered together, and the function that uses them."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.prefix, self.run = prefix, run
        for name, value in weights.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(value))  # torch allows no dot

    def weights(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): p for name, p in self.named_parameters(recurse=False)}

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self.weights(), *inputs)


class _Model(nn.Module):
    """Embedding, layers and head, each cut as soon as it is drawn: the whole model never exists here."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: DeviceMesh,
        device: torch.device,
        master_dtype: torch.dtype,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        super().__init__()
        model = recipe.model
        shapes, rope = model.shapes(), rope_table(model, model.context, master_dtype, device)
        chosen = parts(compiled, recipe.inner.recompute)
        # Weights travel in the stream's precision; gradients are averaged in the precision of the weights.
        half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master_dtype, cast_forward_inputs=False)
        policy = half if dtype != master_dtype else MixedPrecisionPolicy(cast_forward_inputs=False)

        def unit(
            names: Collection[str], prefix: str, run: Callable[..., Tensor], cut: bool = True, **how: Any
        ) -> _Unit:
            drawn = {
                name: init_tensor(prefix + name, shapes[prefix + name], model, recipe.seed) for name in names
            }
            made = _Unit({n: t.to(device, master_dtype) for n, t in drawn.items()}, prefix, run)
            if cut:
                fully_shard(made, mesh=mesh, **how)
            return made

        def run_layer(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
            return chosen.layer(weights, x, model, *rope)

        def run_head(weights: Mapping[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
            return chosen.head_losses(weights, x, targets, model)

        # A row of the table is looked up, then rounded, so its gradients accumulate in full precision.
        whole = MixedPrecisionPolicy(cast_forward_inputs=False)
        tied, embedding = model.tie_embeddings, partial(embed, dtype=dtype)
        first = unit([EMBEDDING], "", embedding, not tied, mp_policy=whole)
        layers = [
            unit(model.layer_shapes(), f"layers.{i}.", run_layer, mp_policy=policy)
            for i in range(model.layers)
        ]
        # The head's backward follows its forward at once, so it stays whole in between.
        own = [name for name in head_names(model) if name != EMBEDDING]
        last = unit(own, "", run_head, not tied, mp_policy=policy, reshard_after_forward=False)
        if tied:  # the root gathers the table for both of its uses, and adds their gradients
            for name, parameter in first.named_parameters(recurse=False):
                last.register_parameter(name, parameter)
        self.units = nn.ModuleList([first, *layers, last])
        fully_shard(self, mesh=mesh, mp_policy=whole)

    def weights(self) -> dict[str, Tensor]:
        """All weights, under full-model names."""
        units = [unit for unit in self.units if isinstance(unit, _Unit)]
        return {unit.prefix + name: p for unit in units for name, p in unit.weights().items()}

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of these rows."""
        first, *layers, last = self.units
        x = first(inputs)  # (B, L, D)
        for each in layers:
            x = each(x)
        return last(x, targets)


def _rows(tensor: Tensor | None) -> Tensor:
    """This process's rows: the storage itself, detached."""
    assert isinstance(tensor, DTensor), "FSDP gives every weight and its gradient as a DTensor"
    return tensor.to_local().detach()


def _filled(rows: Tensor, num_rows: int) -> Tensor:
    """Pad with rows of zeros up to `num_rows`; no copy if it has them."""
    if len(rows) == num_rows:
        return rows.contiguous()
    filled = rows.new_zeros(num_rows, *rows.shape[1:])
    filled[: len(rows)] = rows
    return filled


def shard_mesh(
    store: Store,
    rank: int,
    num_processes: int,
    device: torch.device | str,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> DeviceMesh:
    """The mesh of a sharded replica: NCCL between GPUs, else gloo on loopback.

    FSDP and DTensor look their groups up in torch.distributed, so this is the default group of the process.
    """
    torch_distributed: Any = dist  # its stubs lack this
    kind, timeout = torch.device(device).type, timedelta(seconds=timeout_seconds)
    if kind == "cuda":
        torch.cuda.set_device(device)
        backend = "cuda:nccl"
    else:
        # torch's own gloo would listen on the address of this host's name.
        def loopback(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
            return make_group("gloo", store, rank, size, LOOPBACK, timeout)

        _return_freed_memory()
        torch_distributed.Backend.register_backend("loopback", loopback, devices=["cpu"])
        backend = "cpu:loopback"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_processes, timeout=timeout)
    return init_device_mesh(kind, (num_processes,))


def _return_freed_memory() -> None:
    """Make glibc return large freed blocks to the system. Otherwise it keeps the layers that come and go with
    every step in each thread's arena: several times the memory in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
