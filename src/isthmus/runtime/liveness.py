"""Telling a stopped process from a busy one: it touches a file while it runs, and somebody watches."""

import os
import threading
import time
from pathlib import Path


class AliveFile(threading.Thread):
    """Writes this process's id to a file again and again, while the process runs."""

    def __init__(self, path: Path, every_seconds: float = 1.0) -> None:
        super().__init__(daemon=True, name="pulse")
        self.path, self.every = path, every_seconds

    def run(self) -> None:
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(str(os.getpid()))
            except OSError:
                pass  # a full disk is told by whoever needs it; the next beat may pass
            time.sleep(self.every)


class Watchdog:
    """How long watched processes have been silent, by this process's own clock.

    Not by the age of the file: clocks are set, machines sleep, and a watcher that was itself stopped must not
    think that everybody else was.
    """

    def __init__(self) -> None:
        self.seen: dict[
            Path, tuple[int, int, float]
        ] = {}  # path -> (process, time of the file, when we looked)
        self.looked = time.monotonic()

    def look(self, pulses: dict[Path, int]) -> dict[Path, float]:
        """Seconds since each process (path of its pulse -> process id) last stirred or was first seen."""
        now = time.monotonic()
        asleep, self.looked = now - self.looked, now
        self.seen = {path: seen for path, seen in self.seen.items() if path in pulses}
        silent = {}
        for path, pid in pulses.items():
            stamp = alive_stamp(path, pid)
            process, before, since = self.seen.get(path, (0, 0, now))
            if process != pid or stamp != before:
                since = now
            elif asleep > 5:  # it was we who were away
                since += asleep
            self.seen[path] = (pid, stamp, since)
            silent[path] = now - since
        return silent


def launcher_alive_file(stage: int | None) -> str:
    """The file by which a launcher is watched, in its work folder."""
    return "launcher.alive" if stage is None else f"launcher-{stage}.alive"


def alive_stamp(path: Path, pid: int) -> int:
    """A number that changes with every beat of this very process; 0 before its first."""
    try:
        return path.stat().st_mtime_ns if path.read_text() in ("", str(pid)) else 0
    except OSError:
        return 0
