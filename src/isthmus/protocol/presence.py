"""Who is still there: the replicas' heartbeats as one closer hears them."""

import math
import time
from collections.abc import Callable

from isthmus.errors import RunStopped
from isthmus.protocol.heartbeat import Heartbeat, silent_after
from isthmus.protocol.ledger import Ledger

STARTING_SECONDS = 60.0  # in round 1, a replica without a heartbeat may still be starting for so long
CLOCK_ERROR_SECONDS = 2.0  # the store's clock is right to about a second
PAUSE_SECONDS = 2.0  # without an answer from the store: it may have been away, for the others too
BACK_OFF_SECONDS = 6.0  # the longest that a client waits before it tries the store again, and a little
MOST_INCARNATIONS = 64  # of a replica that are remembered


class Presence:
    """Listens to the heartbeats of all replicas; times are the store's, waiting goes by `clock`.

    Who may write to the bucket can put an old heartbeat there again, or give it another date, and needs no
    key for it. So a heartbeat is a sign of life only once: when its counter has grown since its incarnation
    was last heard. One from the future is none.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger, self.clock = ledger, clock
        self.recipe, self.own = ledger.run.recipe, ledger.signer.replica
        self.beats: dict[str, dict[str, int]] = {}  # replica -> incarnation -> the highest beat heard
        self.last: dict[str, tuple[Heartbeat, float]] = {}  # replica -> its last sign of life, when written
        self.answers: dict[str, tuple[float, bool]] = {}  # replica -> (when we looked, was it alive)
        self.silences: dict[str, tuple[float | None, float]] = {}  # replica -> (its last beat, since when)
        self.answered, self.forgive_until = self.clock(), 0.0

    # The store's clock

    @property
    def clock_key(self) -> str:
        return f"members/{self.own}/clock"

    def store_now(self) -> float:
        return self.ledger.store.now(self.clock_key)

    def opened(self, round_number: int) -> float:
        """When the round before was settled, by the store's clock."""
        settled = self.ledger.settled_at(round_number - 1)
        if settled is None:
            raise RunStopped(f"the document before round {round_number} is gone; the run stops here")
        return settled

    def absence(self, round_number: int) -> float:
        """How long a round was open before we came. The others may have been away for all of that time.

        Counted from the last time that our start before this one read the store's clock: a replica that
        starts again and again must not put off a round for ever.
        """
        read, since = self.ledger.store.head(self.clock_key), self.opened(round_number)
        since = max(since, read.modified_unix_seconds) if read else since
        return self.store_now() - since

    def store_answered(self) -> float:
        """The store answers now. After a pause the others may still be backing off: silence is forgiven."""
        now = self.clock()
        if now - self.answered > PAUSE_SECONDS:
            self.forgive_until = now + BACK_OFF_SECONDS
        self.answered = now
        return now

    # Heartbeats

    def hear(self, name: str) -> tuple[Heartbeat, float] | None:
        """(its last sign of life, when that was written), or None if it never gave one."""
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

    def leaving(self, name: str) -> bool:
        heard = self.hear(name)
        return heard is not None and heard[0].leaving

    def alive(self, name: str, round_number: int) -> bool:
        """Does the replica's heartbeat still come? The store is asked at most once in a heartbeat's time.

        A replica is silent after five missed heartbeats, the last two of them while we watched: when the
        store was away nobody's heartbeat came through, and the first to return must not take the others for
        dead.
        """
        every = self.recipe.bucket.heartbeat_seconds
        looked, answer = self.answers.get(name, (-math.inf, True))
        if self.clock() - looked < every:
            return answer
        heard = self.hear(name)
        written = heard and heard[1]
        if written is not None:
            age = self.store_now() - written
        else:
            age = self.store_now() - self.opened(1) - STARTING_SECONDS if round_number == 1 else math.inf
        now = self.store_answered()
        if age < silent_after(self.recipe) - 2 * every + CLOCK_ERROR_SECONDS:
            self.silences.pop(name, None)
            answer = True
        else:
            before, since = self.silences.get(name, (written, now))
            since = since if before == written else now
            self.silences[name] = written, since
            answer = now - since < 2 * every or now < self.forgive_until
        answer = answer and not (heard and heard[0].leaving)
        self.answers[name] = now, answer
        return answer
