"""What a machine waits for while none of its workers runs: for closers, `status`, the page, `isthmus train`.

It lies in the bucket beside the heartbeat and not in its place: nobody waits longer for a replica that waits
itself. It names the incarnation that has ended, and is there at once: closers stop waiting for that one. The
first heartbeat of the next worker, which has another incarnation, ends it.
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
STARTING = "starting"  # begins the incarnation under which `train --resume` speaks for who is not up yet


class WaitingNotes(threading.Thread):
    """Repeats what is waited for, until a worker says its own incarnation. Any thread may call."""

    def __init__(
        self,
        work: Path,
        say: Callable[[Heartbeat], None] | None,
        every_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` puts it into the bucket; None where another machine of the replica does."""
        super().__init__(daemon=True, name="waiting")
        self.work, self.say, self.every, self.clock = work, say, every_seconds, clock
        self.what, self.since, self.next_start = "", 0.0, 0.0
        self.missing: tuple[int, ...] = ()
        self.incarnation: str | None = None
        self.lock, self.news, self.told = threading.Lock(), threading.Event(), threading.Event()
        self.over()

    def wait_for(self, what: str, next_start_seconds: float = 0.0, missing: Sequence[int] = ()) -> None:
        """`missing`: the stages that are not there; those of this machine are, and wait."""
        self._begin(what, next_start_seconds, missing)
        self._write()

    def ended(self, what: str, missing: Sequence[int] = ()) -> None:
        """No worker runs now. The bucket is told at once; nobody needs to read of it on a terminal."""
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
        """Before this process ends: what was begun last is in the bucket, if that answers in time."""
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
        """Say it once more, unless there is nothing to wait for any longer."""
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
        with contextlib.suppress(RunError, OSError):  # the store itself may be what is away
            self.say(heartbeat)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            replace_file(self.work / NOTE, self.what, sync=False)

    def _incarnation(self) -> str:
        return read_note(self.work / "incarnation") or ""
