"""A scheduler takes the machine back: SIGTERM, some seconds, then SIGKILL.

With `join --grace` the launcher notes the deadline, and its workers use the time. They save immediately,
since the kill may come early. Then they train to the end of the round if time allows, and otherwise stop
between two inner steps. The launcher ends with a status that requests a restart, which continues where this
start stopped. Standard library only.
"""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.files import overwrite_own
from isthmus.reading import read_note

NOTE = "parting"  # the deadline by this machine's clock, from the launcher to its workers, in the work folder
AGAIN_STATUS = 75  # EX_TEMPFAIL of sysexits.h: not finished, start it again
LOOK_SECONDS = 0.25
MOST_GRACE_SECONDS = 86_400.0


class Parted(Exception):
    """This process has saved its state and stops inside a round. Not a fault, so not a RunError."""


class Parting:
    """The note of one work folder. Both sides are on one machine, so they use the same clock."""

    def __init__(
        self,
        work: Path | None = None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.clock, self.ticks = work and work / NOTE, clock, ticks
        self.by: float | None = None
        self.looked_at = float("-inf")
        self.saved = False  # whether it saved since the request

    # The launcher

    def begin(self, grace_seconds: float) -> None:
        """Start the countdown. Only the first call counts: Slurm sends SIGTERM several times."""
        if self.by is None and self.path is not None:
            self.by = self.clock() + grace_seconds
            overwrite_own(self.path, f"{self.by:.3f}")

    def is_over(self) -> bool:
        return self.by is not None and self.clock() >= self.by

    def stands(self) -> bool:
        """Whether it was begun and the run still goes on."""
        return self.by is not None and self.path is not None and self.path.exists()

    # The workers

    def asked(self, at_once: bool = False) -> bool:
        """Whether this process must go. Cheap after every inner step: it looks now and then, or `at_once`."""
        due = at_once or self.ticks() - self.looked_at >= LOOK_SECONDS
        if self.by is None and self.path is not None and due:
            self.looked_at = self.ticks()
            with suppress(OSError, ValueError, ConfigError):
                # A deadline out of any sensible range counts as passed.
                by = float(read_note(self.path) or "")
                self.by = by if 0 < by < self.clock() + MOST_GRACE_SECONDS else 0.0
        return self.by is not None

    def fits(self, seconds: float) -> bool:
        """Whether this many seconds of inner steps fit. Half the time is kept to deliver and save."""
        return self.by is not None and seconds <= (self.by - self.clock()) / 2

    def unneeded(self) -> None:
        """Remove the note: the run is finished, so there is no reason to come back."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def count_signals(interrupts: list[int]) -> None:
    """Record signals. SIGTERM counts once: Slurm sends it to every process, and a script may pass it on."""

    def count(number: int, frame: object) -> None:
        if number != signal.SIGTERM or signal.SIGTERM not in interrupts:
            interrupts.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, count)
