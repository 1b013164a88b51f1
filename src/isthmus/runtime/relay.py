"""A relay between stages that cannot reach each other: it pairs connections, and cannot read what they say.

A stage's gate waits here under 32 bytes that only holders of its replica's key know, and its guest asks for
the same ones (`runtime.addresses`). Whatever they say then, handshake and TLS, passes through. One
thread serves all: who has said nothing yet, or waits, costs a socket, and a pair costs two buffers. Standard
library only.
"""

import resource
import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from isthmus.crowd import Crowd, party
from isthmus.errors import ConfigError
from isthmus.runtime.rare_notes import Log, RareNotes
from isthmus.runtime.splice import prepare

MAGIC = b"isthmus-relay/1\0"
HELLO = struct.Struct(">16sc32s")
HOST, GUEST = b"H", b"G"
PAIRED = b"+"
PORT = 29520
BUFFER_BYTES = 2**18  # of one direction of a pair
MOST_WAITING, MOST_WAITING_OF_ONE = 1024, 64  # connections that are not paired; of one address
MOST_PAIRS, MOST_PAIRS_OF_ONE = 512, 64
MOST_FILES = MOST_WAITING + 2 * MOST_PAIRS + 64  # that a process has open for all that, and for itself
GUEST_SECONDS = 5.0  # for its gate to appear
HOST_SECONDS = 24 * 3600.0
IDLE_SECONDS = 2 * 3600.0  # of a pair; stages are silent between rounds
SWEEP_SECONDS = 0.5
BACKLOG = 512


@dataclass(eq=False, slots=True)
class Connection:
    link: socket.socket
    address: str
    said: bytes = b""
    meeting: bytes = b""  # once it has said all
    role: bytes = b""
    other: "Connection | None" = None  # once it is paired
    waiting: bytearray = field(default_factory=bytearray)  # came from `other`, and goes here
    ended: bool = False  # no more comes from here
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
        """`files` is how many this process may have open. With fewer, all bounds are smaller: where the
        system refuses a connection, nobody is asked to make room for it."""
        self.notes, self.clock = RareNotes(log, clock), clock
        self.scale = min(1.0, files / MOST_FILES)
        self.listener = _bind(host, port)
        self.port = self.listener.getsockname()[1]
        self.crowd = Crowd(self._scaled(MOST_WAITING), self._scaled(MOST_WAITING_OF_ONE), clock)
        self.connections: set[Connection] = set()
        self.meetings: dict[tuple[bytes, bytes], deque[Connection]] = {}  # meeting, role -> who waits
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
        """Whatever can be done now, or within these seconds."""
        for key, events in self.selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self.connections:  # and not dropped in this very turn
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
            prepare(link, 0.0)
            connection = Connection(link, party(str(address[0])), last=self.clock())
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
        """The greeting; whoever says anything else, or more before it is paired, is dropped."""
        data = connection.link.recv(HELLO.size + 1 - len(connection.said))
        connection.said += data
        said = connection.said
        if not data or len(said) > HELLO.size or not MAGIC.startswith(said[: len(MAGIC)]):
            self._drop(connection)
        elif len(said) == HELLO.size and not connection.meeting:
            _, connection.role, connection.meeting = HELLO.unpack(said)
            if connection.role in (HOST, GUEST):
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
        """For one more pair of a guest from there. Where all are taken, the address that has the most gives
        up the one that has been silent longest; not one that has hardly more than the newcomer."""
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
        """Most often it goes at once, and nothing is kept."""
        if sink.waiting:
            with suppress(BlockingIOError):
                sent = sink.link.send(sink.waiting)
                del sink.waiting[:sent]
        source = sink.other
        assert source
        if source.ended and not sink.waiting:
            if sink.ended:
                self._drop(sink)
                return
            with suppress(OSError):
                sink.link.shutdown(socket.SHUT_WR)
        self._watch(sink)
        self._watch(source)

    def _watch(self, connection: Connection) -> None:
        """A side is read while there is room at the other one, and written to while something waits."""
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
        """It, and the one it is paired with."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.crowd.leave(connection.link)
        if connection.link.fileno() in self.selector.get_map():
            self.selector.unregister(connection.link)
        connection.link.close()
        waiting = self.meetings.get((connection.meeting, connection.role))
        if waiting and connection in waiting:
            waiting.remove(connection)
            if not waiting:
                del self.meetings[connection.meeting, connection.role]
        if connection.other:
            if connection.role == GUEST:
                self.pairs -= Counter([connection.address])  # and no zeros are kept
            self._drop(connection.other)


def allowed_files() -> int:
    """How many files this process may have open, after it has asked for as many as a relay can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def _bind(host: str, port: int) -> socket.socket:
    """A server on one address, or on all there are, IPv4 and IPv6."""
    try:
        if host:
            (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        elif socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            listener = socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port), backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", "") or str(error)).lower()
        raise ConfigError(
            f"cannot listen on {host or '*'}:{port}: {why}; give an address of this machine and a free port"
        ) from None
    listener.setblocking(False)
    return listener
