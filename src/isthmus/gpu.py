"""Shared GPU code: whether Triton kernels can run, CUDA graphs, and how far the host may run ahead."""

import importlib.util
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device) -> bool:
    """Return whether Triton kernels can run on tensors of this device."""
    return device.type == "cuda" and torch.version.hip is None and _triton_is_installed()


BF16_SINCE = (8, 0)  # Ampere


def computes_in_bf16(device: torch.device, capability: tuple[int, int] | None = None) -> bool:
    """Return whether a GPU computes in bf16. On NVIDIA's older cards, such as V100 and T4, torch emulates
    bf16, which is slower than fp32. `capability`: torch's value by default."""
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type == "cuda"
    return (capability or torch.cuda.get_device_capability(device)) >= BF16_SINCE


# What Apple's GPUs lack. None of this has run on one: tests use the CPU instead (tests/test_mps.py).
NO_DOUBLE = frozenset({"mps"})


def wide(device: torch.device) -> torch.dtype:
    """float64 if the device has it, else float32: for sums that are only displayed."""
    return torch.float32 if device.type in NO_DOUBLE else torch.float64


def in_double(work: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply `work` to a tensor in float64. If its device lacks float64, the CPU computes it and the result
    comes back in float32."""
    if tensor.device.type not in NO_DOUBLE:
        return work(tensor.double())
    return work(tensor.cpu().double()).float().to(tensor.device)


def outer_device(device: torch.device) -> torch.device:
    """The device for a replica's anchor and outer step. All replicas must reach the same bits, which Metal's
    arithmetic does not guarantee: with an Apple GPU it is the CPU."""
    return torch.device("cpu") if device.type == "mps" else device


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Replayed:
    """GPU work that repeats: recorded once as a CUDA graph, then launched as one.

    A small model's step is hundreds of short kernels, and launching them one by one takes longer than running
    them. The work takes and returns tensors. It may read and write other tensors only if they never move, and
    it may not wait for the device. Its memory stays allocated.
    """

    WARM = 2  # calls before the recording: they compile, load kernels, find algorithms
    refused = False  # after one failed recording, this process tries no other

    def __init__(self, work: Callable[..., tuple[Tensor, ...]]) -> None:
        self.work, self.calls = work, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.graph is None and self.calls > self.WARM and not self.refused:
            self._record(inputs)
        if self.graph is None:
            return self.work(*inputs)
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)  # the next replay overwrites them

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the graph will hold as much as the calls before it
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread reads ahead
                self.outputs = self.work(*self.inputs)
        except RuntimeError as error:  # nothing has run yet: the call goes on as those before it
            torch.cuda.set_stream(stream)
            Replayed.refused = True
            reason = (str(error).splitlines() or ["no reason given"])[0]
            warnings.warn(f"no CUDA graph could be recorded, so steps take longer: {reason}", stacklevel=3)
        else:
            self.graph = graph


class Pace:
    """Keep the host at most a few steps ahead of a GPU. Otherwise it would launch a whole round of recorded
    steps at once, and its progress reports would mean nothing."""

    LEAD = 4  # enough for the host to prepare the next steps

    def __init__(self, device: torch.device) -> None:
        self.on, self.device = device.type == "cuda", device
        self.marks: deque[torch.cuda.Event] = deque()

    def launched(self) -> None:
        """Count a launched step, and wait until the one LEAD steps before it is done."""
        if not self.on:
            if self.device.type == "mps":
                wait_for(self.device)
            return
        self.marks.append(torch.cuda.Event(blocking=True))
        self.marks[-1].record()
        if len(self.marks) > self.LEAD:
            self.marks.popleft().synchronize()


class HostCopy:
    """Copy named tensors to host memory as of one moment, while the device goes on.

    From a GPU the copy runs on its own stream into pinned memory, which is allocated once and reused.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffer = device, torch.empty(0, dtype=torch.uint8)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.done: torch.cuda.Event | None = None

    def reserve(self, num_bytes: int) -> None:
        """Allocate the memory now. Gigabytes take seconds, so a thread may do it before the first copy."""
        if num_bytes > len(self.buffer):
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if self.stream:  # torch's allocator of pinned memory would round up to a power of two
                cudart: Any = torch.cuda.cudart()
                cudart.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
            self.buffer = buffer

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of host memory by name. They hold the values of this moment once `wait` returns."""
        self.reserve(sum(aligned(tensor.nbytes) for tensor in tensors.values()))
        copies, at = {}, 0
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for name, tensor in tensors.items():
                own = self.buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[name] = own.copy_(tensor.detach(), non_blocking=self.stream is not None)
                at += aligned(tensor.nbytes)
        if self.stream:
            self.done = torch.cuda.Event(blocking=True)
            self.done.record(self.stream)
        return copies

    def protect(self) -> None:
        """Let later launches change the tensors: the device finishes the copy first."""
        if self.done:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self.done:
            self.done.synchronize()


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
