"""A run's bucket, looked at again and again: heartbeats, the open round, and the rounds that are settled.

It only reads. Everything it returns has passed the ledger's checks: signatures, chain, sizes.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError, RunError
from isthmus.page.read import FolderBucket, resolved_recipe
from isthmus.page.source import Raw, SeenHeartbeat, Settled
from isthmus.protocol.heartbeat import WAITING, Heartbeat
from isthmus.protocol.ledger import Ledger, Manifest, read_run
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES
from isthmus.reading import parse_json
from isthmus.runlog import Row
from isthmus.runlog.clean import text
from isthmus.store.objects import open_store
from isthmus.store.retry import StoreError, StoreRefused
from isthmus.store.url import parse_url

CLOSE_LOOKS = 10.0  # seconds between two looks, up to which a change between them tells the store's clock
UNSETTLED = 3  # rounds back to which a late update is looked for again and again
LOOK_BACK = 200  # rounds back to which it is looked for at all


def open_folder(path: Path, wall: Callable[[], float] = time.time) -> "BucketReader":
    return _open(FolderBucket(path), wall)


def open_url(url: str) -> "BucketReader":
    _, folder = parse_url(url)
    if folder:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; give the URL that `isthmus init` was given")
        return open_folder(folder)
    return _open(open_store(url, create=False), time.time)


def _open(store: Any, wall: Callable[[], float]) -> "BucketReader":
    """The run there, once its recipe is known to be of a size that can be shown."""
    try:
        data = store.get("run.json", max_bytes=MAX_DOCUMENT_BYTES)
        document = parse_json(data, "run.json") if data else None
    except (StoreError, StoreRefused) as reason:
        raise ConfigError(str(reason)) from None
    except ConfigError:
        raise ConfigError(f"run.json in {store.url} is not one of ours; give the URL of a run") from None
    if isinstance(document, dict) and isinstance(document.get("recipe"), str):
        resolved_recipe(document["recipe"], f"run.json in {store.url}")
    try:
        return BucketReader(Ledger(store, read_run(store)), wall)
    except (StoreError, StoreRefused) as reason:
        raise ConfigError(str(reason)) from None


class BucketReader:
    """What a page knows of a bucket; each look asks only for what may have changed."""

    def __init__(self, ledger: Ledger, wall: Callable[[], float] = time.time) -> None:
        self.ledger, self.recipe, self.wall = ledger, ledger.run.recipe, wall
        self.run_id = ledger.run.run_id
        self.names = [member.name for member in self.recipe.fleet()]
        self.done = 0  # the newest manifest that was read
        self.newest = 0  # the newest that is known to be there
        self.settled_unix: float | None = None
        self.modified: dict[str, float] = {}  # replica -> Last-Modified of its heartbeat
        self.skew: float | None = None  # our clock minus the store's, as far as it is known
        self.looked = 0.0
        self.settled: dict[int, Settled] = {}
        self.reported: list[Row] = []  # one for each settled round
        self.late: set[tuple[int, str]] = set()
        self.judged: set[int] = set()
        self.fault = ""
        self.pool = ThreadPoolExecutor(8, thread_name_prefix="bucket")

    def look(self, raw: Raw, budget_seconds: float) -> None:
        raw.has_bucket = True
        began = time.monotonic()
        try:
            if not self.fault:
                self._advance(began + budget_seconds)
            self._read_heartbeats(raw)
            self._find_late()
            if self.done == self.newest < self.recipe.outer.rounds:
                there = self.pool.map(lambda name: self.ledger.has_commit(name, self.done + 1), self.names)
                raw.delivered = tuple(n for n, found in zip(self.names, there, strict=True) if found)
        except StoreError as error:
            raw.problems.append(f"the bucket does not answer: {error}")
        except (RunError, StoreRefused) as error:  # after a manifest that is not to be trusted nothing counts
            self.fault = text(error)
        raw.problems += [self.fault] if self.fault else []
        for t in self.ledger.manifests.keys() - self.settled.keys():
            self.settled[t] = self._settled(self.ledger.manifests[t])
        raw.settled = dict(self.settled)
        raw.late, raw.behind = frozenset(self.late), self.newest - self.done
        raw.heard(None if self.settled_unix is None else self._here(self.settled_unix))

    def _advance(self, deadline: float) -> None:
        """Read settled rounds until there are no more or the time is up; the rest comes next time."""
        if self.newest <= self.done:
            self.newest = self._newest()
        started = self.done
        while self.done < self.newest and (time.monotonic() < deadline or self.done == started):
            if self.ledger.manifest(self.done + 1) is None:
                break
            self.done += 1
        if self.done > started:
            self.settled_unix = self.ledger.settled_at(self.done)

    def _newest(self) -> int:
        """Without a listing, which may be long: rounds follow each other, so doubling steps find the last."""
        low, step = self.done, 1
        while low + step <= self.recipe.outer.rounds and self.ledger.settled_at(low + step) is not None:
            low, step = low + step, 2 * step
        while step > 1:
            step //= 2
            if low + step <= self.recipe.outer.rounds and self.ledger.settled_at(low + step) is not None:
                low += step
        return low

    def _read_heartbeats(self, raw: Raw) -> None:
        now, before = self.wall(), dict(self.modified)
        found: dict[str, Heartbeat] = {}
        for name, beat in zip(self.names, self.pool.map(self.ledger.heartbeat, self.names), strict=True):
            if beat is None:
                continue
            found[name], modified = beat
            fresh = name in before and before[name] != modified and now - self.looked < CLOSE_LOOKS
            if fresh:  # written between our last look and this one: it tells how far the clocks are apart
                gap = now - modified
                self.skew = gap if self.skew is None else min(self.skew, gap)
            self.modified[name] = modified
        self.looked = now
        for name, heartbeat in found.items():
            raw.heartbeats[name] = SeenHeartbeat(heartbeat, self._here(self.modified[name]))
            raw.heard(raw.heartbeats[name].seen_unix)
        for name, waiting in zip(self.names, self.pool.map(self._waiting, self.names), strict=True):
            if waiting:
                said, written = waiting
                last = found.get(name, Heartbeat())
                told = replace(
                    last, state=WAITING, awaiting=said.awaiting, waited_seconds=said.waited_seconds
                )
                raw.heartbeats[name] = SeenHeartbeat(told, self._here(written))
                raw.heard(raw.heartbeats[name].seen_unix)

    def _waiting(self, name: str) -> tuple[Heartbeat, float] | None:
        return self.ledger.waiting(name, self.modified.get(name), self.wall() - (self.skew or 0.0))

    def _here(self, store_unix: float) -> float:
        """A time of the store by this machine's clock, and never in the future."""
        return min(self.wall(), store_unix + (self.skew or 0.0))

    def _find_late(self) -> None:
        """Updates that were delivered and did not count, because their round was settled without them."""
        for t in range(max(1, self.done - LOOK_BACK), self.done + 1):
            if t in self.judged:
                continue
            manifest = self.ledger.manifests.get(t)
            if manifest is not None:
                known = {e.replica for e in manifest.entries} | {name for name, _ in manifest.refused}
                missing = [name for name in self.names if name not in known and (t, name) not in self.late]
                there = self.pool.map(lambda name, t=t: self.ledger.has_commit(name, t), missing)
                self.late |= {(t, name) for name, found in zip(missing, there, strict=True) if found}
            if t <= self.done - UNSETTLED:
                self.judged.add(t)

    def _settled(self, manifest: Manifest) -> Settled:
        before = self.ledger.manifests.get(manifest.round - 1)
        return Settled(
            manifest.round,
            tuple(entry.replica for entry in manifest.entries),
            {text(name, 80): text(reason) for name, reason in manifest.refused},
            before.members if before else tuple(self.names),
            manifest.seconds if math.isfinite(manifest.seconds) else 0.0,
        )

    def rows(self) -> list[Row]:
        """Rows as `train` writes them, without what only a recorder measures: held-out losses and bias."""
        for t in range(len(self.reported) + 1, len(self.ledger.manifests) + 1):
            before = self.reported[-1].tokens if self.reported else 0
            self.reported.append(Row.from_manifest(self.recipe, self.ledger.manifests[t], before))
        return self.reported
