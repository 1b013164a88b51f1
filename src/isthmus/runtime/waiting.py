"""What a machine without running workers waits for: for closers, `status`, the page, `isthmus train`.

The note is a separate object next to the heartbeat, so it prolongs no wait for this replica. It names the
incarnation that has ended and is written at once: closers stop waiting for that one. The first heartbeat of
the next worker, which has another incarnation, ends it.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.errors import RunError
from isthmus.files import replace_file
from isthmus.printing import visible
from isthmus.protocol.heartbeat import MOST_MISSING, WAITING, Heartbeat
from isthmus.reading import read_note
from isthmus.runlog.facts import MAX_WORD
from isthmus.runtime.crashes import Crashes

NOTE = "waiting"  # the same text in the work folder
STARTING = "starting"  # prefix of the incarnation of `train --resume` for replicas that still start


class LinkNote:
    """What a stage without links waits for, from the worker to its launcher."""

    def __init__(self, work: Path, stage: int) -> None:
        self.path, self.said = work / f"links-{stage}", ""

    def wait(self, neighbour: int, why: str) -> None:
        if (text := f"{neighbour} {why}") != self.said:
            self.said = text
            with contextlib.suppress(OSError):
                replace_file(self.path, text, sync=False)

    def over(self) -> None:
        self.path.unlink(missing_ok=True)

    def read(self) -> tuple[int, str] | None:
        """(neighbour, why), or None if it waits for none."""
        number, _, why = (read_note(self.path) or "").partition(" ")
        return (int(number), why) if number.isdecimal() else None


class WaitingNotes(threading.Thread):
    """Repeats what is awaited until a worker writes its own incarnation. Any thread may call."""

    def __init__(
        self,
        work: Path,
        say: Callable[[Heartbeat], None] | None,
        every_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` writes the note to the bucket; None if another machine of the replica does."""
        super().__init__(daemon=True, name="waiting")
        self.work, self.say, self.every, self.clock = work, say, every_seconds, clock
        self.what, self.since, self.next_start = "", 0.0, 0.0
        self.missing: tuple[int, ...] = ()
        self.incarnation: str | None = None
        self.lock, self.news, self.told = threading.Lock(), threading.Event(), threading.Event()
        self.over()

    def wait_for(self, what: str, next_start_seconds: float = 0.0, missing: Sequence[int] = ()) -> None:
        """`missing`: the absent stages; those of this machine are present and wait."""
        self._begin(what, next_start_seconds, missing)
        self._write()

    def ended(self, what: str, missing: Sequence[int] = ()) -> None:
        """Report to the bucket at once that no worker runs, without a note for the terminal."""
        if (incarnation := self._incarnation()) and not incarnation.startswith(STARTING):
            self._begin(what, missing=missing)

    def _begin(self, what: str, next_start_seconds: float = 0.0, missing: Sequence[int] = ()) -> None:
        with self.lock:
            now, incarnation = self.clock(), self._incarnation()
            if not self.what or incarnation != self.incarnation:
                self.since, self.incarnation = now, incarnation
            self.what, self.missing = visible(what), tuple(missing[:MOST_MISSING])
            self.next_start = now + next_start_seconds
            self.told.clear()
        self.news.set()

    def over(self) -> None:
        with self.lock:
            self.what = ""
            self.told.set()
        (self.work / NOTE).unlink(missing_ok=True)

    def flush(self, timeout_seconds: float) -> None:
        """Before this process ends, give the bucket time to receive the last report."""
        if self.is_alive() and self.say is not None:
            self.told.wait(timeout_seconds)

    def text(self) -> str:
        seconds = self.next_start - self.clock()
        ending = f"; next start in {seconds:.0f} s" if seconds > 0 else ""
        return self.what[: MAX_WORD - len(ending)] + ending

    def run(self) -> None:
        while True:
            self.news.wait(self.every)
            self.news.clear()
            self.tell()
            if not self.news.is_set():
                self.told.set()

    def tell(self) -> None:
        """Report once more, unless the wait is over."""
        with self.lock:
            if not self.what:
                return
            heartbeat = Heartbeat(
                incarnation=self.incarnation or "",
                state=WAITING,
                awaiting=self.text(),
                waited_seconds=self.clock() - self.since,
                pid=os.getpid(),
                missing=self.missing,
                vitals=Crashes.read(self.work).vitals(self.work, None),
            )
        if self._incarnation() != heartbeat.incarnation:
            self.over()
            return
        if self.say is None:
            return
        with contextlib.suppress(RunError, OSError):  # the store itself may be down
            self.say(heartbeat)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            replace_file(self.work / NOTE, self.what, sync=False)

    def _incarnation(self) -> str:
        return read_note(self.work / "incarnation") or ""
