"""`isthmus train` looks after its disk: a fleet that cannot write any more is not left to try for ever."""

import time
from collections.abc import Callable
from pathlib import Path

from isthmus.disk import DiskFull, shortage

LASTING_SECONDS = 20.0  # after which a lack of room is taken for lasting


class DiskWatch:
    """Looks now and then whether the next round's updates still fit."""

    def __init__(self, folder: Path, needed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.needed, self.clock = folder, needed, clock
        self.since: float | None = None  # when it was first found short

    def look(self) -> str:
        """A line when the disk has just become too full to go on; DiskFull when it stays so."""
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
