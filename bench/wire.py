"""What a few-bit wire costs a stage: encode and decode of a frame, against that micro-batch's compute.

    python bench/wire.py [--size 178m] [--stages 4] [--rows 4] [--dim 256] [--wires int8 int4] [--turns 20]

A middle stage of `--stages` takes a micro-batch of `--rows` sequences forward and back; its own links carry
bf16, so no codec is counted as compute. Each figure is the median of `--turns` turns: `device` is the work
itself, recorded and launched as one graph; `launched` is the same from Python, one call after another, which
a stage hides behind its compute as far as the host runs ahead. `all` are the four things that a middle stage
does with a micro-batch: decode and encode, forward and back. On a CPU it is only tried out.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Recipe, parse_recipe
from isthmus.layout.wire import INT_BITS
from isthmus.replica.stage import Stage
from isthmus.subspace.wire import IntWire, wire_of

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


class Timer:
    """Microseconds of one call."""

    def __init__(self, device: torch.device, turns: int) -> None:
        self.device, self.turns = device, turns

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

    def on_device(self, work: Work) -> float | None:
        """None where there is no GPU, or where the work cannot be recorded."""
        if self.device.type != "cuda":
            return None
        work()
        self._wait()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    work()
        except RuntimeError as error:
            print(f"  (no graph: {str(error).splitlines()[0]})")
            return None
        return self._median(graph.replay, CALLS)


@contextmanager
def without_kernels() -> Iterator[None]:
    with patch.object(gpu, "usable", lambda device: False):
        yield


def compute(recipe: Recipe, device: torch.device, compiled: bool, timer: Timer) -> float:
    """Microseconds of a middle stage's forward and backward."""
    member = recipe.fleet()[0]
    precision = "bf16" if device.type == "cuda" else "fp32"
    stage = Stage(recipe, member, 1, device=device, precision=precision, compiled=compiled)
    shape, dtype = stage.frames()[0][0].shape, torch.bfloat16
    z, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    ids = torch.randint(recipe.model.vocab, (shape[0], shape[1] + 1), device=device)

    def micro_batch() -> None:
        stage.begin_step()
        stage.forward(0, ids, z)
        stage.backward(0, grad)

    return timer.launched(micro_batch, 5)


def parts_of(wire: IntWire, z: Tensor, grad: Tensor, compiled: bool) -> dict[str, Work]:
    shape = tuple(z.shape)
    assert len(shape) == 3
    encode: Callable[..., object] = wire.encode
    decode: Callable[..., object] = wire.decode
    if compiled:
        encode, decode = torch.compile(encode, dynamic=False), torch.compile(decode, dynamic=False)
    with torch.no_grad():
        sent, back = wire.encode(z, True), wire.encode(grad, False)
    return {
        "encode forward": lambda: encode(z, True),
        "decode forward": lambda: decode(sent, shape, z.dtype, True),
        "encode backward": lambda: encode(grad, False),
        "decode backward": lambda: decode(back, shape, z.dtype, False),
    }


def line(name: str, device: list[float | None], launched: list[float], whole: float) -> None:
    cells = "".join(
        f" {'-' if d is None else f'{d:.1f}':>7} {w:8.1f}" for d, w in zip(device, launched, strict=True)
    )
    on = None if None in device else sum(d for d in device if d is not None)
    total = f"{'-' if on is None else f'{on:.1f}':>7} {'-' if on is None else f'{on / whole:.2%}':>7}"
    print(f"{name:22}{cells} {total} {sum(launched):8.1f} {sum(launched) / whole:7.2%}", flush=True)


@torch.no_grad()
def measure(
    name: str, wire: IntWire, z: Tensor, grad: Tensor, whole: float, timer: Timer, compiled: bool
) -> None:
    work = parts_of(wire, z, grad, compiled)
    launched = [timer.launched(work[part]) for part in PARTS]
    line(name, [timer.on_device(work[part]) for part in PARTS], launched, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="178m")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024, help="of the model, which --dim is a part of")
    parser.add_argument("--wires", nargs="+", default=list(INT_BITS), choices=list(INT_BITS))
    parser.add_argument(
        "--compiled-wires", nargs="*", default=[], help="under torch.compile too, which takes long"
    )
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = parse_recipe(RECIPE.format(**vars(args)))
    timer = Timer(device, args.turns)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shown = f"{args.size}, S = {args.stages}, B = {args.rows}, k = {args.dim}"
    print(f"{name}, torch {torch.__version__}; {shown}")
    plain = compute(recipe, device, False, timer)
    whole = compute(recipe, device, True, timer) if device.type == "cuda" else plain
    print(
        f"a micro-batch's forward and backward: {whole:.0f} us compiled, {plain:.0f} us as it is", flush=True
    )
    shape, dtype = (args.rows, recipe.model.context, args.dim), torch.bfloat16
    z = (torch.randn(shape, device=device) + torch.randn(args.dim, device=device)).to(dtype)
    grad = torch.randn(shape, device=device).to(dtype) * 1e-4
    print(
        f"{'us: device, launched':22}"
        + "".join(f"{part:>17}" for part in PARTS)
        + f"{'all: device, launched':>34}"
    )
    for wire_name in args.wires:
        wire = wire_of(wire_name)
        assert isinstance(wire, IntWire)
        with without_kernels():
            measure(f"{wire_name} plain", wire, z, grad, whole, timer, False)
            if device.type == "cuda" and wire_name in args.compiled_wires:
                measure(f"{wire_name} torch.compile", wire, z, grad, whole, timer, True)
        if gpu.usable(device):
            measure(f"{wire_name} kernels", wire, z, grad, whole, timer, False)


if __name__ == "__main__":
    main()
