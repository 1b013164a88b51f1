"""How often a replica's workers were started again on this machine, and why the last time.

A note in the work folder: it outlives workers and launchers. A launcher that ends as it should says so in it,
and the next one begins at zero. Standard library only, but for what the notes of a heartbeat are.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from isthmus.disk import free_bytes
from isthmus.errors import ConfigError
from isthmus.files import replace_file
from isthmus.printing import visible
from isthmus.protocol.heartbeat import Vitals
from isthmus.reading import read_json
from isthmus.runlog.facts import MAX_WORD
from isthmus.runtime.redact import redacted

NOTE = "restarts.json"
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Crashes:
    """What the note says."""

    restarts: int = 0
    error: str = ""  # one line
    unix: float = 0.0  # when that was, by this machine's clock
    ended_well: bool = True  # no launcher of this folder has ended otherwise

    @classmethod
    def read(cls, work: Path) -> "Crashes":
        try:
            body = read_json(work / NOTE, MAX_BYTES)
            error, unix = str(body["error"]), float(body["unix"])
            return cls(int(body["restarts"]), error, unix, bool(body["ended_well"]))
        except (OSError, ValueError, KeyError, TypeError):  # ConfigError is a ValueError
            return cls()

    def write(self, work: Path) -> None:
        with suppress(OSError, ConfigError):  # a full disk: what counts it goes on
            replace_file(work / NOTE, json.dumps(asdict(self)), sync=False)

    def vitals(self, work: Path, needed: int | None, wall: Callable[[], float] = time.time) -> Vitals:
        """As a heartbeat says it, with the room on the disk; `needed` is what the next save takes."""
        return Vitals(
            restarts=self.restarts,
            last_error=self.error,
            last_error_seconds=max(0.0, wall() - self.unix) if self.error else None,
            disk_free_bytes=free_bytes(work),
            disk_needed_bytes=needed,
        )


def count_start(work: Path) -> None:
    """A launcher begins in this folder. If the one before it ended without a word, this is a restart."""
    before = Crashes.read(work)
    if before.ended_well:
        Crashes(ended_well=False).write(work)
    else:
        _again(before, work, before.error or "its launcher ended without a word")


def count_restart(work: Path, error: str = "") -> None:
    """Workers are started again. Without an `error` they only follow another machine of the replica."""
    _again(Crashes.read(work), work, error)


def count_end(work: Path) -> None:
    """The launcher ends as it should."""
    replace(Crashes.read(work), ended_well=True).write(work)


def note_error(work: Path, error: str) -> None:
    """The last one: nothing is started again after it."""
    replace(Crashes.read(work), error=one_line(error), unix=time.time(), ended_well=False).write(work)


def _again(before: Crashes, work: Path, error: str) -> None:
    now = replace(before, restarts=before.restarts + 1, ended_well=False)
    if error:
        now = replace(now, error=one_line(error), unix=time.time())
    now.write(work)


def one_line(error: str) -> str:
    """As a heartbeat may carry it: short, visible, and without what nobody else may know."""
    line = visible(redacted((error.strip().splitlines() or [""])[0]))
    return line if len(line) <= MAX_WORD else line[: MAX_WORD - 3] + "..."
