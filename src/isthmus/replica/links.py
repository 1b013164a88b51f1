"""Links between stages, in one process or between two: frames of known size, one group per direction.

A link carries frames: a few tensors whose shapes both sides know, laid end to end as bytes. Frames have no
header, and nothing that arrives is unpickled. Any other transport that keeps the promises of `StageEnd` would
do in place of gloo.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.layout.traffic import STAGE_PURPOSES

LINK_PURPOSES = (*STAGE_PURPOSES, "control")  # control: agreeing on norm and loss, not part of the traffic
TOKEN_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a frame, and what its bytes are counted as."""

    purpose: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Frame = tuple[TensorSpec, ...]


class Departure:
    """When a frame was whole and could leave; on a GPU that is known when the work before it is done."""

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
        """Wait for the next expected frame; RunError when the neighbour dies or stalls."""
        ...

    def ready(self) -> bool:
        """False where `receive` would wait for something that this very thread has to do first."""
        ...

    def close(self) -> None:
        """Close this end; the neighbour closes the other one."""


def pack(frame: Mapping[str, Tensor], buffer: Tensor) -> None:
    at = 0
    for tensor in frame.values():
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        buffer[at : at + len(data)].copy_(data, non_blocking=True)
        at += len(data)


def unpack(buffer: Tensor, frame: Frame, device: torch.device) -> tuple[Tensor, ...]:
    tensors, at = [], 0
    for spec in frame:
        # A copy of its own is aligned.
        data = buffer[at : at + spec.num_bytes].to(device, copy=True, non_blocking=True)
        tensors.append(data.view(spec.dtype).view(spec.shape))
        at += spec.num_bytes
    return tuple(tensors)


@dataclass(frozen=True, slots=True)
class LinkPeers:
    """The two sides of a link, for messages about it."""

    replica: str
    stage: int
    neighbour: int
    address: str  # the neighbour's

    @property
    def them(self) -> str:
        return f"stage {self.neighbour} at {self.address}"

    def silent(self, seconds: float) -> str:
        return f"replica {self.replica}: stage {self.stage} heard nothing from {self.them} for {seconds:g} s"

    def stuck(self, seconds: float) -> str:
        return f"replica {self.replica}: {self.them} took nothing from stage {self.stage} for {seconds:g} s"

    def lost(self, why: str) -> str:
        return f"replica {self.replica}: stage {self.stage} lost its link to {self.them}: {why}"


class ProcessLink:
    """A StageEnd between processes. gloo moves host memory: frames of a CUDA stage go through pinned memory,
    by copies on streams of their own, and a thread hands them to gloo: the stage computes meanwhile.

    Receives are posted ahead, so that the sender's bytes leave as soon as they exist; sends are asynchronous.
    The two directions have groups of their own, because one gloo group is half duplex for large frames.
    """

    def __init__(
        self, out: Any, into: Any, rank: int, peers: LinkPeers, device: torch.device, timeout_seconds: float
    ) -> None:
        """out and into are process groups of two; `rank` is the neighbour's in both."""
        self.out: Any = out
        self.into: Any = into
        self.rank, self.peers = rank, peers
        self.device, self.timeout_seconds = device, timeout_seconds
        self.on_device = out.name() == "nccl"
        self.counts: dict[str, int] = dict.fromkeys(LINK_PURPOSES, 0)
        self.sending: deque[tuple[Any, Tensor]] = deque()  # a gloo work, or the future of one
        self.copies: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the host, from the host
        if device.type == "cuda" and not self.on_device:
            self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.sender = ThreadPoolExecutor(1, "sender")
        self.posted: deque[tuple[Any, Tensor, Frame]] = deque()
        self.expected: deque[Frame] = deque()
        self.ahead, self.broken = 1, False
        self.store: Any = None  # stage 0's store serves stages that still join, so it stays open
        self.num_sent = self.num_posted = 0  # the tags, which match a frame to its receive

    def _buffer(self, num_bytes: int) -> Tensor:
        if self.on_device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def expect(self, frames: Sequence[Frame], ahead: int) -> None:
        self.expected.extend(frames)
        self.ahead = max(1, ahead)
        self._post()

    def _post(self) -> None:
        while self.expected and len(self.posted) < self.ahead:
            frame = self.expected.popleft()
            buffer = self._buffer(sum(spec.num_bytes for spec in frame))
            with self._faults():
                self.posted.append((self.into.recv([buffer], self.rank, self.num_posted), buffer, frame))
            self.num_posted = (self.num_posted + 1) % 2**31

    def send(self, frame: Mapping[str, Tensor]) -> Departure:
        while len(self.sending) >= self.ahead:
            self._settle(self.timeout_seconds)
        sizes = {purpose: tensor.numel() * tensor.element_size() for purpose, tensor in frame.items()}
        buffer, departure = self._buffer(sum(sizes.values())), Departure()
        with self._faults():
            if self.copies:
                work: Any = self._send_when_copied(frame, buffer, departure)
            else:
                pack(frame, buffer)
                departure.now()
                work = self.out.send([buffer], self.rank, self.num_sent)
        self.sending.append((work, buffer))
        self.num_sent = (self.num_sent + 1) % 2**31
        for purpose, size in sizes.items():
            self.counts[purpose] += size
        return departure

    def _send_when_copied(
        self, frame: Mapping[str, Tensor], buffer: Tensor, departure: Departure
    ) -> "Future[Any]":
        assert self.copies
        stream, out, rank, tag = self.copies[0], self.out, self.rank, self.num_sent
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            pack(frame, buffer)
        for tensor in frame.values():
            if tensor.is_cuda:
                tensor.record_stream(stream)  # it may be freed here, and is still being read there
        copied = torch.cuda.Event(blocking=True)
        copied.record(stream)

        def send() -> Any:
            copied.synchronize()
            departure.now()
            return out.send([buffer], rank, tag)

        return self.sender.submit(send)

    def _settle(self, timeout_seconds: float) -> None:
        work, late = self.sending[0][0], self.peers.stuck(timeout_seconds)
        if isinstance(work, Future):
            with self._faults(late):
                try:
                    work = work.result(timeout_seconds)
                except TimeoutError:
                    raise RunError(late) from None
        self._wait(work, timeout_seconds, late)
        self.sending.popleft()

    def receive(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        work, buffer, frame = self.posted[0]
        timeout_seconds = timeout_seconds or self.timeout_seconds
        self._wait(work, timeout_seconds, self.peers.silent(timeout_seconds))
        self.posted.popleft()
        self._post()
        if not self.copies:
            return unpack(buffer, frame, self.device)
        stream, here = self.copies[1], torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream):
            tensors = unpack(buffer, frame, self.device)
        here.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(here)
        return tensors

    def _wait(self, work: Any, seconds: float, late: str) -> None:
        with self._faults(late):
            if self.on_device:  # where `wait` only orders streams
                deadline = time.monotonic() + seconds
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RunError(late)
                    time.sleep(1e-4)
            work.wait(timedelta(seconds=seconds))

    @contextmanager
    def _faults(self, late: str = "") -> Iterator[None]:
        """Turn an error of torch.distributed into one line that names the link."""
        try:
            yield
        except RunError:
            self.broken = True
            raise
        except RuntimeError as error:
            self.broken = True
            text = str(error)
            if late and "imed out" in text:
                raise RunError(late) from None
            closed = any(word in text for word in ("by peer", "Broken pipe", "ocket closed"))
            why = "the connection was closed" if closed else text.splitlines()[0]
            raise RunError(self.peers.lost(why)) from None

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        """Exchange a last frame, so that the exit of one side cannot cut off what the other still reads.

        A link that is closed in the middle of a step is dropped: the neighbour sees the connection close.
        """
        with suppress(RunError):
            if not self.broken and not self.posted:
                self.expect([(TensorSpec("control", (1,), torch.uint8),)], 1)
                self.send({"control": torch.zeros(1, dtype=torch.uint8, device=self.device)})
                self.receive()
                while self.sending:
                    self._settle(self.timeout_seconds)
        self.sending.clear()
        self.posted.clear()
        if self.copies:
            self.sender.shutdown(wait=False)
        self.out = self.into = None


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
