"""How often a replica's workers were restarted on this machine, and the last reason.

A note in the work folder survives workers and launchers. A launcher that ends normally records that, and the
next one counts from zero. Uses only the standard library, except for a heartbeat's types.
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
    """The content of the note."""

    restarts: int = 0
    error: str = ""  # one line
    unix: float = 0.0  # time of the error, by this machine's clock
    ended_well: bool = True  # whether every launcher of this folder ended normally

    @classmethod
    def read(cls, work: Path) -> "Crashes":
        try:
            body = read_json(work / NOTE, MAX_BYTES)
            error, unix = str(body["error"]), float(body["unix"])
            return cls(int(body["restarts"]), error, unix, bool(body["ended_well"]))
        except (OSError, ValueError, KeyError, TypeError):  # ConfigError is a ValueError
            return cls()

    def write(self, work: Path) -> None:
        with suppress(OSError, ConfigError):  # a full disk must not stop what it counts
            replace_file(work / NOTE, json.dumps(asdict(self)), sync=False)

    def vitals(self, work: Path, needed: int | None, wall: Callable[[], float] = time.time) -> Vitals:
        """The vitals of a heartbeat, with the free disk space; `needed` is the size of the next save."""
        return Vitals(
            restarts=self.restarts,
            last_error=self.error,
            last_error_seconds=max(0.0, wall() - self.unix) if self.error else None,
            disk_free_bytes=free_bytes(work),
            disk_needed_bytes=needed,
        )


def count_start(work: Path) -> None:
    """Record that a launcher starts in this folder. If the last one ended silently, this is a restart."""
    before = Crashes.read(work)
    if before.ended_well:
        Crashes(ended_well=False).write(work)
    else:
        _again(before, work, before.error or "its launcher ended without a word")


def count_restart(work: Path, error: str = "") -> None:
    """Count a restart of the workers. Without an `error` they only follow another machine of the replica."""
    _again(Crashes.read(work), work, error)


def count_end(work: Path) -> None:
    """Record that the launcher ends normally."""
    replace(Crashes.read(work), ended_well=True).write(work)


def note_error(work: Path, error: str) -> None:
    """Record the final error; no restart follows it."""
    replace(Crashes.read(work), error=one_line(error), unix=time.time(), ended_well=False).write(work)


def _again(before: Crashes, work: Path, error: str) -> None:
    now = replace(before, restarts=before.restarts + 1, ended_well=False)
    if error:
        now = replace(now, error=one_line(error), unix=time.time())
    now.write(work)


def one_line(error: str) -> str:
    """Shorten an error for a heartbeat: one visible line without secrets."""
    line = visible(redacted((error.strip().splitlines() or [""])[0]))
    return line if len(line) <= MAX_WORD else line[: MAX_WORD - 3] + "..."
