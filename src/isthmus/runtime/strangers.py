"""Limits on what strangers can use at a port: places for handshakes, and handshakes per second.

A newcomer always gets a place. If all are taken, a random connection of the fullest address loses its own:
turning newcomers away would lock out honest ones for as long as a flood lasts.
"""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from isthmus.crowd import party

MOST_PENDING, MOST_PENDING_OF_ONE = 32, 8  # handshakes at a time; from one address
HANDSHAKE_SECONDS = 5.0
HANDSHAKES_PER_SECOND = BURST = 100.0  # each costs about a millisecond of a core
ENDING = 4  # limit on ending threads with a cut connection, as a multiple of MOST_PENDING

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pending:
    """A connection that is not yet authenticated."""

    link: socket.socket
    party: str
    until: float


class HandshakeLimiter:
    """The handshakes in progress at one port."""

    def __init__(
        self,
        clock: Clock = time.monotonic,
        choose: Callable[[Sequence[Pending]], Pending] = random.choice,
    ) -> None:
        self.clock, self.choose = clock, choose
        self.pending: dict[socket.socket, Pending] = {}
        self.num_threads = 0
        self.tokens, self.filled_at = BURST, clock()
        self.lock = threading.Lock()

    def enter(self, link: socket.socket, address: str) -> bool:
        """Give a newcomer a place. False if too many threads are still ending; then close it."""
        newcomer = Pending(link, party(address), self.clock() + HANDSHAKE_SECONDS)
        with self.lock:
            if self.num_threads >= ENDING * MOST_PENDING:
                return False
            self.num_threads += 1
            there = Counter(each.party for each in self.pending.values())
            crowded = newcomer.party
            if there[crowded] < MOST_PENDING_OF_ONE:
                crowded = max(there, key=there.__getitem__) if there.total() >= MOST_PENDING else ""
            if crowded:
                self._cut(self.choose([each for each in self.pending.values() if each.party == crowded]))
            self.pending[link] = newcomer
            return True

    def leave(self, link: socket.socket) -> None:
        """Free its place: its thread has ended, or the connection is authenticated."""
        with self.lock:
            self.num_threads -= 1
            self.pending.pop(link, None)

    def sweep(self) -> None:
        """Cut connections whose time is up. The listener's loop calls this."""
        with self.lock:
            now = self.clock()
            for each in [each for each in self.pending.values() if now > each.until]:
                self._cut(each)

    def pause(self, link: socket.socket) -> float:
        """Seconds to wait before the handshake begins; 0 if it may begin now. ConnectionAbortedError if the
        connection has lost its place."""
        with self.lock:
            if link not in self.pending:
                raise ConnectionAbortedError("made room for others")
            now = self.clock()
            self.tokens = min(BURST, self.tokens + (now - self.filled_at) * HANDSHAKES_PER_SECOND)
            self.filled_at = now
            if self.tokens < 1:
                return (1 - self.tokens) / HANDSHAKES_PER_SECOND
            self.tokens -= 1
            return 0.0

    def _cut(self, victim: Pending) -> None:
        del self.pending[victim.link]
        with suppress(OSError):  # it has already gone
            socket.socket.shutdown(victim.link, socket.SHUT_RDWR)  # wakes its thread
