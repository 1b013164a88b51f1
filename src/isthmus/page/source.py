"""Where a page's facts come from: a run directory, a bucket, or a run directory with its bucket."""

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.config import Recipe
from isthmus.errors import ConfigError, RunError
from isthmus.page.read import Folder, read_json, resolved_recipe
from isthmus.page.tail import MetricsFile
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.reading import DOCUMENT_BYTES
from isthmus.runlog import REAL, About, Row
from isthmus.runlog.clean import shown_about
from isthmus.store.retry import StoreRefused

if TYPE_CHECKING:  # a run directory without a bucket needs neither ledger nor store
    from isthmus.page.bucket_source import BucketReader


@dataclass(frozen=True, slots=True)
class SeenHeartbeat:
    """What a replica last said of itself, and when, by this machine's clock."""

    heartbeat: Heartbeat
    seen_unix: float


@dataclass(frozen=True, slots=True)
class AliveFile:
    """A process of a replica that runs on this machine: the file that it touches every second."""

    stage: int
    pid: int  # 0: not known just now
    seen_unix: float


@dataclass(frozen=True, slots=True)
class Settled:
    """One round as its manifest settled it."""

    round: int
    counted: tuple[str, ...]
    refused: dict[str, str]
    expected: tuple[str, ...]
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)  # nats an update adds to the held-out loss


@dataclass(slots=True)
class Raw:
    """All that was found, checked and bounded, but not yet put into words."""

    recipe: Recipe
    about: About
    rows: list[Row]
    where: str
    has_bucket: bool
    heard_unix: float | None = None  # the newest sign of life, whoever gave it
    heartbeats: dict[str, SeenHeartbeat] = field(default_factory=dict)
    alive_files: dict[str, list[AliveFile]] = field(default_factory=dict)
    launchers: dict[str, dict[int, float]] = field(
        default_factory=dict
    )  # replica -> stage -> last sign of it
    settled: dict[int, Settled] = field(default_factory=dict)
    delivered: tuple[str, ...] = ()  # updates of the open round
    late: frozenset[tuple[int, str]] = frozenset()
    problems: list[str] = field(default_factory=list)
    behind: int = 0  # settled rounds after those that were read
    unread: int = 0  # and before them; they are read when there is time

    @property
    def real(self) -> bool:
        """Processes, not a simulation; their bucket may be elsewhere, or not be there yet."""
        return self.has_bucket or self.about.get("mode") == REAL

    def heard(self, unix: float | None) -> None:
        if unix is not None and unix > (self.heard_unix or 0.0):
            self.heard_unix = unix


class RunSource:
    """A run directory, and the bucket in it if there is one."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self.path, self.wall = path, wall
        self.folder = Folder(path)
        try:
            data = self.folder.read("recipe.toml", DOCUMENT_BYTES)
        except StoreRefused as reason:
            raise ConfigError(f"{path} cannot be watched: {reason}") from None
        if data is None:
            raise ConfigError(
                f"{path} is not a run: it holds no recipe.toml (nor, as a bucket, run.json); give the folder "
                "of a run, such as runs/demo, or the URL of a bucket"
            )
        try:
            self.recipe = resolved_recipe(data.decode(), str(path / "recipe.toml"))
        except UnicodeDecodeError:
            raise ConfigError(f"{path / 'recipe.toml'} is not UTF-8 text, so it is not a recipe") from None
        self.metrics = MetricsFile(self.folder, self.recipe)
        self.bucket: BucketReader | None = None
        self.bucket_fault = ""

    def look(self, budget_seconds: float = 2.0) -> Raw:
        raw = Raw(self.recipe, {}, [], str(self.path), has_bucket=False)
        try:
            raw.about = shown_about(read_json(self.folder, "about.json", DOCUMENT_BYTES))
        except StoreRefused as reason:
            raw.problems.append(str(reason))
        self._read_metrics(raw)
        for member in self.recipe.fleet():
            if found := self._alive_files(member.name, member.config.parts):
                raw.alive_files[member.name] = found
                raw.heard(max(file.seen_unix for file in found))
                raw.launchers[member.name] = self._launchers(member.name, member.config.parts)
        self._open_bucket()
        if self.bucket_fault:
            raw.problems.append(self.bucket_fault)
        if self.bucket:
            self.bucket.look(raw, budget_seconds)
        return raw

    def _read_metrics(self, raw: Raw) -> None:
        try:
            raw.heard(self.metrics.look())
        except StoreRefused as reason:
            self.metrics.lose(str(reason))
        raw.rows = self.metrics.rows
        raw.problems += self.metrics.odd

    def _alive_files(self, replica: str, stages: int) -> list[AliveFile]:
        """One for each process that has run on this machine; replicas elsewhere have none."""
        files = []
        for stage in range(stages):
            # Where every stage has a launcher of its own, each has its own folder too.
            for name in (f"work/{replica}/alive-{stage}", f"work/{replica}.{stage}/alive-{stage}"):
                try:
                    found = self.folder.stat(name)
                    data = self.folder.read(name, 32) if found else None
                except StoreRefused:
                    continue
                if found and data is not None and (data.strip() or b"0").isdigit():
                    # Empty while its process is writing it.
                    files.append(AliveFile(stage, int(data.strip() or 0), found.st_mtime))
        return files

    def _launchers(self, replica: str, stages: int) -> dict[int, float]:
        """Of each stage, when the launcher that starts its process last gave a sign."""
        found: dict[int, float] = {}
        for stage in range(stages):
            for name in (f"work/{replica}/launcher.alive", f"work/{replica}.{stage}/launcher-{stage}.alive"):
                with suppress(StoreRefused):
                    if file := self.folder.stat(name):
                        found[stage] = file.st_mtime
        return found

    def _open_bucket(self) -> None:
        """`train` makes run and bucket after the page may have been opened; a link out is not followed."""
        if self.bucket or self.bucket_fault:
            return
        try:
            if self.folder.stat("bucket/run.json") is None:
                return
        except StoreRefused as reason:
            self.bucket_fault = str(reason)
            return
        from isthmus.page.bucket_source import open_folder

        try:
            bucket = open_folder(self.folder.find("bucket"), self.wall)
        except (ConfigError, RunError) as error:
            self.bucket_fault = f"the run's own bucket cannot be read: {error}"
            return
        if [m.name for m in bucket.recipe.fleet()] == [m.name for m in self.recipe.fleet()]:
            self.bucket = bucket
        else:
            self.bucket_fault = "the bucket in this folder is another run's; it is not read"


class BucketSource:
    """A bucket alone: rounds, members, training losses, and held-out losses as a member measured them."""

    def __init__(self, reader: "BucketReader", where: str) -> None:
        self.reader, self.where = reader, where
        self.rows: list[Row] = []
        self.known = 0, 0  # rounds, and those with a held-out loss

    def look(self, budget_seconds: float = 2.0) -> Raw:
        raw = Raw(self.reader.recipe, {}, [], self.where, has_bucket=True)
        self.reader.look(raw, budget_seconds)
        raw.recipe = self.reader.recipe
        known = len(self.reader.rows), len(self.reader.losses.found)
        if known != self.known:  # settled rounds stay as they are
            self.rows, self.known = self.reader.all_rows(), known
        raw.rows = self.rows
        gone = [seen.heartbeat.gone for seen in raw.heartbeats.values()]
        status = "running"
        if max(raw.settled, default=0) >= raw.recipe.outer.rounds:
            status = "finished"
        elif gone and all(gone):
            status = "interrupted"
        raw.about = {"status": status, "mode": REAL, "run": self.reader.run_id}
        return raw


def open_source(target: str) -> RunSource | BucketSource:
    """What `target` names: a run directory, a bucket in a folder, or the URL of a bucket."""
    if "://" not in target:
        path = Path(target).expanduser()
        if not os.path.lexists(path):
            raise ConfigError(
                f"{target} does not exist; give the folder of a run, such as runs/demo, or a URL"
            )
        if not path.is_dir():
            raise ConfigError(
                f"{target} is not a folder; give the folder of a run, such as runs/demo, or a URL"
            )
        if _is_file(path / "recipe.toml") or not _is_file(path / "run.json"):
            return RunSource(path)
        from isthmus.page.bucket_source import open_folder

        return BucketSource(open_folder(path), target)
    from isthmus.page.bucket_source import open_url

    reader = open_url(target)
    return BucketSource(reader, reader.ledger.store.url)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode) or path.is_symlink()
    except OSError:
        return path.is_symlink()
