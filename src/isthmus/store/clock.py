"""The store's clock: what all replicas share, whatever their own clocks say."""

import threading
import time
from collections.abc import Callable

from isthmus.store.retry import StoreError

CLOCK_SECONDS = 300.0  # a reading of the store's clock is good for so long


class StoreClock:
    """Read from the date of a small object that is written for it, and carried on by the monotonic clock:
    right to about a second."""

    def __init__(self, stamp: Callable[[str], tuple[float, float] | None]) -> None:
        """`stamp` writes an object under a key: (its date in Unix seconds, when it was written by the
        monotonic clock), or None where somebody has deleted it."""
        self.stamp = stamp
        self.offset: float | None = None
        self._read_at = 0.0
        self._lock = threading.Lock()

    def now(self, key: str) -> float:
        """Unix seconds. An unreachable store leaves the older reading in use."""
        asked = time.monotonic()
        with self._lock:
            offset, read_at = self.offset, self._read_at
        if offset is None or asked - read_at > CLOCK_SECONDS:
            try:
                found = self.stamp(key)
            except StoreError:
                if offset is None:
                    raise
                return time.monotonic() + offset
            if found is not None:
                date, written = found
                offset = date - (asked + written) / 2
                with self._lock:
                    self.offset, self._read_at = offset, written
        if offset is None:
            raise StoreError(f"{key} was deleted while its time was read", "absent")
        return time.monotonic() + offset

    def doubt(self) -> None:
        """The next `now` reads it again: a machine that slept has carried it on too slowly."""
        with self._lock:
            self._read_at = float("-inf")
