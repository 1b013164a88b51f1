"""A run's bucket, looked at again and again: heartbeats, the open round, and the rounds that are settled.

It only reads. Everything it returns has passed the ledger's checks: signatures, chain, sizes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.config import Recipe
from isthmus.errors import ConfigError, RunError
from isthmus.page.read import FolderBucket, resolved_recipe
from isthmus.page.source import Raw, SeenHeartbeat, Settled
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger, Manifest, read_run
from isthmus.protocol.standing import said_by_launcher
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES
from isthmus.reading import parse_json
from isthmus.runlog import Row
from isthmus.runlog.clean import clean_rows, text
from isthmus.runlog.held_out import HeldOutLosses
from isthmus.store.objects import open_store
from isthmus.store.retry import StoreError, StoreRefused
from isthmus.store.url import parse_url

CLOSE_LOOKS = 10.0  # seconds between two looks, up to which a change between them tells the store's clock
UNSETTLED = 3  # rounds back to which a late update is looked for again and again
SHOWN = 60  # rounds that the page shows one by one: so many are read at once


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
    """What a page knows of a bucket; each look asks only for what may have changed.

    It begins with the newest rounds and follows the run from there. The rounds before them are read when
    there is time, newest first.
    """

    def __init__(self, ledger: Ledger, wall: Callable[[], float] = time.time) -> None:
        self.ledger, self.wall = ledger, wall
        self.older = Ledger(ledger.store, ledger.run)  # each keeps only what it read last
        self.run_id = ledger.run.run_id
        self.first = self.done = 0  # the oldest and the newest manifest that were read, and all between
        self.before = ""  # digest of the manifest before them
        self.newest = 0  # the newest that is known to be there
        self.settled_unix: float | None = None
        self.modified: dict[str, float] = {}  # replica -> Last-Modified of its heartbeat
        self.skew: float | None = None  # our clock minus the store's, as far as it is known
        self.looked = 0.0
        self.settled: dict[int, Settled] = {}
        self.rows: dict[int, Row] = {}  # one for each settled round; `tokens` are its own
        self.losses = HeldOutLosses()
        self.late: set[tuple[int, str]] = set()
        self.judged: set[int] = set()
        self.fault = self.older_fault = ""

    @property
    def recipe(self) -> Recipe:
        """As the newest epoch that was read has it: replicas may come and go."""
        return self.ledger.run.recipe

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.recipe.fleet()]

    @property
    def unread(self) -> int:
        """Rounds before the oldest that was read."""
        return max(0, self.first - 1)

    def look(self, raw: Raw, budget_seconds: float) -> None:
        raw.has_bucket = True
        deadline = time.monotonic() + budget_seconds
        begins = not self.done
        try:
            self._read_heartbeats(raw)
            if not self.fault:
                self._advance([seen.heartbeat.round for seen in raw.heartbeats.values()], deadline)
                for name, seen in raw.heartbeats.items():
                    if seen.heartbeat.gone:
                        self.losses.add_facts(name, seen.heartbeat.farewell, self.done)
                self._read_older(deadline)
            if not begins or time.monotonic() < deadline:
                self._find_late(deadline)
            if self.done == self.newest < self.recipe.outer.rounds:
                there = self.ledger.committed(self.done + 1)
                raw.delivered = tuple(name for name in self.names if name in there)
        except StoreError as error:
            raw.problems.append(f"the bucket does not answer: {error}")
        except (RunError, StoreRefused) as error:  # after a manifest that is not to be trusted nothing counts
            self.fault = text(error)
        raw.problems += [fault for fault in (self.fault, self.older_fault) if fault]
        raw.settled = dict(self.settled)
        raw.late, raw.behind = frozenset(self.late), self.newest - self.done
        raw.unread = 0 if self.older_fault else self.unread
        raw.heard(None if self.settled_unix is None else self._here(self.settled_unix))

    def _advance(self, claims: list[int], deadline: float) -> None:
        """Read the newest rounds, then those that are settled since; what there is no time for comes next
        time."""
        if self.done >= self.recipe.outer.rounds:
            self.ledger.membership.look()  # it may have got more rounds
        if self.newest <= self.done:
            self.newest = self.ledger.last_round(claims)
        started = self.done
        begin = started + 1 if started else max(1, self.newest - SHOWN + 1)
        for manifest in self.ledger.between(begin, self.newest):
            self._add(manifest, self.ledger)
            if not self.first:
                self.first, self.before = manifest.round, manifest.previous
            self.done = manifest.round
            if started and time.monotonic() > deadline:
                break
        if self.done > started:
            self.settled_unix = self.ledger.settled_at(self.done)

    def _read_older(self, deadline: float) -> None:
        while self.first > 1 and not self.older_fault and time.monotonic() < deadline:
            begin = max(1, self.first - SHOWN)
            self.older.chain[self.first - 1] = self.before  # so that the link between the two is checked
            try:
                read = list(self.older.between(begin, self.first - 1))
            except (RunError, StoreRefused) as error:
                if isinstance(error, StoreError):
                    raise
                self.older_fault = text(error)
                return
            for manifest in read:
                self._add(manifest, self.older)
            self.first, self.before = begin, read[0].previous

    def _add(self, manifest: Manifest, ledger: Ledger) -> None:
        before = ledger.known(manifest.round - 1)
        self.settled[manifest.round] = Settled(
            manifest.round,
            tuple(entry.replica for entry in manifest.entries),
            {text(name, 80): text(reason) for name, reason in manifest.refused},
            before.members if before else tuple(self.names),
            manifest.seconds if math.isfinite(manifest.seconds) else 0.0,
            {text(name, 80): score for name, score in manifest.scores},
        )
        self.losses.add(manifest)
        row = Row.from_manifest(self.recipe, manifest, 0)
        self.rows[manifest.round] = clean_rows([row], self.recipe)[0][0]

    def _read_heartbeats(self, raw: Raw) -> None:
        now, before = self.wall(), dict(self.modified)
        beats, waits = self.ledger.heartbeats(now - (self.skew or 0.0))
        for name, (_, modified) in beats.items():
            fresh = name in before and before[name] != modified and now - self.looked < CLOSE_LOOKS
            if fresh:  # written between our last look and this one: it tells how far the clocks are apart
                gap = now - modified
                self.skew = gap if self.skew is None else min(self.skew, gap)
            self.modified[name] = modified
        self.looked = now
        for name, (heartbeat, modified) in beats.items():
            raw.heartbeats[name] = SeenHeartbeat(heartbeat, self._here(modified))
            raw.heard(raw.heartbeats[name].seen_unix)
        for name, (said, written) in waits.items():
            last = beats[name][0] if name in beats else Heartbeat()
            told = said_by_launcher(last, said)
            raw.heartbeats[name] = SeenHeartbeat(told, self._here(written))
            raw.heard(raw.heartbeats[name].seen_unix)

    def _here(self, store_unix: float) -> float:
        """A time of the store by this machine's clock, and never in the future."""
        return min(self.wall(), store_unix + (self.skew or 0.0))

    def _find_late(self, deadline: float) -> None:
        """Updates that were delivered and did not count, because their round was settled without them."""
        for t in range(self.done, max(self.first, self.done - SHOWN + 1, 1) - 1, -1):
            if t in self.judged or time.monotonic() > deadline:
                continue
            known = {*self.settled[t].counted, *self.settled[t].refused}
            missing = [name for name in self.names if name not in known and (t, name) not in self.late]
            if missing:
                there = self.ledger.committed(t)
                self.late |= {(t, name) for name in missing if name in there}
            if t <= self.done - UNSETTLED:
                self.judged.add(t)

    def all_rows(self) -> list[Row]:
        """Rows as `train` writes them, with the held-out losses that a member has measured and without bias.
        Of rounds that are not read yet, all are taken to have contributed."""
        tokens, found = self.unread * self.recipe.round_tokens, []
        for t in range(self.first, self.done + 1) if self.done else ():
            tokens += self.rows[t].tokens
            found.append(replace(self.losses.filled(self.rows[t]), tokens=tokens))
        return found if self.unread else [*self.losses.untrained(self.recipe), *found]
