"""The last lines of this machine's processes: kept beside their state, and put into the bucket for friends.

Each process keeps its own file. The launcher, which outlives its workers, puts what is new into
members/<replica>/log-<stage>.json: bounded, escaped, and without what nobody else may know.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.errors import ConfigError, RunError
from isthmus.files import open_own, own_size, replace_file
from isthmus.layout.requests import LOG_SECONDS
from isthmus.printing import visible
from isthmus.protocol.log_lines import ALIVE_SECONDS, MOST_LINE, MOST_LINES, LogLines
from isthmus.reading import read_bytes
from isthmus.runtime.redact import redacted

MOST_BYTES = 1 << 16  # of a process's file, which is then cut to half
Put = Callable[[LogLines], None]


def recent_file(work: Path, who: str) -> Path:
    """`who`: a worker's rank, or the launcher's name."""
    return work / f"recent-{who}.log"


def keep(path: Path, line: str) -> None:
    """Add a line to a process's file; of a full disk nothing is said here."""
    with contextlib.suppress(OSError, ConfigError):
        if (own_size(path) or 0) > MOST_BYTES:
            replace_file(path, _tail(path, MOST_BYTES // 2), sync=False)
        with open_own(path, append=True) as file:
            file.write(f"{line}\n".encode(errors="replace"))


def _tail(path: Path, num_bytes: int) -> str:
    """Whole lines from the end of a file."""
    with contextlib.suppress(OSError, ConfigError):
        size = own_size(path) or 0
        text = read_bytes(path, 2 * MOST_BYTES, start=max(0, size - num_bytes)).decode(errors="replace")
        return text if size <= num_bytes else text.partition("\n")[2]
    return ""


def shared_lines(files: Sequence[Path]) -> tuple[str, ...]:
    """What the last lines of these files are to others: in the order of their times."""
    lines = [line for path in files for line in _tail(path, MOST_BYTES // 2).splitlines() if line.strip()]
    if len(files) > 1 and not _past_midnight(lines):
        lines.sort(key=lambda line: line[:8])  # HH:MM:SS; those of one second stay as they are
    shown = [visible(redacted(line)) for line in lines[-MOST_LINES:]]
    return tuple(line if len(line) <= MOST_LINE else line[: MOST_LINE - 3] + "..." for line in shown)


def _past_midnight(lines: Sequence[str]) -> bool:
    times = [line[:8] for line in lines]
    return bool(times) and max(times) > "20" and min(times) < "04"


class Publisher(threading.Thread):
    """Puts the last lines of each stage on this machine into the bucket, when there are new ones."""

    def __init__(
        self,
        work: Path,
        launcher: str,
        stages: Sequence[int],
        put: Put,
        every_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(daemon=True, name="log-lines")
        self.work, self.launcher, self.stages, self.put = work, launcher, tuple(stages), put
        self.every, self.leads = max(LOG_SECONDS, every_seconds), 0 in stages
        self.told: dict[int, tuple[str, ...]] = {}
        self.clock, self.put_at = clock, 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self.every):
            self.tell()

    def tell(self) -> None:
        """Once: the launcher's own lines go with those of the first stage here."""
        for stage in self.stages:
            files = [recent_file(self.work, str(stage))]
            if stage == self.stages[0]:
                files.insert(0, recent_file(self.work, self.launcher))
            lines = shared_lines(files)
            due = not self.leads and self.clock() - self.put_at >= ALIVE_SECONDS
            if lines and (lines != self.told.get(stage) or due):
                with contextlib.suppress(RunError, OSError):  # the next ones may get through
                    self.put(LogLines(stage, lines))
                    self.told[stage], self.put_at = lines, self.clock()

    def finish(self) -> None:
        """Before this process ends: what was said last."""
        self.ended.set()
        self.tell()
