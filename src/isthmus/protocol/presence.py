"""Who is still there: the replicas' heartbeats as one closer hears them."""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from isthmus.errors import RunStopped
from isthmus.protocol.heartbeat import BEHIND, WAITING, Heartbeat, silent_after
from isthmus.protocol.ledger import Ledger

if TYPE_CHECKING:
    from isthmus.store import Info

STARTING_SECONDS = 60.0  # in round 1, a replica without a heartbeat may still be starting for so long
CLOCK_ERROR_SECONDS = 2.0  # the store's clock is right to about a second
SCAN_SECONDS = 1.0  # between two listings of all heartbeats, at least
OPENING_SECONDS = 30.0  # between two looks at when the open round was opened
BACK_OFF_SECONDS = 6.0  # the longest that a client waits before it tries the store again, and a little
LENGTHS = 5  # rounds whose lengths are looked at
WATCHED = 2  # of a silence, the last so many of the recipe's heartbeat intervals are watched
MOST_INCARNATIONS = 64  # of a replica that are remembered


class Presence:
    """Listens to the heartbeats of all replicas; times are the store's, waiting goes by `clock`.

    Who may write to the bucket can put an old heartbeat there again, or give it another date, and needs no
    key for it. So a heartbeat is a sign of life only once: when its counter has grown since its incarnation
    was last heard. One from the future is none.

    One listing shows which heartbeats were written since the last one, and only those are read, of replicas
    that somebody waits for. A listing may lag, so nobody is held for silent without being asked for once.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger, self.clock = ledger, clock
        self.recipe, self.own = ledger.run.recipe, ledger.signer.replica
        self.beats: dict[str, dict[str, int]] = {}  # replica -> incarnation -> the highest beat heard
        self.last: dict[str, tuple[Heartbeat, float]] = {}  # replica -> its last sign of life, when written
        self.ended: dict[str, str] = {}  # replica -> the incarnation that has ended, as its launcher says
        self.heard_in: dict[str, dict[str, int]] = {}  # replica -> such an incarnation -> in which round
        self.answers: dict[str, tuple[float, bool]] = {}  # replica -> (when we looked, was it alive)
        self.silences: dict[str, tuple[float | None, float]] = {}  # replica -> (its last beat, since when)
        self.asked: dict[str, float] = {}  # replica -> the silence in which it was read all the same
        self.listed: dict[tuple[str, str], Info] = {}  # (replica, live or waiting) -> as last listed
        self.read: dict[tuple[str, str], Info | None] = {}  # the same, when it was last read
        self.scanned = -math.inf  # when it was last listed
        self.opening = 0, 0.0, -math.inf  # (round, when it was opened, when we looked)

    def look_again(self) -> None:
        """The next question is put to the store, whatever was heard a moment ago."""
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
        """When the round before was settled, by the store's clock."""
        known, settled, looked = self.opening
        if known != round_number or self.clock() - looked > OPENING_SECONDS:
            settled = self.ledger.settled_at(round_number - 1)
            if settled is None:
                raise RunStopped(f"the document before round {round_number} is gone; the run stops here")
            self.opening = round_number, settled, self.clock()
        return settled

    def lengths(self, round_number: int) -> list[float]:
        """How long the rounds just before this one took, by the store's clock and nobody's word."""
        times = [self.ledger.settled_at(t) for t in range(max(0, round_number - 1 - LENGTHS), round_number)]
        known = [time for time in times if time is not None]
        return [after - before for before, after in pairwise(known)]

    def absence(self, round_number: int) -> float:
        """How long a round was open before we came. The others may have been away for all of that time.

        Counted from the last time that our start before this one read the store's clock: a replica that
        starts again and again must not put off a round for ever.
        """
        read, since = self.ledger.store.head(self.clock_key), self.opened(round_number)
        since = max(since, read.modified_unix_seconds) if read else since
        return self.store_now() - since

    # Heartbeats

    def scan(self) -> None:
        """List all heartbeats, unless that was done a moment ago."""
        if self.clock() - self.scanned >= min(SCAN_SECONDS, self.recipe.bucket.heartbeat_seconds):
            self.listed = self.ledger.scan_heartbeats()
            self.scanned = self.clock()

    def hear(self, name: str) -> tuple[Heartbeat, float] | None:
        """(its last sign of life, when that was written), or None if it never gave one."""
        self.read[name, "live"] = self.listed.get((name, "live"))
        found = self.ledger.heartbeat(name)
        if found is None:
            return self.last.get(name)
        (heartbeat, written), known = found, self.beats.setdefault(name, {})
        before = known.get(heartbeat.incarnation, -1)
        if heartbeat.beat > before and not self._in_future(written):
            known.pop(heartbeat.incarnation, None)
            known[heartbeat.incarnation] = heartbeat.beat  # last: the one heard longest ago comes first
            if len(known) > MOST_INCARNATIONS:
                del known[next(iter(known))]
            self.last[name] = found
        elif name in self.last and self.last[name][0] == heartbeat:
            self.last[name] = heartbeat, min(written, self.last[name][1])
        return self.last.get(name)

    def _in_future(self, written: float) -> bool:
        if written <= self.store_now() + CLOCK_ERROR_SECONDS:
            return False
        self.ledger.store.doubt_clock()
        return written > self.store_now() + CLOCK_ERROR_SECONDS

    def _is_new(self, name: str, document: str = "live") -> bool:
        """Was it written since we read it, as far as the listing knows?"""
        which = name, document
        return which in self.listed and self.read.get(which) != self.listed[which]

    def has_ended(self, name: str) -> bool:
        """Does the replica's launcher say that the worker we last heard of has ended? No times are compared:
        a heartbeat of another incarnation makes the replica live again."""
        if self._is_new(name, WAITING):
            self.read[name, WAITING] = self.listed[name, WAITING]
            if found := self.ledger.heartbeat(name, WAITING):
                self.ended[name] = found[0].incarnation
        if not (ended := self.ended.get(name)):
            return False
        if self._is_new(name):
            self.hear(name)
        return name in self.last and self.last[name][0].incarnation == ended

    def was_down(self, name: str, round_number: int) -> bool:
        """Has a worker of it ended since the round was opened? It may beat again by now, but trains the round
        late. A launcher's word counts in one round: who may write to the bucket can put it there again."""
        if self.has_ended(name):
            self._note_end(name, round_number)
            return True
        said = self.read.get((name, WAITING))
        if said is None or not self.ended.get(name) or self._note_end(name, round_number) != round_number:
            return False
        return said.modified_unix_seconds >= self.opened(round_number)

    def _note_end(self, name: str, round_number: int) -> int:
        """The round in which we first heard that this incarnation has ended."""
        known = self.heard_in.setdefault(name, {})
        first = known.setdefault(self.ended[name], round_number)
        if len(known) > MOST_INCARNATIONS:
            del known[next(iter(known))]
        return first

    def any_alive(self, names: Iterable[str], round_number: int) -> bool:
        """Is one of them alive? Who was, a moment ago, is asked first, and then nobody else is asked; but of
        all who have fallen silent it is noted since when."""
        self.scan()
        waiting = sorted(names, key=lambda name: not self.answers.get(name, (0.0, False))[1])
        found = False
        for name in waiting:
            if not found or not self._is_new(name):
                found |= self.alive(name, round_number)
        return found

    def in_step_of(self, names: Iterable[str]) -> list[str]:
        """Who of them said a short while ago that it trains or delivers. Who starts or catches up may give to
        the next round, but cannot begin it with the others."""
        self.scan()
        return self._asked(self._in_step, names)

    def _in_step(self, name: str) -> bool:
        if (name, "live") not in self.listed or self.has_ended(name):
            return False
        heard = self.hear(name) if self._is_new(name) else self.last.get(name)
        return self._is_fresh(heard) and not self.is_behind(name)

    def is_behind(self, name: str) -> bool:
        heard = self.last.get(name)
        if heard is None:
            return False
        return heard[0].state in BEHIND or heard[0].leaving or heard[0].gone or heard[0].stuck

    def alive_of(self, names: Iterable[str], round_number: int) -> list[str]:
        """All of them that are alive."""
        self.scan()
        return self._asked(lambda name: self.alive(name, round_number), names)

    def ended_of(self, names: Iterable[str]) -> list[str]:
        """All of them whose workers have ended, as their launchers say."""
        self.scan()
        return self._asked(self.has_ended, names)

    def down_of(self, names: Iterable[str], round_number: int) -> list[str]:
        """All of them whose workers have ended in this round, be they back or not."""
        self.scan()
        return self._asked(lambda name: self.was_down(name, round_number), names)

    def _asked(self, question: Callable[[str], bool], names: Iterable[str]) -> list[str]:
        """Of whom the answer is yes; several are asked at a time."""
        names = list(names)
        answers = self.ledger.store.together([partial(question, name) for name in names])
        return [name for name, yes in zip(names, answers, strict=True) if yes]

    def alive(self, name: str, round_number: int) -> bool:
        """Does the replica's heartbeat still come? It is read at most once in a heartbeat's time.

        A replica is silent when no heartbeat came for as long as its last one allows, and the last two
        intervals of that while we watched. When the store was away nobody's heartbeat came through, and the
        first to return must not take the others for dead.
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
        answer = answer and not (heard and (heard[0].leaving or heard[0].stuck))
        self.answers[name] = self.clock(), answer
        return answer

    def _answer(self, name: str, heard: tuple[Heartbeat, float] | None, round_number: int) -> bool:
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

    def _is_fresh(self, heard: tuple[Heartbeat, float] | None) -> bool:
        """Is it too early to call it silent, and even to watch whether it is?"""
        if heard is None:
            return False
        limit = silent_after(self.recipe, heard[0]) - WATCHED * self.recipe.bucket.heartbeat_seconds
        return self.store_now() - heard[1] < limit + CLOCK_ERROR_SECONDS
