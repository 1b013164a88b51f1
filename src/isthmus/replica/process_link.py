"""A link between processes by torch.distributed: gloo, or NCCL on GPUs.

It neither encrypts nor authenticates. Use it for stages on one machine, and for machines that trust their
network.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.replica.links import (
    LINK_PURPOSES,
    Departure,
    Frame,
    HostCopies,
    LinkPeers,
    pack,
    say_goodbye,
    unpack,
)


class ProcessLink:
    """A StageEnd between processes. gloo moves host memory, so a CUDA stage copies frames to pinned memory on
    separate streams, and a thread passes them to gloo: the stage computes meanwhile.

    Receives are posted ahead, so that the sender's bytes leave as soon as they exist; sends are asynchronous.
    Each direction has its own group, because one gloo group is half duplex for large frames.
    """

    def __init__(
        self, out: Any, into: Any, rank: int, peers: LinkPeers, device: torch.device, timeout_seconds: float
    ) -> None:
        """`out` and `into` are process groups of two; `rank` is the neighbour's in both."""
        self.out: Any = out
        self.into: Any = into
        self.rank, self.peers = rank, peers
        self.device, self.timeout_seconds = device, timeout_seconds
        self.on_device = out.name() == "nccl"
        self.counts: dict[str, int] = dict.fromkeys(LINK_PURPOSES, 0)
        self.sending: deque[tuple[Any, Tensor]] = deque()  # a gloo work, or its future
        self.copies = None if self.on_device else HostCopies(device)
        if self.copies and self.copies.streams:
            self.sender = ThreadPoolExecutor(1, "sender")
        self.posted: deque[tuple[Any, Tensor, Frame]] = deque()
        self.expected: deque[Frame] = deque()
        self.ahead, self.broken = 1, False
        self.store: Any = None  # stage 0's store serves stages that still join, so it stays open
        self.num_sent = self.num_posted = 0  # tags that match a frame to its receive

    def _buffer(self, num_bytes: int) -> Tensor:
        if self.copies:
            return self.copies.buffer(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

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
            work = self._post_send(frame, buffer, departure)
        self.sending.append((work, buffer))
        self.num_sent = (self.num_sent + 1) % 2**31
        for purpose, size in sizes.items():
            self.counts[purpose] += size
        return departure

    def _post_send(self, frame: Mapping[str, Tensor], buffer: Tensor, departure: Departure) -> Any:
        """Send a frame; return gloo's work, or its future."""
        out, rank, tag = self.out, self.rank, self.num_sent
        copied: Callable[[], None] | None = None
        if self.copies:
            copied = self.copies.out(frame, buffer)
        else:
            pack(frame, buffer)

        def send() -> Any:
            if copied:
                copied()
            departure.now()
            return out.send([buffer], rank, tag)

        return self.sender.submit(send) if copied else send()

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
        return self.copies.into(buffer, frame) if self.copies else unpack(buffer, frame, self.device)

    def _wait(self, work: Any, seconds: float, late: str) -> None:
        with self._faults(late):
            if self.on_device:  # here `wait` only orders streams
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
        """Close the link. Inside a step it is dropped instead, and the neighbour sees that it is closed."""
        with suppress(RunError):
            if not self.broken and not self.posted:
                say_goodbye(self, self.device)
                while self.sending:
                    self._settle(self.timeout_seconds)
        self.sending.clear()
        self.posted.clear()
        if self.copies and self.copies.streams:
            self.sender.shutdown(wait=False)
        self.out = self.into = None
