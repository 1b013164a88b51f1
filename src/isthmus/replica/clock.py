"""A process's compute time, measured around the work itself."""

import time
from types import TracebackType

import torch

from isthmus import gpu


class Clock:
    """`with clock:` adds the time of its block; on a GPU it uses events, so that the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda, self.device = device.type == "cuda", device
        self.seconds = self.started = self.lapped = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self.on_cuda:
            self.begin = torch.cuda.Event(enable_timing=True)
            self.begin.record()
        else:
            self.started = time.perf_counter()

    def __exit__(self, fault: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if not self.on_cuda:
            if self.device.type == "mps":
                gpu.wait_for(self.device)
            self.seconds += time.perf_counter() - self.started
        elif fault is None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.events.append((self.begin, end))

    def lap(self) -> float:
        """Seconds since the last call of this or of `pop`. On a GPU it waits for the last block."""
        if self.events:
            self.events[-1][1].synchronize()
            self.seconds += sum(begin.elapsed_time(end) for begin, end in self.events) / 1e3
            self.events.clear()
        seconds, self.lapped = self.seconds - self.lapped, self.seconds
        return seconds

    def pop(self) -> float:
        """Seconds since the last call."""
        self.lap()
        seconds, self.seconds, self.lapped = self.seconds, 0.0, 0.0
        return seconds
