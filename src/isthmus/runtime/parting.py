"""A scheduler takes the machine back: SIGTERM, some seconds, then SIGKILL.

With `join --grace` the launcher notes by when all must be over, and its workers use the time. They save where
they are at once, since the kill may come sooner than announced. Then they go on to the end of the round if it
comes in time, and stop between two inner steps if not. The launcher ends with a status that asks to be
started again; that start goes on where this one stopped. Standard library only.
"""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.files import overwrite_own
from isthmus.reading import read_note

NOTE = "parting"  # in the work folder, from the launcher to its workers: by when, on this machine's clock
AGAIN_STATUS = 75  # EX_TEMPFAIL of sysexits.h: not finished, start it again
LOOK_SECONDS = 0.25
MOST_GRACE_SECONDS = 86_400.0


class Parted(Exception):
    """This process has saved where it is, and stops in the middle of a round. No fault, so no RunError."""


class Parting:
    """The note of one work folder. Both sides look at the same clock: they are on one machine."""

    def __init__(
        self,
        work: Path | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.clock, self.ticks = work and work / NOTE, clock, ticks
        self.by: float | None = None
        self.looked_at = float("-inf")
        self.saved = False  # since it was asked

    # The launcher

    def begin(self, grace_seconds: float) -> None:
        """The time begins to run. Once: Slurm sends SIGTERM more often than that."""
        if self.by is None and self.path is not None:
            self.by = self.clock() + grace_seconds
            overwrite_own(self.path, f"{self.by:.3f}")

    def is_over(self) -> bool:
        return self.by is not None and self.clock() >= self.by

    def stands(self) -> bool:
        """Was it begun, and is there still something to come back for?"""
        return self.by is not None and self.path is not None and self.path.exists()

    # The workers

    def asked(self, at_once: bool = False) -> bool:
        """Must this process go? It may be called after every inner step: it looks now and then, or now."""
        due = at_once or self.ticks() - self.looked_at >= LOOK_SECONDS
        if self.by is None and self.path is not None and due:
            self.looked_at = self.ticks()
            with suppress(OSError, ValueError, ConfigError):
                # A deadline that nobody could mean is one that has come.
                by = float(read_note(self.path) or "")
                self.by = by if 0 < by < self.clock() + MOST_GRACE_SECONDS else 0.0
        return self.by is not None

    def fits(self, seconds: float) -> bool:
        """Is there time for so many seconds of inner steps? Half of it is kept to deliver and to save."""
        return self.by is not None and seconds <= (self.by - self.clock()) / 2

    def unneeded(self) -> None:
        """The run is finished: there is nothing to come back for."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def count_signals(interrupts: list[int]) -> None:
    """Slurm sends SIGTERM to every process of a job, and a script may pass it on: it counts once."""

    def count(number: int, frame: object) -> None:
        if number != signal.SIGTERM or signal.SIGTERM not in interrupts:
            interrupts.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, count)
