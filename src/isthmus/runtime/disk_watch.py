"""Watch the disk of `isthmus train`, so that a fleet that can no longer write does not retry for ever."""

import time
from collections.abc import Callable
from pathlib import Path

from isthmus.disk import DiskFull, shortage

LASTING_SECONDS = 20.0  # after which a full disk counts as lasting


class DiskWatch:
    """Checks now and then whether the next round's updates still fit."""

    def __init__(self, folder: Path, needed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.needed, self.clock = folder, needed, clock
        self.since: float | None = None  # when the disk was first too full

    def look(self) -> str:
        """Return a line when the disk has just become too full; raise DiskFull if it stays so."""
        words = shortage(self.folder, self.needed, "the next round")
        if not words:
            self.since = None
            return ""
        if self.since is None:
            self.since = self.clock()
            return words
        if self.clock() - self.since >= LASTING_SECONDS:
            raise DiskFull(words)
        return ""
