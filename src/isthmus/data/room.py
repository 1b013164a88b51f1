"""Whether a corpus fits on its disk: told before anything is made where sizes alone say so, then by what the
first batches took."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.data.documents import DocumentOrder, Position
from isthmus.disk import DiskFull, check_room, free_bytes, in_words, is_full
from isthmus.errors import ConfigError

# Common vocabularies have 3 to 5 bytes of text for a token, and JSON has more than its text. So this is the
# least that a file becomes: nobody is refused who would have had room.
MOST_BYTES_PER_TOKEN = 16
SURE = 0.75  # the first documents may be longer in tokens than the rest
AGAIN = "make room there, then the same command continues"


def check_before(folder: Path, order: DocumentOrder, token_bytes: int) -> None:
    """ConfigError where even the least that this much text becomes does not fit.

    What lies there of the corpus counts as free: it is continued or replaced.
    """
    total = sum(source.size for source in order.inputs)
    if order.limit_bytes is not None:
        total = min(total, order.limit_bytes)
    there = sum(path.stat().st_size for path in folder.glob("*.bin*")) if folder.is_dir() else 0
    needed = total // MOST_BYTES_PER_TOKEN * token_bytes - there
    try:
        check_room(folder, max(needed, 0), f"a corpus of {in_words(total)} of text, at the very least,")
    except ConfigError as error:
        raise ConfigError(f"{error}, or give --to a folder on another disk") from None


class Outlook:
    """How much the rest of a corpus will take, by what its beginning took."""

    def __init__(self, folder: Path, order: DocumentOrder) -> None:
        self.folder, self.limit_bytes = folder, order.limit_bytes
        self.total = sum(source.size for source in order.sources)
        self.rest: int | None = None  # bytes; None: not known yet

    def look(self, written: int, consumed: int, position: Position) -> None:
        """After a batch: `written` bytes of tokens came of `consumed` bytes of the files. DiskFull where the
        rest surely does not fit."""
        shares = [consumed / self.total] if self.total else []
        if self.limit_bytes:
            shares.append(position.input_bytes / self.limit_bytes)
        if not (share := min(max(shares, default=0.0), 1.0)):
            return
        self.rest = int(written * (1 - share) / share)
        free = free_bytes(self.folder)
        if free is not None and self.rest * SURE > free:
            raise DiskFull(self._line())

    @contextmanager
    def told_when_full(self) -> Iterator["Outlook"]:
        """A write that finds the disk full ends with DiskFull."""
        try:
            yield self
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskFull(self._line()) from None

    def _line(self) -> str:
        free = in_words(free_bytes(self.folder))
        if not self.rest:
            return f"the disk of {self.folder} is full ({free} free); {AGAIN}"
        needs = in_words(self.rest)
        has = f"the disk of {self.folder} has {free} free"
        return f"{has}, and the rest of this corpus needs about {needs}; {AGAIN}"
