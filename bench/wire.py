"""What a few-bit wire costs a stage: encode and decode of a frame, against that micro-batch's compute.

    python bench/wire.py [--size 178m] [--stages 4] [--rows 4] [--dim 256] [--wires int8 int4] [--turns 20]

A middle stage of `--stages`, compiled, takes a micro-batch of `--rows` sequences forward and back. That is
its compute where links carry bf16, so that no codec is counted. The wire is plain torch, and the same under
torch.compile. Figures are medians of `--turns` turns:

    device    the work alone: recorded, and launched as one graph; of the compute, the sum of its kernels
    launched  from Python, one call after another; a stage hides this as far as the host runs ahead
    stage     the whole micro-batch with this wire on both sides, and what that is over bf16's

`all` is what a middle stage does with a micro-batch: decode and encode, forward and back. On a CPU the bench
is only tried out: --size nano --dim 48 --width 128 --wires int5 --turns 2.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

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


def wire_at(recipe: Recipe, name: str, compiled: bool) -> IntWire:
    member = recipe.fleet()[0]
    return IntWire(name, recipe.batch_of(member.config) * recipe.model.context, compiled)


def micro_batch(recipe: Recipe, wire: IntWire | None, device: torch.device) -> Work:
    """A middle stage's forward and backward, with this wire on both sides; None: bf16."""
    member = recipe.fleet()[0]
    precision, compiled = ("bf16", True) if device.type == "cuda" else ("fp32", False)
    stage = Stage(recipe, member, 1, device=device, precision=precision, compiled=compiled)
    shape = stage.frames()[0][0].shape
    z, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    if wire:
        stage.wire = wire
        z, grad = wire.encode(z, "forward")[0], wire.encode(1e-6 * grad, "back")[0]
    ids = torch.randint(recipe.model.vocab, (shape[0], shape[1] + 1), device=device)

    def work() -> None:
        stage.begin_step()
        stage.forward(0, ids, z)
        stage.backward(0, grad)

    return work


def parts_of(wire: IntWire, z: Tensor, grad: Tensor) -> list[Work]:
    rows, length, dim = z.shape
    shape = (rows, length, dim)
    sent, back = wire.encode(z, "forward")[0], wire.encode(grad, "back")[0]
    return [
        lambda: wire.encode(z, "forward"),
        lambda: wire.decode(sent, shape, z.dtype, "forward"),
        lambda: wire.encode(grad, "back"),
        lambda: wire.decode(back, shape, z.dtype, "back"),
    ]


@dataclass(frozen=True)
class Bench:
    timer: Timer
    recipe: Recipe
    z: Tensor
    grad: Tensor
    on_device: float  # of the compute
    launched: float

    def line(self, name: str, kind: str) -> None:
        wire = wire_at(self.recipe, name, kind == "compiled")
        with torch.no_grad():
            work = parts_of(wire, self.z, self.grad)
            times = [(self.timer.on_device(part), self.timer.launched(part)) for part in work]
        device, launched = (sum(pair[i] for pair in times) for i in (0, 1))
        cells = "".join(f"{d:8.1f} {w:8.1f}" for d, w in times)
        cells += (
            f"{device:8.1f} {device / self.on_device:7.2%} {launched:8.1f} {launched / self.launched:7.2%}"
        )
        stage = self.timer.launched(micro_batch(self.recipe, wire, self.timer.device), 5)
        print(f"{f'{name} {kind}':20}{cells}{stage:9.0f} {stage / self.launched - 1:+7.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="178m")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024, help="of the model, which --dim is a part of")
    parser.add_argument("--wires", nargs="*", default=list(INT_BITS), choices=list(INT_BITS))
    parser.add_argument("--kinds", nargs="*", default=["plain", "compiled"], choices=["plain", "compiled"])
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe, timer = parse_recipe(RECIPE.format(**vars(args))), Timer(device, args.turns)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shown = f"{args.size}, S = {args.stages}, B = {args.rows}, L = {recipe.model.context}, k = {args.dim}"
    print(f"{name}, torch {torch.__version__}; {shown}")
    shape = (args.rows, recipe.model.context, args.dim)
    z = (torch.randn(shape, device=device) + torch.randn(args.dim, device=device)).bfloat16()
    grad = 1e-6 * torch.randn(shape, device=device).bfloat16()
    open_link = micro_batch(recipe, None, device)
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
        for kind in args.kinds:
            bench.line(wire, kind)


if __name__ == "__main__":
    main()
