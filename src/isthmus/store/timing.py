"""What a store's answers tell about time: its clock, its outages, and how fast it is."""

import math
import threading
import time
from collections.abc import Callable

from isthmus.store.retry import Fault, StoreError

CLOCK_SECONDS = 300.0  # after which the store's clock is read again
AWAY_SECONDS = 2.0  # a shorter outage delays no heartbeat that counts
# A small request without an answer for this long means that the store is down, rather than slow.
HUNG_SECONDS = 10.0
FLOOR_BYTES_PER_SECOND = 0.25e6 / 8  # the slowest link that we still wait for


class StoreClock:
    """Reads the date of a small object written for this purpose, then extrapolates with the monotonic clock:
    accurate to about a second."""

    def __init__(
        self,
        stamp: Callable[[str], tuple[float, float] | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stamp` writes an object under a key and returns (its date in Unix seconds, when it was written by
        `clock`), or None if somebody has deleted it."""
        self.stamp, self.clock = stamp, clock
        self.offset: float | None = None
        self._read_at = 0.0
        self._lock = threading.Lock()

    def now(self, key: str) -> float:
        """Unix seconds. If the store is unreachable, it uses the older reading."""
        asked = self.clock()
        with self._lock:
            offset, read_at = self.offset, self._read_at
        if offset is None or asked - read_at > CLOCK_SECONDS:
            try:
                found = self.stamp(key)
            except StoreError:
                if offset is None:
                    raise
                return self.clock() + offset
            if found is not None:
                date, written = found
                offset = date - (asked + written) / 2
                with self._lock:
                    self.offset, self._read_at = offset, written
        if offset is None:
            raise StoreError(f"{key} was deleted while its time was read", "absent")
        return self.clock() + offset

    def doubt(self) -> None:
        """Make the next `now` read the store's clock again: a machine that slept has fallen behind."""
        with self._lock:
            self._read_at = float("-inf")


class Absence:
    """Tracks when the store last came back after an outage, in which every request failed for a while.

    It also tracks how long an answer takes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._since = math.inf  # the start of the first request that failed after the last answer
        self._answered = self._returned = -math.inf
        self.answer_seconds = 0.0
        self._lock = threading.Lock()

    def failed(self, began: float, fault: Fault) -> None:
        """Record the failure of a request that began then. Only a passing fault suggests an outage."""
        if not fault.retry or fault.kind == "exists":
            self.answered(began)
            return
        with self._lock:
            self._since = min(began, self._since)

    def answered(self, began: float) -> None:
        with self._lock:
            now = self.clock()
            if now - began > HUNG_SECONDS and self._answered <= began:
                self._since = min(began, self._since)
            if now - self._since > AWAY_SECONDS:
                self._returned = now
            self._answered, self._since = now, math.inf
            self.answer_seconds += 0.2 * (now - began - self.answer_seconds)

    @property
    def seconds_since_return(self) -> float:
        return self.clock() - self._returned


class Rate:
    """The recent transfer rate in one direction, and so how long a request of a given size may take."""

    def __init__(self, least_seconds: float = 10.0) -> None:
        self.least_seconds = least_seconds
        self.bytes_per_second: float | None = None
        self._lock = threading.Lock()

    def limit(self, num_bytes: int) -> float:
        """Seconds that a transfer may take: below a fifth of the measured rate something is wrong."""
        slow = max(FLOOR_BYTES_PER_SECOND, 0.2 * (self.bytes_per_second or 0.0))
        return max(self.least_seconds, num_bytes / slow)

    def saw(self, num_bytes: int, seconds: float) -> None:
        if num_bytes < 1 << 16:  # shows latency, not rate
            return
        rate = num_bytes / max(seconds, 1e-6)
        with self._lock:
            before = rate if self.bytes_per_second is None else self.bytes_per_second
            self.bytes_per_second = 0.7 * before + 0.3 * rate

    def too_slow(self) -> None:
        """Halve the estimate after a time-out, so that the next try gets longer."""
        with self._lock:
            if self.bytes_per_second is not None:
                self.bytes_per_second /= 2
