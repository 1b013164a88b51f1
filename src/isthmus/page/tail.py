"""Follow metrics.jsonl of a run: each poll reads what was added since the last."""

import os
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.reading import parse_json, read_bytes, stat_regular
from isthmus.runlog import Row


class MetricsFile:
    """The rows, in the order of their rounds. The list is a new object exactly when it has changed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.rows: list[Row] = []
        self.odd = ""  # what was unreadable, in words
        self.seen: tuple[int, int, int] | None = None  # file, time and size at the last poll
        self._forget()

    def _forget(self) -> None:
        self.end = self.left_out = 0  # the end of what was read; lines that are not rows

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
        """Read what was added, or the whole file if it was replaced or cut."""
        if self.seen is None or found.st_ino != self.seen[0] or found.st_size < self.end:
            self._forget()
            self.rows = []
        data = read_bytes(self.path, found.st_size - self.end, start=self.end)
        data = data[: data.rfind(b"\n") + 1]  # the rest is still being written
        self.end += len(data)
        if fresh := list(self._rows(data)):  # rounds may have been repeated, or have got their losses
            known = {row.round: row for row in (*self.rows, *fresh)}
            self.rows = [known[at] for at in sorted(known)]

    def _rows(self, data: bytes) -> Iterator[Row]:
        for line in data.splitlines():
            try:
                yield Row.from_dict(parse_json(line, "a line"))
            except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
                self.left_out += bool(line.strip())
