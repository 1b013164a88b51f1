"""What code that runs on a GPU shares: whether Triton kernels can run, and work launched as one graph."""

import importlib.util
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device."""
    return device.type == "cuda" and torch.version.hip is None and _triton_is_here()


class Replayed:
    """Work that a GPU does over and over: recorded once as a CUDA graph, then launched as one.

    A small model's step is hundreds of short kernels, and launching them one by one takes longer than running
    them. The work takes and gives tensors; besides them it may read and write only tensors that stay where
    they are, and it may not wait for the device. What it allocates stays allocated.
    """

    WARM = 2  # calls before the recording: compile, load kernels, find algorithms

    def __init__(self, work: Callable[..., tuple[Tensor, ...]]) -> None:
        self.work, self.calls = work, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.calls <= self.WARM:
            return self.work(*inputs)
        if self.graph is None:
            self._record(inputs)
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)  # the next replay overwrites them

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the calls before held, the graph will hold
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread reads ahead
            self.outputs = self.work(*self.inputs)
        self.graph = graph
