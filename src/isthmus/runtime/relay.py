"""A relay between stages that cannot reach each other: it pairs connections, and cannot read their data.

An end greets it with its replica's key (`runtime.greeting`), and waits until the other end has come. Then the
two ends use TLS with each other. One thread serves all: an idle or waiting connection costs a socket, and a
pair costs two buffers.
"""

import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus.crowd import Crowd, party
from isthmus.runtime.addresses import keep_alive, listen
from isthmus.runtime.greeting import GREETING_BYTES, GUEST, HOST, MAGIC, NONCE_BYTES, PAIRED, understood
from isthmus.runtime.rare_notes import Log, RareNotes

PORT = 29520
BUFFER_BYTES = 2**18  # for one direction of a pair
MOST_WAITING, MOST_WAITING_OF_ONE = 1024, 64  # unpaired connections; from one address
MOST_PAIRS, MOST_PAIRS_OF_ONE = 512, 64
MOST_FILES = MOST_WAITING + 2 * MOST_PAIRS + 64  # files that all this needs, with a margin
GUEST_SECONDS = 5.0  # a guest's wait for its host
HOST_SECONDS = 24 * 3600.0
IDLE_SECONDS = 120.0  # of a pair: a link sends a heartbeat every second
SWEEP_SECONDS = 0.5


@dataclass(eq=False, slots=True)
class Connection:
    link: socket.socket
    address: str
    nonce: bytes
    said: bytes = b""
    meeting: bytes = b""  # once its greeting is complete
    role: bytes = b""  # HOST waits for GUEST
    other: "Connection | None" = None  # once it is paired
    waiting: bytearray = field(default_factory=bytearray)  # data from `other` to be sent here
    ended: bool = False  # its end sends no more
    last: float = 0.0


class Relay:
    """Serves at one port until the caller is interrupted."""

    def __init__(
        self,
        host: str,
        port: int,
        log: Log = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        files: int = MOST_FILES,
    ) -> None:
        """`files` is how many files this process may open. With fewer, all limits shrink: if the system
        refuses a connection, the relay cannot make room for it."""
        self.notes, self.clock = RareNotes(log, clock), clock
        self.scale = min(1.0, files / MOST_FILES)
        self.listener = listen(host, port, "give an address of this machine and a free port")
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.crowd = Crowd(self._scaled(MOST_WAITING), self._scaled(MOST_WAITING_OF_ONE), clock)
        self.connections: set[Connection] = set()
        self.meetings: dict[tuple[bytes, bytes], deque[Connection]] = {}  # (meeting, role) -> those waiting
        self.pairs: Counter[str] = Counter()  # by the guest's address
        self.carried = 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.stopped = False

    def serve(self) -> None:
        try:
            while not self.stopped:
                self.turn(SWEEP_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        for connection in list(self.connections):
            self._drop(connection)
        self.selector.close()
        self.listener.close()

    def turn(self, seconds: float) -> None:
        """Do everything that is possible now or within these seconds."""
        for key, events in self.selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self.connections:  # not dropped in this turn
                try:
                    self._serve(key.data, events)
                except BlockingIOError:
                    pass
                except OSError:
                    self._drop(key.data)
        self.crowd.sweep()
        now = self.clock()
        for each in [each for each in self.connections if each.other and now - each.last > IDLE_SECONDS]:
            self._drop(each)

    def _accept(self) -> None:
        with suppress(OSError):
            link, address = self.listener.accept()
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(link)
            connection = Connection(link, party(str(address[0])), os.urandom(NONCE_BYTES), last=self.clock())
            link.send(connection.nonce)  # a new connection has buffer space for it
            visit = self.crowd.enter(link, str(address[0]))
            if visit is None:
                link.close()
                return
            visit.request()
            self.connections.add(connection)
            self.selector.register(link, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        if connection.other:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and not connection.ended:
                self._carry(connection, connection.other)
        else:
            self._hear(connection)

    def _hear(self, connection: Connection) -> None:
        """Read the greeting; drop a connection that sends anything else, or more before it is paired."""
        data = connection.link.recv(GREETING_BYTES + 1 - len(connection.said))
        connection.said += data
        said = connection.said
        if not data or len(said) > GREETING_BYTES or not MAGIC.startswith(said[: len(MAGIC)]):
            self._drop(connection)
        elif len(said) == GREETING_BYTES and not connection.meeting:
            if found := understood(said, connection.nonce):
                connection.role, connection.meeting = found
                self._meet(connection)
            else:
                self._drop(connection)

    def _meet(self, connection: Connection) -> None:
        wanted = HOST if connection.role == GUEST else GUEST
        others = self.meetings.get((connection.meeting, wanted))
        if others:
            host, guest = sorted((connection, others.popleft()), key=lambda each: each.role == GUEST)
            if not others:
                del self.meetings[connection.meeting, wanted]
            self._pair(host, guest)
            return
        self.meetings.setdefault((connection.meeting, connection.role), deque()).append(connection)
        self.crowd.of(connection.link).keep(GUEST_SECONDS if connection.role == GUEST else HOST_SECONDS)

    def _scaled(self, bound: int) -> int:
        return max(2, int(bound * self.scale))

    def _pair(self, host: Connection, guest: Connection) -> None:
        if not self._has_room(guest.address):
            self.notes.say(f"no room for one more pair, of {guest.address}")
            self._drop(guest)
            self._meet(host)
            return
        self.pairs[guest.address] += 1
        for one, other in ((host, guest), (guest, host)):
            self.crowd.leave(one.link)
            one.other, one.last = other, self.clock()
            one.waiting += PAIRED
            self._watch(one)

    def _has_room(self, address: str) -> bool:
        """Whether there is room for a guest's pair. If all places are taken, drop the longest-silent pair of
        the address with the most, if that has at least two more than the newcomer's."""
        if self.pairs[address] >= self._scaled(MOST_PAIRS_OF_ONE):
            return False
        if self.pairs.total() < self._scaled(MOST_PAIRS):
            return True
        crowded, count = self.pairs.most_common(1)[0]
        if count <= self.pairs[address] + 1:
            return False
        theirs = [each for each in self.connections if each.other and each.role == GUEST]
        self._drop(min((each for each in theirs if each.address == crowded), key=lambda each: each.last))
        return True

    def _carry(self, source: Connection, sink: Connection) -> None:
        data = source.link.recv(BUFFER_BYTES - len(sink.waiting))
        source.last = sink.last = self.clock()
        self.carried += len(data)
        source.ended = not data
        sink.waiting += data
        self._flush(sink)
        self._watch(source)

    def _flush(self, sink: Connection) -> None:
        """Send what waits; most often it is sent at once and no data is kept."""
        if sink.waiting:
            with suppress(BlockingIOError):
                sent = sink.link.send(sink.waiting)
                del sink.waiting[:sent]
        source = sink.other
        assert source
        if source.ended and not sink.waiting:
            self._drop(sink)  # drops both: a stage hangs up once it has seen the other's end
            return
        self._watch(sink)
        self._watch(source)

    def _watch(self, connection: Connection) -> None:
        """Read from a side while the other has buffer space, and write to it while data waits."""
        if connection not in self.connections:
            return
        other = connection.other
        room = other is None or len(other.waiting) < BUFFER_BYTES
        reads = selectors.EVENT_READ if room and not connection.ended else 0
        events = reads | (selectors.EVENT_WRITE if connection.waiting else 0)
        known = connection.link.fileno() in self.selector.get_map()
        if events and known:
            self.selector.modify(connection.link, events, connection)
        elif events:
            self.selector.register(connection.link, events, connection)
        elif known:
            self.selector.unregister(connection.link)

    def _drop(self, connection: Connection) -> None:
        """Drop a connection and its partner."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.crowd.leave(connection.link)
        if connection.link.fileno() in self.selector.get_map():
            self.selector.unregister(connection.link)
        connection.link.close()
        waiting = self.meetings.get((connection.meeting, connection.role), deque())
        with suppress(ValueError):  # it may not be waiting any more
            waiting.remove(connection)
            if not waiting:
                del self.meetings[connection.meeting, connection.role]
        if connection.other:
            if connection.role == GUEST:
                self.pairs -= Counter([connection.address])  # keeps no zeros
            self._drop(connection.other)
