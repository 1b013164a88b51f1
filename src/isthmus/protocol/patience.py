"""Wait out a fault of the store in place while a run goes on.

A worker holds the model, the optimiser and a saved update. A full or read-only bucket, or expired rights,
would end it, and its next start would restore all of that to meet the same fault again. So all store requests
of a round go through a `Patience`. It logs one line when the wait begins and one when it ends, and the
heartbeat says what it waits for.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from isthmus.printing import visible
from isthmus.runlog.facts import MAX_WORD
from isthmus.store import StoreError

PAUSE_SECONDS = (1.0, 30.0)  # between two tries, growing
SLICE_SECONDS = 1.0  # how often a wait checks whether it should end

T = TypeVar("T")


class LeftWaiting(Exception):
    """The replica was asked to leave while it waited. Not a fault, so not a RunError."""


class Leave(Protocol):
    def asked(self) -> int:
        """0, or what somebody has asked us to do; of two wishes the smaller counts. May query the bucket."""
        ...

    def here(self) -> bool:
        """Whether this machine knows of such a request. Makes no call to the store."""
        ...


class Patience:
    """Repeats one process's calls to the store until they succeed; only the training thread calls it.

    `say` reports what it waits for, and "" once that is over.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        say: Callable[[str], None] = lambda text: None,
        leave: Leave | None = None,
        parting: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.log, self.say, self.leave, self.parting = log, say, leave, parting
        self.clock, self.sleep = clock, sleep
        self.awaiting = ""  # what the heartbeat says; empty if all is well
        self.since, self.pause = 0.0, PAUSE_SECONDS[0]

    def __call__(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which must be safe to repeat."""
        while True:
            try:
                result = work()
            except StoreError as error:
                self.hold(error)
            else:
                self.passed()
                return result

    @property
    def waited_seconds(self) -> float | None:
        return self.clock() - self.since if self.awaiting else None

    def hold(self, error: StoreError) -> None:
        """Wait after a fault, a little longer each time. Raise a lasting one."""
        if error.lasting:
            raise error
        if not self.awaiting:
            self.log(f"{error}; waiting for that to pass")
            self.since, self.pause = self.clock(), PAUSE_SECONDS[0]
        if self.awaiting != (brief := visible(error.brief)[:MAX_WORD]):
            self.awaiting = brief
            self.say(self.awaiting)
        with suppress(StoreError):
            self._look_for_leave(ask_bucket=True)
        until = self.clock() + self.pause
        while (left := until - self.clock()) > 0:
            self.sleep(min(left, SLICE_SECONDS))
            self._look_for_leave()
        self.pause = min(PAUSE_SECONDS[1], 2 * self.pause)

    def rest(self, seconds: float) -> None:
        """Wait where leaving loses nothing, since everything is on disk. `parting` ends it."""
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            self.sleep(min(left, SLICE_SECONDS))
            if self.parting():
                raise LeftWaiting("left while it waited for the others")

    def passed(self) -> None:
        if self.awaiting:
            seconds, self.awaiting = self.clock() - self.since, ""
            self.log(f"the bucket can be used again, after {seconds:.0f} s")
            self.say(self.awaiting)

    def _look_for_leave(self, ask_bucket: bool = False) -> None:
        if self.leave and (self.leave.asked() if ask_bucket else self.leave.here()):
            raise LeftWaiting(f"left while it waited: {self.awaiting}")
