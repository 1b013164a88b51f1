"""When to look for the end of a round: rarely before it is due, often around that time."""

import statistics
import time
from collections import deque
from collections.abc import Callable

from isthmus.layout.requests import pause_seconds

REMEMBERED = 3  # rounds; their median is the expected length


class RoundClock:
    """How long rounds take, as this process observes their ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.round, self.ended_at, self.watched = 0, clock(), False
        self.last: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def seconds(self) -> float:
        """Expected seconds of a round; 0 until one was seen from end to end."""
        return statistics.median(self.last) if self.last else 0.0

    def ended(self, round_number: int, watched: bool) -> None:
        """Record the end of a round. `watched`: it was open when we looked the time before."""
        now = self.clock()
        if watched and self.watched and self.round == round_number - 1:
            self.last.append(now - self.ended_at)
        self.round, self.ended_at, self.watched = round_number, now, watched

    def to_due(self, round_number: int) -> float:
        """Seconds until the round should end; 0 if unknown."""
        known = self.seconds and self.round == round_number - 1
        return self.ended_at + self.seconds - self.clock() if known else 0.0

    def pause(self, round_number: int) -> float:
        return pause_seconds(self.to_due(round_number), self.seconds)

    def is_young(self, round_number: int) -> bool:
        """Whether the round opened too recently to be over; True only if we saw the last one end."""
        return self.watched and self.to_due(round_number) > self.seconds / 2
