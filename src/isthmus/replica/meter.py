"""Measure a process while it trains: compute seconds, bytes to its neighbours, peak memory."""

from collections.abc import Mapping

import torch

from isthmus.replica.base import Replica


class Meter:
    """This process's figures in a commit: see `facts` in docs/protocol.md."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        self.replica, self.device = replica, device
        self.round_trips: list[float] = []

    def step(self) -> None:
        """Record the slowest link's round trip after an inner step."""
        if self.replica.round_trip_seconds:
            self.round_trips.append(self.replica.round_trip_seconds)

    def pop(self, counts: Mapping[str, int]) -> tuple[float | None, dict[str, float]]:
        """The shortest round trip and this process's figures since the last call; `counts` are the replica's
        bytes since then."""
        figures = {
            "compute_seconds": round(self.replica.clock.pop(), 4),
            "forth_bytes": counts.get("activations", 0) + counts.get("tokens", 0),
            "back_bytes": counts.get("gradients", 0),
            "peak_bytes": peak_bytes(self.device),
        }
        if (outside := self.replica.pop_outside()) is not None:
            figures["outside_tokens"] = outside
        # A measured round trip is never too short: the stage may have been busy when the gradient came.
        round_trip = round(min(self.round_trips), 5) if self.round_trips else None
        self.round_trips = []
        return round_trip, figures


def peak_bytes(device: torch.device) -> int:
    """The peak memory of this process: tensors on its GPU, else resident memory; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not ru_maxrss: a process inherits its parent's maximum.
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        return 0
