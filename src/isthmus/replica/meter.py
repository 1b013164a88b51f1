"""What a process finds out about itself while it trains: compute seconds, bytes on each link, its peak."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isthmus.replica.base import Replica
from isthmus.replica.pipelined import PipelinedReplica

# What a stage computes in an inner step; all else is waiting, or a link.
STAGE_WORK = ("forward", "backward", "backward_input", "backward_weight", "squared_norm", "step")


class Stopwatch:
    """Adds up how long some methods of an object take; on a GPU by events, so that the host waits for
    nothing."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.seconds = 0.0
        self.events: list[tuple[Any, Any]] = []

    def watch(self, owner: Any, names: Sequence[str]) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def on_host(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        def on_cuda(*args: Any, **kwargs: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = method(*args, **kwargs)
            end.record()
            self.events.append((begin, end))
            return result

        return on_cuda if self.on_cuda else on_host

    def take(self) -> float:
        """Seconds since the last call."""
        if self.events:
            torch.cuda.synchronize()
            self.seconds += sum(begin.elapsed_time(end) for begin, end in self.events) / 1e3
            self.events.clear()
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Meter:
    """The figures of this process that a commit tells: see `facts` in docs/protocol.md."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        self.replica, self.device = replica, device
        self.clock = Stopwatch(device)
        self.stages = replica.stages if isinstance(replica, PipelinedReplica) else ()
        for stage in self.stages:
            self.clock.watch(stage, STAGE_WORK)
        if not self.stages:
            self.clock.watch(replica, ("inner_step",))
        self.sent = (0, 0)
        self.trips: list[float] = []

    def step(self) -> None:
        """After every inner step: the slowest link's time there and back, as the stages agreed on it."""
        if self.stages and (trip := self.replica.seconds.get("there_and_back")):
            self.trips.append(trip)

    def take(self) -> tuple[float | None, dict[str, float]]:
        """Since the last call: the shortest time there and back, and this process's figures."""
        ends = self.replica.links[0] if self.stages else (None, None)
        # Forth on the link to the stage after, back on the one to the stage before; agreeing on the norm
        # ("control") is not counted.
        back, forth = (sum(end.counts.values()) - end.counts["control"] if end else 0 for end in ends)
        figures = {
            "compute_seconds": round(self.clock.take(), 4),
            "forth_bytes": forth - self.sent[0],
            "back_bytes": back - self.sent[1],
            "peak_bytes": peak_bytes(self.device),
        }
        self.sent = (forth, back)
        # A measured round trip is never too short: the stage may have been busy when the gradient came.
        trip = round(min(self.trips), 5) if self.trips else None
        self.trips = []
        return trip, figures


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held, in tensors on its GPU, else resident; 0: not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not ru_maxrss: a process starts with the maximum of whoever started it.
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        return 0
