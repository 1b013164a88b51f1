"""Tell a stopped process from a busy one: each touches a file while it runs, and a watchdog reads it."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.files import overwrite_own
from isthmus.reading import read_note


class AliveFile(threading.Thread):
    """Writes this process's id to a file again and again while the process runs."""

    def __init__(self, path: Path, every_seconds: float = 1.0) -> None:
        super().__init__(daemon=True, name="alive-file")
        self.path, self.every = path, every_seconds

    def run(self) -> None:
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                overwrite_own(self.path, str(os.getpid()))
            except (OSError, ConfigError):
                pass  # a full disk is reported by the code that needs it; the next write may succeed
            time.sleep(self.every)


class Watchdog:
    """Measures how long watched processes have made no progress, by this process's own clock.

    The file's age would mislead: clocks are set, machines sleep, and a watchdog that was itself stopped must
    not conclude that all others were.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seen: dict[Path, tuple[int, int, float]] = {}  # path -> (process, its last stamp, seen at)
        self.looked = clock()

    def look(self, processes: dict[Path, int]) -> dict[Path, float]:
        """Seconds since each process (alive file -> process id) last made progress or was first seen."""
        now = self.clock()
        asleep, self.looked = now - self.looked, now
        self.seen = {path: seen for path, seen in self.seen.items() if path in processes}
        silent = {}
        for path, pid in processes.items():
            stamp = alive_stamp(path, pid)
            process, before, since = self.seen.get(path, (0, 0, now))
            if process != pid or stamp != before:
                since = now
            elif asleep > 5:  # this process was stopped itself
                since += asleep
            self.seen[path] = (pid, stamp, since)
            silent[path] = now - since
        return silent

    def forget(self, path: Path) -> None:
        self.seen.pop(path, None)


def alive_stamp(path: Path, pid: int) -> int:
    """A number that changes with every write of this process; 0 before its first."""
    try:
        return path.stat().st_mtime_ns if read_note(path) in ("", str(pid)) else 0
    except OSError:
        return 0
