"""The crowd at a port: however many strangers come, and however slowly they speak, the next one is served.

Every connection is a visit, and every visit has a time by which it must have done something whole: sent a
request, taken an answer, or asked again. Bytes that trickle in do not move that time. Where there is no room,
the oldest visit of the address that holds the most goes, and never the newcomer. The server's own loop calls
`sweep`, so there is no thread and the clock can be a test's. Standard library only.
"""

import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

REQUEST_SECONDS = 10.0  # a whole request, from its first byte; and an answer of no length
IDLE_SECONDS = 30.0  # of a connection between two requests
LEAST_RATE = 8192  # bytes per second at which an answer is taken at least
LINGERING = 4  # visits that were cut and whose threads still end, as a multiple of those that may be there


class Visit:
    """One connection. Its thread says what it does next, and so how long it may stay."""

    def __init__(self, link: socket.socket, party: str, clock: Callable[[], float]) -> None:
        self.link, self.party, self._clock = link, party, clock
        self.cut = False
        self.idle()

    def idle(self) -> None:
        """Between two requests: it goes first where room is needed."""
        self._stay(0, IDLE_SECONDS)

    def request(self) -> None:
        """The first byte of a request has come; all of it, and the work for it, in this time."""
        self._stay(1, REQUEST_SECONDS)

    def answer(self, num_bytes: int) -> None:
        self._stay(1, REQUEST_SECONDS + num_bytes / LEAST_RATE)

    def keep(self, seconds: float) -> None:
        """What was agreed on: it has so long, and does not make room for others."""
        self._stay(2, seconds)

    def _stay(self, rank: int, seconds: float) -> None:
        now = self._clock()
        self.weight = (rank, now)  # the smallest goes first
        self.until = now + seconds


class Crowd:
    """Who is there now. `most` in all, `most_each` from one address."""

    def __init__(self, most: int, most_each: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.most_each, self.clock = most, most_each, clock
        self._visits: dict[socket.socket, Visit] = {}
        self._lock = threading.Lock()

    def enter(self, link: socket.socket, address: str) -> Visit | None:
        """The newcomer's visit, for which another may have to go; None where too many have not ended yet."""
        visit = Visit(link, party(address), self.clock)
        with self._lock:
            if len(self._visits) >= LINGERING * self.most:
                return None
            self._visits[link] = visit
            there = Counter(each.party for each in self._visits.values() if not each.cut)
            if there[visit.party] > self.most_each:
                self._make_room(visit, visit.party)
            elif there.total() > self.most:
                there[visit.party] -= 1
                self._make_room(visit, max(there, key=there.__getitem__))
        return visit

    def of(self, link: socket.socket) -> Visit:
        with self._lock:
            return self._visits[link]

    def leave(self, link: socket.socket) -> None:
        with self._lock:
            self._visits.pop(link, None)

    def sweep(self) -> None:
        """Hang up on those whose time is over."""
        with self._lock:
            now = self.clock()
            for visit in self._visits.values():
                if not visit.cut and now > visit.until:
                    _cut(visit)

    def _make_room(self, newcomer: Visit, of_party: str) -> None:
        others = [v for v in self._visits.values() if v.party == of_party and not v.cut and v is not newcomer]
        _cut(min(others, key=lambda visit: visit.weight))


def _cut(visit: Visit) -> None:
    visit.cut = True
    with suppress(OSError):  # it has gone already
        visit.link.shutdown(socket.SHUT_RDWR)  # wakes its thread, whether it reads or writes


def party(address: str) -> str:
    """Who counts as one: an IPv4 address, or the 64 bits that one customer gets of IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
