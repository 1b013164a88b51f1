"""The store's clock, which all replicas share whatever their own clocks say."""

import threading
import time
from collections.abc import Callable

from isthmus.store.retry import StoreError

CLOCK_SECONDS = 300.0  # after which the store's clock is read again


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
