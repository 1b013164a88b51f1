"""The replicas that still run, according to the heartbeats that one closer reads."""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from isthmus.errors import RunStopped
from isthmus.protocol.heartbeat import BEHIND, LIVE, WAITING, Beat, silent_after
from isthmus.protocol.ledger import Ledger
from isthmus.store.together import together

if TYPE_CHECKING:
    from isthmus.store import Info

STARTING_SECONDS = 60.0  # how long a replica without a heartbeat may still be starting in round 1
CLOCK_ERROR_SECONDS = 2.0  # the store's clock is right to within about a second
SCAN_SECONDS = 1.0  # at least, between two listings of all heartbeats
OPENING_SECONDS = 30.0  # between two checks of when the open round began
BACK_OFF_SECONDS = 6.0  # a client's longest pause before it retries the store, plus a margin
WATCHED = 2  # heartbeat intervals at the end of a silence during which we must have watched


class Presence:
    """Reads the heartbeats of all replicas. Times are the store's; waiting uses `clock`.

    One listing shows which heartbeats are new. It reads only those, and only of replicas that somebody waits
    for. A listing may lag, so a replica counts as silent only after one direct request.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger, self.clock = ledger, clock
        self.recipe, self.own = ledger.run.recipe, ledger.signer.replica
        self.last: dict[str, Beat] = {}  # replica -> its last heartbeat, when written
        self.ended: dict[str, str] = {}  # replica -> the incarnation that ended, by its supervisor
        self.answers: dict[str, tuple[float, bool]] = {}  # replica -> (when we looked, whether it was alive)
        self.silences: dict[str, tuple[float | None, float]] = {}  # replica -> (its last beat, silent since)
        self.asked: dict[str, float] = {}  # replica -> the silence in which we requested it directly
        self.listed: dict[tuple[str, str], Info] = {}  # (replica, live or waiting) -> as last listed
        self.read: dict[tuple[str, str], Info | None] = {}  # the same as of the last read
        self.scanned = -math.inf  # when heartbeats were last listed
        self.names: frozenset[str] = frozenset()  # the replicas in the last listing
        self.opening = 0, 0.0, -math.inf  # (round, when it was opened, when we looked)

    def look_again(self) -> None:
        """Send the next question to the store instead of using a recent listing."""
        self.answers.clear()
        self.opening = 0, 0.0, -math.inf
        self.scanned = -math.inf

    # The store's clock

    @property
    def clock_key(self) -> str:
        return f"members/{self.own}/clock"

    def store_now(self) -> float:
        return self.ledger.store.now(self.clock_key)

    def opened(self, round_number: int) -> float:
        """When the previous round was settled, by the store's clock."""
        known, settled, looked = self.opening
        if known != round_number or self.clock() - looked > OPENING_SECONDS:
            settled = self.ledger.settled_at(round_number - 1)
            if settled is None:
                raise RunStopped(f"the document before round {round_number} is gone; the run stops here")
            self.opening = round_number, settled, self.clock()
        return settled

    def absence(self, round_number: int) -> float:
        """Seconds that a round was open before we came. The others may have been away all that time.

        It counts from when our previous start last read the store's clock: a replica that restarts again and
        again must not delay a round for ever.
        """
        read, since = self.ledger.store.head(self.clock_key), self.opened(round_number)
        since = max(since, read.modified_unix_seconds) if read else since
        return self.store_now() - since

    # Heartbeats

    def scan(self) -> None:
        """List all heartbeats, unless the last listing is recent and no replica was admitted since."""
        every = min(SCAN_SECONDS, self.recipe.bucket.heartbeat_seconds)
        if self.clock() - self.scanned >= every or self.names != self.ledger.names:
            self.names = self.ledger.names
            self.listed = self.ledger.scan_heartbeats()
            self.scanned = self.clock()

    def hear(self, name: str) -> Beat | None:
        """(its last heartbeat, when that was written), or None if it never sent one."""
        self.read[name, LIVE] = self.listed.get((name, LIVE))
        found = self.ledger.heartbeat(name)
        if found is None:
            return self.last.get(name)
        if not self._in_future(found[1]):
            self.last[name] = found
        return self.last.get(name)

    def _in_future(self, written: float) -> bool:
        if written <= self.store_now() + CLOCK_ERROR_SECONDS:
            return False
        self.ledger.store.doubt_clock()  # this machine may have slept
        return written > self.store_now() + CLOCK_ERROR_SECONDS

    def _is_new(self, name: str, document: str = LIVE) -> bool:
        """Whether it was written since we read it, as far as the listing shows."""
        which = name, document
        return which in self.listed and self.read.get(which) != self.listed[which]

    def has_ended(self, name: str) -> bool:
        """Whether the replica's supervisor says that the worker we last heard of has ended. It compares no
        times: a heartbeat of another incarnation makes the replica live again."""
        if self._is_new(name, WAITING):
            self.read[name, WAITING] = self.listed[name, WAITING]
            if found := self.ledger.heartbeat(name, WAITING):
                self.ended[name] = found[0].incarnation
        if not (ended := self.ended.get(name)):
            return False
        if self._is_new(name):
            self.hear(name)
        return name in self.last and self.last[name][0].incarnation == ended

    def was_down(self, round_number: int, name: str) -> bool:
        """Whether a worker of it has ended since the round was opened. It may run again by now, but trains
        the round late."""
        if self.has_ended(name):
            return True
        said = self.read.get((name, WAITING))
        if said is None or not self.ended.get(name):
            return False
        return said.modified_unix_seconds >= self.opened(round_number)

    def those(self, question: Callable[[str], bool], names: Iterable[str]) -> list[str]:
        """Names for which `question`, a method of ours, is true; queried in parallel."""
        self.scan()
        names = list(names)
        answers = together([partial(question, name) for name in names])
        return [name for name, yes in zip(names, answers, strict=True) if yes]

    def any_alive(self, names: Iterable[str], round_number: int) -> bool:
        """Whether one of them is alive. It reads new heartbeats only until it finds one. It still notes when
        each silent replica fell silent."""
        self.scan()
        found = False
        for name in sorted(names, key=lambda name: not self.answers.get(name, (0.0, False))[1]):
            if not found or not self._is_new(name):
                found |= self.alive(name, round_number)
        return found

    def in_step(self, name: str) -> bool:
        """Whether it recently said that it trains or delivers. One that starts or catches up may give to
        the next round, but cannot begin it with the others."""
        return self.is_here(name) and not self.is_behind(name)

    def is_here(self, name: str) -> bool:
        """Whether it has a recent heartbeat, whatever it does."""
        if (name, LIVE) not in self.listed or self.has_ended(name):
            return False
        heard = self.hear(name) if self._is_new(name) else self.last.get(name)
        return heard is not None and self._is_fresh(heard) and not (heard[0].leaving or heard[0].gone)

    def is_behind(self, name: str) -> bool:
        heard = self.last.get(name)
        return heard is not None and (heard[0].state in BEHIND or heard[0].leaving or heard[0].gone)

    def alive(self, name: str, round_number: int) -> bool:
        """Whether the replica still sends heartbeats.

        A replica is silent once no heartbeat came for as long as its last one allows, and we watched the last
        two intervals of that. While the store is down no heartbeat gets through, and the first replica to
        return must not take the others for dead.
        """
        self.scan()
        if self.has_ended(name):
            self.answers.pop(name, None)
            return False
        looked, answer = self.answers.get(name, (-math.inf, True))
        if self.clock() - looked < self.recipe.bucket.heartbeat_seconds:
            return answer
        heard = self.hear(name) if self._is_new(name) else self.last.get(name)
        answer = self._answer(name, heard, round_number)
        if not answer and self.asked.get(name) != self.silences[name][1]:
            self.asked[name] = self.silences[name][1]
            heard = self.hear(name)  # the listing may lag
            answer = self._answer(name, heard, round_number)
        answer = answer and not (heard and heard[0].leaving)
        self.answers[name] = self.clock(), answer
        return answer

    def _answer(self, name: str, heard: Beat | None, round_number: int) -> bool:
        starting = heard is None and round_number == 1
        if self._is_fresh(heard) or (starting and self.store_now() - self.opened(1) < STARTING_SECONDS):
            self.silences.pop(name, None)
            return True
        now, written = self.clock(), heard and heard[1]
        before, since = self.silences.get(name, (written, now))
        since = since if before == written else now
        self.silences[name] = written, since
        watched = now - since >= WATCHED * self.recipe.bucket.heartbeat_seconds
        return not watched or self.ledger.store.seconds_since_return < BACK_OFF_SECONDS

    def _is_fresh(self, heard: Beat | None) -> bool:
        """Whether it is too early even to watch for silence."""
        if heard is None:
            return False
        limit = silent_after(self.recipe, heard[0]) - WATCHED * self.recipe.bucket.heartbeat_seconds
        return self.store_now() - heard[1] < limit + CLOCK_ERROR_SECONDS
