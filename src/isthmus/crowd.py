"""Connection limits of a port: it serves the next client, however many connect and however slowly they send.

Every connection is a `Visit` with a deadline for its next complete step: send a request, take an answer, or
ask again. Bytes that trickle in do not extend the deadline. If the port is full, a random visit of the
address that holds the most is cut, never the newcomer: turning newcomers away would lock out honest ones for
as long as a flood lasts. The server's own loop calls `sweep`, so this needs no thread and tests can pass
their own clock. Standard library only.
"""

import ipaddress
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

REQUEST_SECONDS = 10.0  # for a whole request, from its first byte, and for an answer without a length
IDLE_SECONDS = 30.0  # for a connection between two requests
LEAST_RATE = 8192  # bytes per second that a client must take of an answer
LINGERING = 4  # cut visits whose threads still end, as a multiple of the visits allowed at once


class Visit:
    """One connection. Its thread reports what it does next, which sets how long it may stay."""

    def __init__(self, link: socket.socket, party: str, clock: Callable[[], float]) -> None:
        self.link, self.party, self._clock = link, party, clock
        self.cut = False
        self.idle()

    def idle(self) -> None:
        """Wait for the next request: idle visits are cut first."""
        self._stay(0, IDLE_SECONDS)

    def request(self) -> None:
        """Start the deadline for the request and its work: its first byte has arrived."""
        self._stay(1, REQUEST_SECONDS)

    def answer(self, num_bytes: int) -> None:
        self._stay(1, REQUEST_SECONDS + num_bytes / LEAST_RATE)

    def keep(self, seconds: float) -> None:
        """Let the connection stay for an agreed time. All others are cut first."""
        self._stay(2, seconds)

    def _stay(self, rank: int, seconds: float) -> None:
        self.rank, self.until = rank, self._clock() + seconds  # the lowest rank is cut first


class Crowd:
    """The connections that are open now: at most `most` in all and `most_each` per address."""

    def __init__(
        self,
        most: int,
        most_each: int,
        clock: Callable[[], float] = time.monotonic,
        choose: Callable[[Sequence[Visit]], Visit] = random.choice,
    ) -> None:
        self.most, self.most_each, self.clock, self.choose = most, most_each, clock, choose
        self._visits: dict[socket.socket, Visit] = {}
        self._lock = threading.Lock()

    def enter(self, link: socket.socket, address: str) -> Visit | None:
        """Admit a newcomer, cutting another visit if need be; None if too many cut visits have not ended
        yet."""
        visit = Visit(link, party(address), self.clock)
        with self._lock:
            if len(self._visits) >= LINGERING * self.most:
                return None
            self._visits[link] = visit
            there = self._by_party()
            if there[visit.party] > self.most_each:
                self._make_room(visit, visit.party)
            elif there.total() > self.most:
                there[visit.party] -= 1
                self._make_room(visit, max(there, key=there.__getitem__))
        return visit

    def of(self, link: socket.socket) -> Visit:
        with self._lock:
            return self._visits[link]

    def by_party(self) -> Counter[str]:
        """How many connections each address has."""
        with self._lock:
            return self._by_party()

    def _by_party(self) -> Counter[str]:
        return Counter(each.party for each in self._visits.values() if not each.cut)

    def leave(self, link: socket.socket) -> None:
        with self._lock:
            self._visits.pop(link, None)

    def sweep(self) -> None:
        """Close the connections whose time is over."""
        with self._lock:
            now = self.clock()
            for visit in self._visits.values():
                if not visit.cut and now > visit.until:
                    _cut(visit)

    def _make_room(self, newcomer: Visit, of_party: str) -> None:
        others = [v for v in self._visits.values() if v.party == of_party and not v.cut and v is not newcomer]
        lowest = min(visit.rank for visit in others)
        _cut(self.choose([visit for visit in others if visit.rank == lowest]))


class Pace:
    """A token bucket: so many steps a second, and as many at once."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self.tokens, self.clock, self.filled_at = per_second, per_second, clock, clock()
        self._lock = threading.Lock()

    def pause(self) -> float:
        """Seconds to wait before asking again; 0 if a step may be taken now."""
        with self._lock:
            now = self.clock()
            self.tokens = min(self.per_second, self.tokens + (now - self.filled_at) * self.per_second)
            self.filled_at = now
            if self.tokens < 1:
                return (1 - self.tokens) / self.per_second
            self.tokens -= 1
            return 0.0


def _cut(visit: Visit) -> None:
    visit.cut = True
    with suppress(OSError):  # already closed
        visit.link.shutdown(socket.SHUT_RDWR)  # wakes its thread, whether it reads or writes


def party(address: str) -> str:
    """Return the key that limits count by: an IPv4 address, or the /64 prefix of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
