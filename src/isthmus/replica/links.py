"""Links between stages: frames of known size, the promises of both ends, and the link inside one process.

A link carries frames: a few tensors whose shapes both sides know, concatenated as bytes. It never unpickles
data. Between processes there are two kinds: `SocketLink`, and `ProcessLink` (gloo or NCCL) on one machine and
in trusted networks. Any class that keeps the promises of `StageEnd` would do.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.layout.traffic import STAGE_PURPOSES

LINK_PURPOSES = (*STAGE_PURPOSES, "control")  # control: agreeing on norm and loss, not part of the traffic
TOKEN_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a frame, and the purpose under which its bytes are counted."""

    purpose: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Frame = tuple[TensorSpec, ...]


class Departure:
    """When a frame was complete and could leave; on a GPU that is known once the work before it is done."""

    at = 0.0

    def now(self) -> None:
        self.at = time.perf_counter()


class StageEnd(Protocol):
    """One stage's end of its link to a neighbour."""

    counts: dict[str, int]  # bytes sent from this end, by purpose

    def expect(self, frames: Sequence[Frame], ahead: int) -> None:
        """Prepare to receive these frames, `ahead` of them at a time; at most `ahead` wait to be sent."""

    def send(self, frame: Mapping[str, Tensor]) -> "Departure":
        """Send one frame, its tensors by purpose, without waiting for its arrival."""
        ...

    def receive(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        """Wait for the next expected frame; RunError if the neighbour dies or stalls."""
        ...

    def ready(self) -> bool:
        """False if `receive` would wait for something that this very thread has to do first."""
        ...

    def close(self) -> None:
        """Close this end; the neighbour closes the other one."""


def say_goodbye(end: StageEnd, device: torch.device) -> None:
    """Exchange a last frame, so that the exit of one side cannot cut off what the other still reads."""
    end.expect([(TensorSpec("control", (1,), torch.uint8),)], 1)
    end.send({"control": torch.zeros(1, dtype=torch.uint8, device=device)})
    end.receive()


ALIGNED = 16  # bytes; enough for every kernel


def pack(frame: Mapping[str, Tensor], buffer: Tensor) -> None:
    at = 0
    for tensor in frame.values():
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        buffer[at : at + len(data)].copy_(data, non_blocking=data.is_cuda or buffer.is_cuda)
        at += len(data)


def unpack(buffer: Tensor, frame: Frame, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of a frame; views of the buffer if possible."""
    tensors, at = [], 0
    for spec in frame:
        data, there = buffer[at : at + spec.num_bytes], device
        if spec.dtype == torch.float64 and device.type in gpu.NO_DOUBLE:
            there = torch.device("cpu")  # where such frames are read
        if data.device != there or data.data_ptr() % ALIGNED:  # a copy is aligned
            data = data.to(there, copy=True, non_blocking=there.type == "cuda")
        tensors.append(data.view(spec.dtype).view(spec.shape))
        at += spec.num_bytes
    return tuple(tensors)


class HostCopies:
    """Copies a device's frames to host memory; for a GPU to pinned memory, on separate streams, so that the
    stage computes meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the host, from the host
        if device.type == "cuda":
            self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.streams is not None)

    def out(self, frame: Mapping[str, Tensor], buffer: Tensor) -> Callable[[], None] | None:
        """Start to copy a frame into the buffer. Return a function that waits for it; None if done."""
        if not self.streams:
            pack(frame, buffer)
            return None
        stream = self.streams[0]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            pack(frame, buffer)
        for tensor in frame.values():
            if tensor.is_cuda:
                tensor.record_stream(stream)  # the tensor may be freed while the stream still reads it
        copied = torch.cuda.Event(blocking=True)
        copied.record(stream)
        return copied.synchronize

    def into(self, buffer: Tensor, frame: Frame) -> tuple[Tensor, ...]:
        if not self.streams:
            return unpack(buffer, frame, self.device)
        stream, here = self.streams[1], torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream):
            tensors = unpack(buffer, frame, self.device)
        here.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(here)
        return tensors


@dataclass(frozen=True, slots=True)
class LinkPeers:
    """The two sides of a link, for messages about it."""

    replica: str
    stage: int
    neighbour: int
    address: str = ""  # the neighbour's, if known

    @property
    def them(self) -> str:
        return f"stage {self.neighbour} at {self.address}" if self.address else f"stage {self.neighbour}"

    def silent(self, seconds: float) -> str:
        return f"replica {self.replica}: stage {self.stage} heard nothing from {self.them} for {seconds:g} s"

    def stuck(self, seconds: float) -> str:
        return f"replica {self.replica}: {self.them} took nothing from stage {self.stage} for {seconds:g} s"

    def lost(self, why: str) -> str:
        return f"replica {self.replica}: stage {self.stage} lost its link to {self.them}: {why}"


class LocalEnd:
    """A StageEnd inside one process: frames wait in a queue and are counted as if they travelled."""

    def __init__(self, out: deque[tuple[Tensor, ...]], into: deque[tuple[Tensor, ...]]) -> None:
        self.out, self.into = out, into
        self.counts: dict[str, int] = dict.fromkeys(LINK_PURPOSES, 0)
        self.expected: deque[Frame] = deque()

    def expect(self, frames: Sequence[Frame], ahead: int) -> None:
        self.expected.extend(frames)

    def send(self, frame: Mapping[str, Tensor]) -> Departure:
        for purpose, tensor in frame.items():
            self.counts[purpose] += tensor.numel() * tensor.element_size()
        self.out.append(tuple(tensor.detach() for tensor in frame.values()))
        departure = Departure()
        departure.now()
        return departure

    def receive(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        tensors, frame = self.into.popleft(), self.expected.popleft()
        for tensor, spec in zip(tensors, frame, strict=True):
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise ValueError(
                    f"{spec.purpose} came as {tuple(tensor.shape)} {tensor.dtype}, not as {spec}"
                )
        return tensors

    def ready(self) -> bool:
        return bool(self.into)

    def close(self) -> None:
        self.out.clear()
        self.into.clear()


def local_pair() -> tuple[LocalEnd, LocalEnd]:
    """The two ends of a link inside one process: the earlier stage's, the later stage's."""
    forward: deque[tuple[Tensor, ...]] = deque()
    back: deque[tuple[Tensor, ...]] = deque()
    return LocalEnd(forward, back), LocalEnd(back, forward)
