"""Results of checks, and link measurements. Standard library only."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Say = Callable[[str], None]  # progress, one line at a time
WRONG_CLOCK_SECONDS = 60.0  # a store refuses requests if the clock is some minutes off


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. A failed one says what to do."""

    name: str
    ok: bool
    words: str
    cure: str = ""
    warning: str = ""  # of a passed check: why its figure may be wrong
    facts: dict[str, Any] = field(default_factory=dict)


def passed(name: str, words: str, warning: str = "", **facts: Any) -> Check:
    return Check(name=name, ok=True, words=words, warning=warning, facts=facts)


def failed(name: str, words: str, cure: str, **facts: Any) -> Check:
    return Check(name=name, ok=False, words=words, cure=cure, facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    device: str  # "cuda:0"
    name: str
    total_bytes: int
    free_bytes: int
    available_bytes: int  # for training
    precision: str = "bf16"  # what inner.precision = "auto" means here


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """What a link carried each way."""

    up_mbps: float
    down_mbps: float
    round_trip_ms: float  # median
    both_ways_mbps: float | None = None  # each way, with both in use; None for a bucket
    control_wait_ms: float | None = None  # delay of a control frame behind bulk both ways

    @property
    def mbps(self) -> float:
        """The one rate of a recipe for both ways: the slowest, so that a plan does not promise too much."""
        return min(self.up_mbps, self.down_mbps, self.both_ways_mbps or self.up_mbps)

    @property
    def latency_ms(self) -> float:
        """One-way latency, as recipes count it."""
        return self.round_trip_ms / 2

    def describe(self) -> str:
        both = f"{_short(self.both_ways_mbps)} Mb/s each way at once, " if self.both_ways_mbps else ""
        return (
            f"{_short(self.up_mbps)} Mb/s up, {_short(self.down_mbps)} Mb/s down, {both}"
            f"{self.round_trip_ms:.3g} ms there and back"
        ) + (f", {self.control_wait_ms:.3g} ms more beside bulk" if self.control_wait_ms else "")

    def recipe_value(self) -> str:
        return f"{{ mbps = {float(f'{self.mbps:.4g}')}, latency_ms = {float(f'{self.latency_ms:.3g}')} }}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def mbps(num_bytes: float, seconds: float, waiting_seconds: float = 0.0) -> float:
    """Return the rate without `waiting_seconds` of round trips, which count for at most half the time."""
    return num_bytes * 8 / 1e6 / max(seconds - waiting_seconds, seconds / 2, 1e-9)


def ramp(
    move: Callable[[int], None],
    seconds: float,
    first: int,
    most: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """Move more and more bytes until one transfer takes at least half of `seconds`; return (bytes, seconds).

    The link's rate is unknown, so small transfers come first: a thin link is not busy for minutes.
    """
    num_bytes = first
    while True:
        began = clock()
        move(num_bytes)
        spent = max(clock() - began, 1e-9)
        if spent >= seconds / 2 or num_bytes >= most:
            return num_bytes, spent
        num_bytes = min(most, int(num_bytes * min(8.0, max(2.0, seconds / spent))))
