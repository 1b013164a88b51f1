"""A measured training rate, and its reliability."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FEWEST_STEPS = 5  # enough for a meaningful median
BUSY_SHARE = 0.25  # if other programs used more of the wanted cores, the rate is not the machine's
WIDE = 2.0  # slowest over fastest step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRate:
    """One device's training rate in one precision, and how it was measured."""

    device: str  # "cpu", "cuda:0"
    precision: str
    preset: str
    sequences: int
    steps: int  # timed steps
    step_seconds: float  # their median
    fastest_seconds: float
    slowest_seconds: float
    tflops: float  # 6 N per token
    tokens_per_second: float
    threads: int = 1  # of the CPU
    others_cores: float | None = None  # cores that other programs used meanwhile
    host_cores: int = 1

    @property
    def busy(self) -> bool:
        """Return whether other programs took cores that the CPU's threads needed. A GPU needs one."""
        if self.others_cores is None:
            return False
        return self.others_cores > self.host_cores - self.threads + BUSY_SHARE * self.threads

    @property
    def sample(self) -> str:
        """Return `12 inner steps, 0.031 to 0.044 s each; others used 0.1 of 2 cores`."""
        times = f"{self.fastest_seconds:.3g} to {self.slowest_seconds:.3g} s each"
        words = f"{self.steps} inner step{'s' * (self.steps > 1)}, {times}"
        if self.others_cores is not None:
            words += f"; others used {self.others_cores:.1f} of {self.host_cores} cores"
        return words

    @property
    def warning(self) -> str:
        """Say why the machine may be faster than this, or nothing."""
        if self.busy:
            return "the machine is busy: the rate may be too low; measure again when it is idle"
        if self.steps < FEWEST_STEPS:
            found = f"only {self.steps} step{'s' * (self.steps > 1)} fitted into the time"
        elif self.slowest_seconds > WIDE * self.fastest_seconds:
            found = f"the slowest step took {self.slowest_seconds / self.fastest_seconds:.1f} x the fastest"
        else:
            return ""
        return f"{found}: the rate may be too low; measure again with --seconds 20 or a smaller --preset"


def usable_cores(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may use, by affinity and a container's quota: at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max": no quota
        quota, period = (groups / "cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


class Cores:
    """Measures how many cores other programs use between two readings. Known only on Linux."""

    def __init__(self) -> None:
        self.host_cores = os.cpu_count() or 1
        self.began = self._look()

    def others(self) -> float | None:
        """Return the average since this object was made."""
        now = self._look()
        if self.began is None or now is None or now[0] <= self.began[0]:
            return None
        wall, busy, own = (b - a for a, b in zip(self.began, now, strict=True))
        return max(0.0, (busy - own) / wall)

    def _look(self) -> tuple[float, float, float] | None:
        """Return (clock seconds, core-seconds of all programs, core-seconds of this one)."""
        with suppress(OSError, ValueError, IndexError, AttributeError):
            with open("/proc/stat", encoding="ascii") as file:
                ticks = [int(n) for n in file.readline().split()[1:9]]
            used = sum(ticks) - ticks[3] - ticks[4]  # without idle and disk-wait time
            return time.perf_counter(), used / os.sysconf("SC_CLK_TCK"), time.process_time()
        return None
