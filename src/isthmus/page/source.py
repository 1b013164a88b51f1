"""Sources of a page's facts: a run directory, a bucket, or a run directory with its bucket."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.config import Recipe
from isthmus.errors import ConfigError, RunError
from isthmus.page.tail import MetricsFile
from isthmus.protocol.fleet_state import MemberState
from isthmus.protocol.place import bucket_of, find_place, has_bucket
from isthmus.runlog import REAL, About, Row, RunDir

if TYPE_CHECKING:  # a run directory alone needs neither ledger nor store
    from isthmus.page.bucket_source import BucketReader


@dataclass(frozen=True, slots=True)
class Settled:
    """One round as settled by its manifest."""

    round: int
    counted: tuple[str, ...]
    refused: dict[str, str]
    expected: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class Raw:
    """Everything found, not yet in words."""

    recipe: Recipe
    about: About
    rows: list[Row]
    where: str
    has_bucket: bool
    heard_unix: float | None = None  # the newest sign of life of any process
    members: list[MemberState] = field(default_factory=list)  # from the bucket's heartbeats
    members_unix: float | None = None  # the last time that the bucket listed them
    silent_unix: float | None = None  # when the bucket stopped answering
    settled: dict[int, Settled] = field(default_factory=dict)
    delivered: tuple[str, ...] = ()  # updates of the open round
    late: frozenset[tuple[int, str]] = frozenset()
    problems: list[str] = field(default_factory=list)
    behind: int = 0  # settled rounds after those that were read
    unread: int = 0  # earlier rounds, read when there is time

    @property
    def real(self) -> bool:
        """Return whether processes run it, not a simulation; their bucket may not exist yet."""
        return self.has_bucket or self.about.get("mode") == REAL

    def heard(self, unix: float | None) -> None:
        if unix is not None and unix > (self.heard_unix or 0.0):
            self.heard_unix = unix


class RunSource:
    """A run directory, and its bucket if it has one."""

    def __init__(self, run: RunDir, wall: Callable[[], float] = time.time) -> None:
        self.run, self.wall, self.recipe = run, wall, run.recipe
        self.metrics = MetricsFile(run.path)
        self.bucket: BucketReader | None = None
        self.bucket_fault = ""
        self.silent_unix: float | None = None  # when opening the bucket first failed

    @property
    def far(self) -> bool:
        """Return whether the bucket is remote, so that every poll costs requests."""
        return "://" in bucket_of(self.run)

    def look(self, budget_seconds: float = 2.0) -> Raw:
        raw = Raw(self.recipe, {}, [], str(self.run.path), has_bucket=False)
        try:
            raw.about = self.run.about
            self._open_bucket()
        except ConfigError as reason:  # about.json became unreadable
            raw.problems.append(str(reason))
        raw.heard(self.metrics.look())
        raw.rows = self.metrics.rows
        raw.problems += [words for words in (self.metrics.odd, self.bucket_fault) if words]
        if self.bucket:
            self.bucket.look(raw, budget_seconds)
        else:
            raw.silent_unix = self.silent_unix
        return raw

    def _open_bucket(self) -> None:
        """Open the bucket late if need be: `train` may create it after the page was opened."""
        if self.bucket or not has_bucket(self.run):
            return
        from isthmus.page.bucket_source import open_bucket

        try:
            bucket = open_bucket(bucket_of(self.run), self.wall)
        except (ConfigError, RunError) as error:
            self.bucket_fault = f"the run's bucket cannot be read: {error}"
            self.silent_unix = self.silent_unix or self.wall()
            return
        if [m.name for m in bucket.recipe.fleet()][: self.recipe.num_replicas] == [
            m.name for m in self.recipe.fleet()
        ]:
            self.bucket, self.bucket_fault = bucket, ""
        else:
            self.bucket_fault = "the bucket of this folder holds another run; it is not read"


class BucketSource:
    """A bucket alone: rounds, members, training losses, and held-out losses that members measured."""

    def __init__(self, reader: "BucketReader") -> None:
        self.reader, self.where = reader, reader.ledger.store.url
        self.far = "://" in self.where
        self.rows: list[Row] = []
        self.known = 0, 0  # rounds, and those with a held-out loss

    def look(self, budget_seconds: float = 2.0) -> Raw:
        raw = Raw(self.reader.recipe, {}, [], self.where, has_bucket=True)
        self.reader.look(raw, budget_seconds)
        raw.recipe = self.reader.recipe
        known = len(self.reader.rows), len(self.reader.losses.found)
        if known != self.known:  # settled rounds never change
            self.rows, self.known = self.reader.all_rows(), known
        raw.rows = self.rows
        states = [member.state for member in raw.members]
        status = "running"
        if max(raw.settled, default=0) >= raw.recipe.outer.rounds:
            status = "finished"
        elif states and all(state in ("left", "finished") for state in states):
            status = "interrupted"
        raw.about = {"status": status, "mode": REAL, "run": self.reader.run_id}
        return raw


def open_source(target: str) -> RunSource | BucketSource:
    """Open `target`: a run directory, or a bucket by its folder or URL."""
    place = find_place(target)
    if place.run:
        return RunSource(place.run)
    from isthmus.page.bucket_source import open_bucket

    return BucketSource(open_bucket(place.bucket))
