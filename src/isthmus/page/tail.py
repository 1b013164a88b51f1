"""Follow metrics.jsonl of a run: each poll reads what was added since the last."""

import os
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.reading import parse_json, read_bytes, stat_regular
from isthmus.runlog import Row

MARK_BYTES = 4096  # of the last data read: if they changed, the file is a different one


class MetricsFile:
    """The rows, in the order of their rounds. The list is a new object exactly when it has changed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.rows: list[Row] = []
        self.odd = ""  # what was unreadable, in words
        self.seen: tuple[int, int, int] | None = None  # file, time and size at the last poll
        self._forget()

    def _forget(self) -> None:
        self.end, self.mark, self.left_out = (
            0,
            b"",
            0,
        )  # the end of what was read; its last bytes; lines that are no rows

    def look(self) -> float | None:
        """Return when the file was last written; None if it does not exist."""
        try:
            found = stat_regular(self.path)
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen != self.seen:
                self._read(found)
                self.seen = seen
        except FileNotFoundError:
            return None
        except ConfigError as refusal:
            self._forget()
            self.rows, self.odd, self.seen = [], str(refusal), None
            return None
        self.odd = f"{self.path.name}: {self.left_out:,} lines are not rows of a run" if self.left_out else ""
        return found.st_mtime

    def _read(self, found: os.stat_result) -> None:
        same = self.seen is not None and found.st_ino == self.seen[0] and found.st_size > self.end
        if not same or not self._add(found.st_size):
            self._forget()
            self.rows = []
            self._add(found.st_size)

    def _add(self, size: int) -> bool:
        """Read on from `end`; False if what was read before is gone."""
        start = self.end - len(self.mark)
        data = read_bytes(self.path, size - start, start=start)
        if not data.startswith(self.mark):
            return False
        data = data[: data.rfind(b"\n") + 1]  # the rest is still being written
        fresh = list(self._rows(data[len(self.mark) :]))
        self.end, self.mark = max(self.end, start + len(data)), data[-MARK_BYTES:] or self.mark
        if fresh:  # rounds may have been repeated, or have got their losses
            known = {row.round: row for row in (*self.rows, *fresh)}
            self.rows = [known[at] for at in sorted(known)]
        return True

    def _rows(self, data: bytes) -> Iterator[Row]:
        for line in data.splitlines():
            try:
                yield Row.from_dict(parse_json(line, "a line"))
            except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
                self.left_out += bool(line.strip())
