"""Poll a run's bucket: heartbeats, the open round, and the settled rounds.

It only reads. Everything it returns has passed the ledger's checks: signatures, chain, sizes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from isthmus.config import Recipe
from isthmus.errors import ConfigError, RunError
from isthmus.page.parts import text
from isthmus.page.source import Raw, Settled
from isthmus.protocol.fleet_state import Sign, member_states, read_signs
from isthmus.protocol.ledger import Ledger, Manifest, read_run
from isthmus.runlog import Row
from isthmus.runlog.held_out import HeldOutLosses
from isthmus.store.objects import open_store
from isthmus.store.retry import StoreError, StoreRefused

CLOSE_LOOKS = 10.0  # largest time between two polls for a change between them to show the store's clock
UNSETTLED = 3  # rounds back for which late updates are still polled
SHOWN = 60  # rounds that the page shows one by one, and so the first read


def open_bucket(url: str, wall: Callable[[], float] = time.time) -> "BucketReader":
    store = open_store(url, create=False)
    try:
        return BucketReader(Ledger(store, read_run(store)), wall)
    except (StoreError, StoreRefused) as reason:
        raise ConfigError(str(reason)) from None


class BucketReader:
    """The page's knowledge of a bucket; each poll requests only what may have changed.

    It begins with the newest rounds and follows the run from there. It reads older rounds when there is time,
    newest first.
    """

    def __init__(self, ledger: Ledger, wall: Callable[[], float] = time.time) -> None:
        self.ledger, self.wall = ledger, wall
        self.older = Ledger(ledger.store, ledger.run)  # each caches only what it last read
        self.run_id = ledger.run.run_id
        self.first = self.done = 0  # the oldest and the newest manifest read, with all between
        self.newest = 0  # the newest round known to exist
        self.settled_unix: float | None = None
        self.modified: dict[str, float] = {}  # replica -> Last-Modified of its heartbeat
        self.skew: float | None = None  # our clock minus the store's, as far as it is known
        self.looked = 0.0
        self.signs: dict[str, Sign] = {}  # from the last answer of the bucket
        self.members_unix: float | None = None  # time of that answer
        self.silent_unix: float | None = None  # when it stopped answering
        self.settled: dict[int, Settled] = {}
        self.rows: dict[int, Row] = {}  # one per settled round; `tokens` counts that round only
        self.losses = HeldOutLosses()
        self.late: set[tuple[int, str]] = set()
        self.judged: set[int] = set()
        self.fault = self.older_fault = ""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the newest epoch read: replicas may come and go."""
        return self.ledger.run.recipe

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.recipe.fleet()]

    @property
    def unread(self) -> int:
        """The number of rounds before the oldest one read."""
        return max(0, self.first - 1)

    def look(self, raw: Raw, budget_seconds: float) -> None:
        raw.has_bucket = True
        deadline = time.monotonic() + budget_seconds
        begins = not self.done
        try:
            self._read_signs()
            if not self.fault:
                self._advance(deadline)
                for name, (heartbeat, _) in self.signs.items():
                    if heartbeat.gone:
                        self.losses.add_facts(name, heartbeat.farewell, self.done)
                self._read_older(deadline)
            if not begins or time.monotonic() < deadline:
                self._find_late(deadline)
            if self.done == self.newest < self.recipe.outer.rounds:
                there = self.ledger.committed(self.done + 1)
                raw.delivered = tuple(name for name in self.names if name in there)
            self.silent_unix = None
        except StoreError as error:
            self.silent_unix = self.silent_unix or self.wall()
            raw.problems.append(f"the bucket does not answer: {error}")
        except (RunError, StoreRefused) as error:  # ignore everything after a manifest that fails its checks
            self.fault = text(error)
        raw.problems += [fault for fault in (self.fault, self.older_fault) if fault]
        raw.settled = dict(self.settled)
        raw.late, raw.behind = frozenset(self.late), self.newest - self.done
        raw.unread = 0 if self.older_fault else self.unread
        # While the bucket is silent, keep its last known state.
        raw.members_unix, raw.silent_unix = self.members_unix, self.silent_unix
        now = (self.members_unix if self.silent_unix else None) or self.wall()
        if self.members_unix is not None:
            run = self.ledger.run
            signs = {name: (beat, self._here(at)) for name, (beat, at) in self.signs.items()}
            raw.members = member_states(run.recipe, signs, now, raw.delivered, run.closers)
        for written in (self.settled_unix, *(at for _, at in self.signs.values())):
            raw.heard(None if written is None else self._here(written))

    def _advance(self, deadline: float) -> None:
        """Read the newest rounds, then those settled since; the next poll continues after the deadline."""
        if self.done >= self.recipe.outer.rounds:
            self.ledger.look()  # `extend` may have added rounds
        if self.newest <= self.done:
            self.newest = self.ledger.last_round()
        started = self.done
        begin = started + 1 if started else max(1, self.newest - SHOWN + 1)
        for manifest in self.ledger.between(begin, self.newest):
            self._add(manifest, self.ledger)
            if not self.first:
                self.first = manifest.round
            self.done = manifest.round
            if started and time.monotonic() > deadline:
                break
        if self.done > started:
            self.settled_unix = self.ledger.settled_at(self.done)

    def _read_older(self, deadline: float) -> None:
        while self.first > 1 and not self.older_fault and time.monotonic() < deadline:
            begin = max(1, self.first - SHOWN)
            try:
                read = list(self.older.between(begin, self.first - 1))
            except (RunError, StoreRefused) as error:
                if isinstance(error, StoreError):
                    raise
                self.older_fault = text(error)
                return
            for manifest in read:
                self._add(manifest, self.older)
            self.first = begin

    def _add(self, manifest: Manifest, ledger: Ledger) -> None:
        before = ledger.manifest(manifest.round - 1)
        self.settled[manifest.round] = Settled(
            manifest.round,
            tuple(entry.replica for entry in manifest.entries),
            {text(name, 80): text(reason) for name, reason in manifest.refused},
            before.members if before else tuple(self.names),
            manifest.seconds if math.isfinite(manifest.seconds) else 0.0,
        )
        self.losses.add(manifest)
        self.rows[manifest.round] = Row.from_manifest(self.recipe, manifest, 0)

    def _read_signs(self) -> None:
        now, before = self.wall(), dict(self.modified)
        self.signs = read_signs(self.ledger, now - (self.skew or 0.0))
        for name, (_, modified) in self.signs.items():
            fresh = name in before and before[name] != modified and now - self.looked < CLOSE_LOOKS
            if fresh:  # written between our last two polls, so it shows the difference of the clocks
                gap = now - modified
                self.skew = gap if self.skew is None else min(self.skew, gap)
            self.modified[name] = modified
        self.looked = self.members_unix = now

    def _here(self, store_unix: float) -> float:
        """Convert a time of the store to this machine's clock, but never into the future."""
        return min(self.wall(), store_unix + (self.skew or 0.0))

    def _find_late(self, deadline: float) -> None:
        """Find updates that were delivered but do not count, because their round was settled without them."""
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
        """Return rows as `train` writes them, with members' held-out losses. Unread rounds
        are taken to include all replicas."""
        tokens, found = self.unread * self.recipe.round_tokens, []
        for t in range(self.first, self.done + 1) if self.done else ():
            tokens += self.rows[t].tokens
            found.append(replace(self.losses.filled(self.rows[t]), tokens=tokens))
        return found if self.unread else [*self.losses.untrained(self.recipe), *found]
