"""metrics.jsonl of a run that may go on: a look reads what was added since the last one."""

from isthmus.config import Recipe
from isthmus.page.read import METRICS_BYTES, Folder, JsonLines
from isthmus.runlog import Row
from isthmus.runlog.clean import clean_rows

NAME = "metrics.jsonl"
MARK_BYTES = 4096  # of what was read last: where they have changed, the file is another one


class MetricsFile:
    """Its rows, in the order of their rounds. The list is another one when, and only when, it has changed."""

    def __init__(self, folder: Folder, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe
        self.rows: list[Row] = []
        self.odd: list[str] = []  # what could not be read, in words
        self.seen: tuple[int, int, int] | None = None  # file, time and size at the last look
        self._forget()

    def _forget(self) -> None:
        self.begin = self.end = 0  # which part was read, as offsets
        self.mark = b""  # its last bytes
        self.left_out = 0

    def look(self) -> float | None:
        """When the file was last written to; None where there is none. A refusal is a StoreRefused."""
        found = self.folder.stat(NAME)
        if found is None:
            return None
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen == self.seen:
            return found.st_mtime
        same = self.seen is not None and found.st_ino == self.seen[0] and found.st_size > self.end
        if not (same and found.st_size - self.begin <= 2 * METRICS_BYTES and self._add()):
            self._forget()
            self.rows, self.begin = [], max(0, found.st_size - METRICS_BYTES)
            self.end = self.begin
            self._add()
        self.seen, self.odd = seen, []
        if self.begin:
            self.odd.append(f"{NAME} is larger than {METRICS_BYTES >> 20} MiB; its beginning is not read")
        if self.left_out:
            self.odd.append(f"{NAME}: {self.left_out:,} lines are not rows of a run and are left out")
        return found.st_mtime

    def _add(self) -> bool:
        """Read on from `end`; False where what was read before is not there any more."""
        start = self.end - len(self.mark)
        data = self.folder.read(NAME, METRICS_BYTES + len(self.mark), start=start) or b""
        if not data.startswith(self.mark):
            return False
        first_cut = self.begin == self.end > 0  # begun in the middle of a line
        data = data[: data.rfind(b"\n") + 1]  # what follows is still being written
        lines = JsonLines(data[len(self.mark) :], whole=not first_cut)
        fresh, strange = clean_rows(lines, self.recipe)
        self.left_out += lines.broken + strange
        self.end, self.mark = max(self.end, start + len(data)), data[-MARK_BYTES:] or self.mark
        if fresh and self.rows and fresh[0].round <= self.rows[-1].round:  # rounds that were run again
            known = {row.round: row for row in (*self.rows, *fresh)}
            self.rows = [known[at] for at in sorted(known)]
        elif fresh:
            self.rows = [*self.rows, *fresh]
        return True

    def lose(self, reason: str) -> None:
        """It cannot be read any more: nothing of it is shown."""
        self._forget()
        self.rows, self.odd, self.seen = [], [reason], None
