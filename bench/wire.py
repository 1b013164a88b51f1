"""What a few-bit wire costs a stage: encode and decode of a frame, against that micro-batch's compute.

    python bench/wire.py [--size 178m] [--stages 4] [--rows 4] [--dim 256] [--wires int8 int4] [--turns 20]

A middle stage of `--stages`, compiled, takes a micro-batch of `--rows` sequences forward and back. That is
its compute where links carry bf16, so that no codec is counted. Figures are medians of `--turns` turns:

    device    the work alone: recorded, and launched as one graph; of the compute, the sum of its kernels
    launched  from Python, one call after another; a stage hides this as far as the host runs ahead
    stage     the whole micro-batch with this wire on both sides, and what that is over bf16's

`all` is what a middle stage does with a micro-batch: decode and encode, forward and back. On a CPU the bench
is only tried out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from isthmus import gpu
from isthmus.config import Recipe, parse_recipe
from isthmus.layout.wire import INT_BITS
from isthmus.replica.stage import Stage
from isthmus.subspace.wire import IntWire

RECIPE = """
name = "bench"
[model]
preset = "{size}"
[inner]
batch = {rows}
micro_batches = 1
[outer]
inner_steps = 2
[[replicas]]
name = "edge"
kind = "pipelined"
stages = {stages}
compression = "{dim}/{width}"
wire = "bf16"
"""
CALLS = 20  # in one measurement
PARTS = ("encode forward", "decode forward", "encode backward", "decode backward")
Work = Callable[[], object]


@dataclass(frozen=True)
class Timer:
    """Microseconds of one call."""

    device: torch.device
    turns: int

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _median(self, work: Work, calls: int) -> float:
        took = []
        for _ in range(self.turns):
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            took.append((time.perf_counter() - start) / calls)
        return 1e6 * statistics.median(took)

    def launched(self, work: Work, calls: int = CALLS) -> float:
        work()
        work()
        return self._median(lambda: [work() for _ in range(calls)], calls)

    def on_device(self, work: Work) -> float:
        if self.device.type != "cuda":
            return float("nan")
        work()
        self._wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                work()
        return self._median(graph.replay, CALLS)

    def kernels(self, work: Work) -> float:
        """The sum of the kernels' own times."""
        if self.device.type != "cuda":
            return float("nan")
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                work()
            self._wait()
        rows: Any = seen.key_averages()
        return sum(row.self_device_time_total for row in rows) / 5


def micro_batch(recipe: Recipe, wire: str, device: torch.device) -> Work:
    """A middle stage's forward and backward, with this wire on both sides."""
    member = recipe.fleet()[0]
    precision, compiled = ("bf16", True) if device.type == "cuda" else ("fp32", False)
    stage = Stage(recipe, member, 1, device=device, precision=precision, compiled=compiled)
    shape = stage.frames()[0][0].shape
    z, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    if wire != "bf16":
        stage.wire = IntWire(wire)
        z, grad = stage.wire.encode(z, True), stage.wire.encode(grad, False)
    ids = torch.randint(recipe.model.vocab, (shape[0], shape[1] + 1), device=device)

    def work() -> None:
        stage.begin_step()
        stage.forward(0, ids, z)
        stage.backward(0, grad)

    return work


def parts_of(wire: IntWire, z: Tensor, grad: Tensor, compiled: bool) -> list[Work]:
    rows, length, dim = z.shape
    shape = (rows, length, dim)
    encode: Callable[..., object] = wire.encode
    decode: Callable[..., object] = wire.decode
    if compiled:
        encode, decode = torch.compile(encode, dynamic=False), torch.compile(decode, dynamic=False)
    sent, back = wire.encode(z, True), wire.encode(grad, False)
    return [
        lambda: encode(z, True),
        lambda: decode(sent, shape, z.dtype, True),
        lambda: encode(grad, False),
        lambda: decode(back, shape, z.dtype, False),
    ]


@dataclass(frozen=True)
class Bench:
    timer: Timer
    recipe: Recipe
    z: Tensor
    grad: Tensor
    on_device: float  # of the compute
    launched: float

    def line(self, wire: str, kind: str) -> None:
        hidden = patch.object(gpu, "usable", lambda device: False) if kind == "plain" else nullcontext()
        with torch.no_grad(), hidden:
            work = parts_of(IntWire(wire), self.z, self.grad, kind == "torch.compile")
            times = [(self.timer.on_device(part), self.timer.launched(part)) for part in work]
        device, launched = (sum(pair[i] for pair in times) for i in (0, 1))
        cells = "".join(f"{d:8.1f} {w:8.1f}" for d, w in times)
        cells += (
            f"{device:8.1f} {device / self.on_device:7.2%} {launched:8.1f} {launched / self.launched:7.2%}"
        )
        if kind != "torch.compile":
            with hidden:
                stage = self.timer.launched(micro_batch(self.recipe, wire, self.timer.device), 5)
            cells += f"{stage:9.0f} {stage / self.launched - 1:+7.2%}"
        print(f"{wire + ' ' + kind:20}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="178m")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024, help="of the model, which --dim is a part of")
    parser.add_argument("--wires", nargs="*", default=list(INT_BITS), choices=list(INT_BITS))
    parser.add_argument(
        "--compiled-wires", nargs="*", default=[], help="under torch.compile, which takes long"
    )
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe, timer = parse_recipe(RECIPE.format(**vars(args))), Timer(device, args.turns)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shown = f"{args.size}, S = {args.stages}, B = {args.rows}, L = {recipe.model.context}, k = {args.dim}"
    print(f"{name}, torch {torch.__version__}; {shown}")
    shape = (args.rows, recipe.model.context, args.dim)
    z = (torch.randn(shape, device=device) + torch.randn(args.dim, device=device)).bfloat16()
    grad = 1e-4 * torch.randn(shape, device=device).bfloat16()
    open_link = micro_batch(recipe, "bf16", device)
    launched = timer.launched(open_link, 5)
    bench = Bench(timer, recipe, z, grad, timer.kernels(open_link), launched)
    print(
        f"a micro-batch's compute: {bench.on_device:.0f} us on the device, {bench.launched:.0f} us launched"
    )
    print(
        f"{'us: device, launched':20}"
        + "".join(f"{part:>17}" for part in (*PARTS, "all: device", "launched", "stage"))
    )
    for wire in args.wires:
        bench.line(wire, "plain")
        if gpu.usable(device):
            bench.line(wire, "kernels")
    for wire in args.compiled_wires:
        bench.line(wire, "torch.compile")


if __name__ == "__main__":
    main()
