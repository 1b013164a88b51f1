"""StageLink between processes, on torch.distributed: frames of known size, one group per direction.

A link carries frames: a few tensors whose shapes both sides know, laid end to end as bytes. Nothing on the
wire says what it is, and nothing that arrives is unpickled. Whatever keeps the promises of `StageEnd` can
take the place of gloo here.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.errors import RunError

STAGE_PURPOSES = ("activations", "gradients", "tokens", "control")
TOKEN_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a frame, and what its bytes are counted as."""

    purpose: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Layout = tuple[Part, ...]


class StageEnd(Protocol):
    """One stage's end of its link to a neighbour."""

    counts: dict[str, int]  # bytes sent from this end, by purpose

    def expect(self, frames: Sequence[Layout], ahead: int) -> None:
        """Make ready for these frames, `ahead` of them at a time; at most `ahead` of ours wait to be sent."""

    def send(self, frame: Mapping[str, Tensor]) -> None:
        """Hand over one frame, purpose by purpose, and go on at once."""

    def take(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        """The next frame expected, when it is here; RunError when the neighbour dies or stalls."""

    def ready(self) -> bool:
        """False where `take` would wait for something that this very thread has to do first."""

    def close(self) -> None:
        """Part from a neighbour that closes too."""


def pack(frame: Mapping[str, Tensor], buffer: Tensor) -> None:
    at = 0
    for tensor in frame.values():
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        buffer[at : at + len(data)].copy_(data, non_blocking=True)
        at += len(data)


def unpack(buffer: Tensor, layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
    parts, at = [], 0
    for part in layout:
        data = buffer[at : at + part.num_bytes].to(device, copy=True)  # a copy of its own is aligned
        parts.append(data.view(part.dtype).view(part.shape))
        at += part.num_bytes
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Between:
    """Who is on the two sides of a link: what an error has to say."""

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
    """A StageEnd between processes. gloo moves host memory: frames of a CUDA stage go through pinned memory.

    Receives are posted ahead, so that the sender's bytes leave as soon as they exist; sends are asynchronous.
    The two directions have groups of their own, because one gloo group is half duplex for large frames.
    """

    def __init__(
        self, out: Any, into: Any, peer: int, between: Between, device: torch.device, timeout_seconds: float
    ) -> None:
        """out and into are process groups of two; `peer` is the neighbour's rank in both."""
        self.out, self.into, self.peer, self.between = out, into, peer, between
        self.device, self.timeout_seconds = device, timeout_seconds
        self.on_device = out.name() == "nccl"
        self.counts = dict.fromkeys(STAGE_PURPOSES, 0)
        self.sending: deque[tuple[Any, Tensor]] = deque()
        self.posted: deque[tuple[Any, Tensor, Layout]] = deque()
        self.expected: deque[Layout] = deque()
        self.ahead, self.broken = 1, False
        self.store: dist.Store | None = None  # stage 0's serves those that still join, so it stays open
        self.num_sent = self.num_posted = 0  # the tags: a frame can meet no other receive than its own

    def _buffer(self, num_bytes: int) -> Tensor:
        if self.on_device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def expect(self, frames: Sequence[Layout], ahead: int) -> None:
        self.expected.extend(frames)
        self.ahead = max(1, ahead)
        self._post()

    def _post(self) -> None:
        while self.expected and len(self.posted) < self.ahead:
            layout = self.expected.popleft()
            buffer = self._buffer(sum(part.num_bytes for part in layout))
            with self._faults():
                self.posted.append((self.into.recv([buffer], self.peer, self.num_posted), buffer, layout))
            self.num_posted = (self.num_posted + 1) % 2**31

    def send(self, frame: Mapping[str, Tensor]) -> None:
        while len(self.sending) >= self.ahead:
            self._settle(self.timeout_seconds)
        sizes = {purpose: tensor.numel() * tensor.element_size() for purpose, tensor in frame.items()}
        buffer = self._buffer(sum(sizes.values()))
        pack(frame, buffer)
        if self.device.type == "cuda" and not self.on_device:
            torch.cuda.current_stream(self.device).synchronize()  # gloo reads the host's copy
        with self._faults():
            self.sending.append((self.out.send([buffer], self.peer, self.num_sent), buffer))
        self.num_sent = (self.num_sent + 1) % 2**31
        for purpose, size in sizes.items():
            self.counts[purpose] += size

    def _settle(self, timeout_seconds: float) -> None:
        self._wait(self.sending[0][0], timeout_seconds, self.between.stuck(timeout_seconds))
        self.sending.popleft()

    def take(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        work, buffer, layout = self.posted[0]
        timeout_seconds = timeout_seconds or self.timeout_seconds
        self._wait(work, timeout_seconds, self.between.silent(timeout_seconds))
        self.posted.popleft()
        self._post()
        return unpack(buffer, layout, self.device)

    def _wait(self, work: Any, seconds: float, late: str) -> None:
        with self._faults(late):
            if self.on_device:  # there `wait` only orders streams
                deadline = time.monotonic() + seconds
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RunError(late)
                    time.sleep(1e-4)
            work.wait(timedelta(seconds=seconds))

    @contextmanager
    def _faults(self, late: str = "") -> Iterator[None]:
        """Turn what torch.distributed raises into one line that names the link."""
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
            raise RunError(self.between.lost(why)) from None

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        """Both sides say goodbye and hear it, so that neither's exit cuts off what the other still reads.

        A link given up in the middle of a step is dropped: the neighbour sees the connection close.
        """
        with suppress(RunError):
            if not self.broken and not self.posted:
                self.expect([(Part("control", (1,), torch.uint8),)], 1)
                self.send({"control": torch.zeros(1, dtype=torch.uint8, device=self.device)})
                self.take()
                while self.sending:
                    self._settle(self.timeout_seconds)
        self.sending.clear()
        self.posted.clear()
        self.out = self.into = None


class LocalEnd:
    """A StageEnd inside one process: frames wait in a queue, and are counted as if they travelled."""

    def __init__(self, out: deque, into: deque) -> None:
        self.out, self.into = out, into
        self.counts = dict.fromkeys(STAGE_PURPOSES, 0)
        self.expected: deque[Layout] = deque()

    def expect(self, frames: Sequence[Layout], ahead: int) -> None:
        self.expected.extend(frames)

    def send(self, frame: Mapping[str, Tensor]) -> None:
        for purpose, tensor in frame.items():
            self.counts[purpose] += tensor.numel() * tensor.element_size()
        self.out.append(tuple(tensor.detach() for tensor in frame.values()))

    def take(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        frame, layout = self.into.popleft(), self.expected.popleft()
        for tensor, part in zip(frame, layout, strict=True):
            if tuple(tensor.shape) != part.shape or tensor.dtype != part.dtype:
                raise ValueError(
                    f"{part.purpose} came as {tuple(tensor.shape)} {tensor.dtype}, not as {part}"
                )
        return frame

    def ready(self) -> bool:
        return bool(self.into)

    def close(self) -> None:
        self.out.clear()
        self.into.clear()


def local_pair() -> tuple[LocalEnd, LocalEnd]:
    """The two ends of a link inside one process: the earlier stage's, the later stage's."""
    down, up = deque(), deque()
    return LocalEnd(down, up), LocalEnd(up, down)
