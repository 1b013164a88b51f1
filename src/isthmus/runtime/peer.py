"""How the two ends of a stage link find and authenticate each other: one port, TLS, and a HELLO.

Between machines a connection is TLS by the replica's key (`runtime.certificates`). On one machine it is a
Unix socket in a folder that only its owner may enter. All stages of a replica share its key, so the dialer
then says HELLO: run, replica, both stages, the direction, and the start numbers of both processes. It sends
nothing else before the answer, because a TLS 1.3 client sees success until it first reads. The answer to a
HELLO with a stale start number has the right one. So no end retries for ever, and a dialer may start without
the number.
"""

import hashlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from isthmus.crowd import Crowd, Pace, Visit
from isthmus.errors import RunError
from isthmus.layout.wire import VERSION as WIRE_VERSION
from isthmus.replica.framing import cut, receive_into
from isthmus.replica.links import LinkPeers
from isthmus.runtime.process import Log
from isthmus.runtime.rare_notes import RareNotes

HELLO = struct.Struct(">16s32sBHHQQ")
# The link's own version, then that of the few-bit wires: stages whose tensors differ do not talk.
MAGIC = f"isthmus-link/1.{WIRE_VERSION}".encode()
CLIENT_HELLO = b"\x16\x03\x01"  # the first bytes of every TLS connection
FORTH, BACK = DIRECTIONS = range(2)  # from the earlier stage to the later, and back
UNKNOWN = 0  # as a start number
MOST_PENDING, MOST_PENDING_OF_ONE = 32, 8  # handshakes at a time; from one address
HANDSHAKE_SECONDS = 5.0
HANDSHAKES_PER_SECOND = 100.0  # each costs about a millisecond of a core
SWEEP_SECONDS = 0.5
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.05, 2.0  # between dials; each may ask the bucket
JOIN_SECONDS = 120.0
NO_ANSWER = "no answer; start `isthmus join` there"

Clock = Callable[[], float]
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]  # for accepted connections, for dialed ones


@dataclass(frozen=True, slots=True)
class StageStart:
    """One start of the process that holds a stage. Later starts have larger numbers."""

    run_id: str
    replica: str
    stage: int
    start: int


@dataclass(frozen=True, slots=True)
class Hello:
    """One end's statement about a connection. The answer to an accepted HELLO is its mirror."""

    of: bytes  # a hash of run and replica
    direction: int
    stage: int  # the speaker's
    neighbour: int
    start: int  # the speaker's
    theirs: int  # the neighbour's

    def pack(self) -> bytes:
        numbers = self.direction, self.stage, self.neighbour, self.start, self.theirs
        return HELLO.pack(MAGIC, self.of, *numbers)

    @classmethod
    def unpack(cls, data: bytes) -> "Hello":
        magic, *rest = HELLO.unpack(data)
        if magic != MAGIC:
            raise ConnectionRefusedError(
                f"it talks {magic!r} and this stage {MAGIC!r}; run one version of Isthmus in all of a replica"
            )
        return cls(*rest)

    @property
    def mirror(self) -> "Hello":
        return replace(self, stage=self.neighbour, neighbour=self.stage, start=self.theirs, theirs=self.start)


class Place(Protocol):
    """A place at which an endpoint can be reached."""

    def dial(self, seconds: float) -> socket.socket: ...


class Listener(Protocol):
    """A source of connections: a listening socket, or a place at a relay."""

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address; TimeoutError if none comes for a while."""
        ...

    def close(self) -> None: ...


# Looks up the neighbour's places and its start number, if known, before each dial. No place: it dials us.
# ConnectionError with the reason if the lookup fails.
Find = Callable[[], tuple[Sequence[Place], int]]


class Endpoint:
    """One process's port: it accepts connections of the neighbouring stages only."""

    def __init__(
        self,
        me: StageStart,
        listener: Listener,
        contexts: Contexts | None,
        log: Log = lambda text: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`contexts` are None for a Unix socket."""
        self.me, self.listener, self.contexts = me, listener, contexts
        self.of = hashlib.sha256(f"{me.run_id}\0{me.replica}".encode()).digest()
        self.crowd = Crowd(MOST_PENDING, MOST_PENDING_OF_ONE, clock)
        self.pace, self.notes = Pace(HANDSHAKES_PER_SECOND, clock), RareNotes(log, clock)
        self.neighbours: dict[int, Neighbour] = {}
        self.closed = threading.Event()
        if isinstance(listener, socket.socket):
            listener.settimeout(SWEEP_SECONDS)
        self.thread = threading.Thread(target=self._listen, daemon=True, name="endpoint")
        self.thread.start()

    @property
    def port(self) -> int:
        assert isinstance(self.listener, socket.socket), "nobody dials a place at a relay"
        return self.listener.getsockname()[1]

    def meet(
        self, stage: int, peers: LinkPeers, find: Find | None, seconds: float = JOIN_SECONDS
    ) -> "Neighbour":
        """The connections of a link with a neighbour. We dial the places that `find` returns; if there are
        none, the neighbour dials us."""
        found = Neighbour(self, stage, peers, find, seconds)
        self.neighbours[stage] = found
        return found

    def close(self) -> None:
        self.closed.set()
        if isinstance(self.listener, socket.socket):
            cut(self.listener)
        self.thread.join()
        self.listener.close()

    def _listen(self) -> None:
        while not self.closed.is_set():
            self.crowd.sweep()
            try:
                link, address = self.listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it hung up early, we are closing, or file descriptors ran out
                self.closed.wait(0.01)
                continue
            who = address[0] if isinstance(address, tuple) else address
            if visit := self.crowd.enter(link, str(who or "this machine")):
                threading.Thread(target=self._meet, args=(visit,), daemon=True, name="handshake").start()
            else:
                link.close()

    def _meet(self, visit: Visit) -> None:
        link = visit.link
        visit.keep(HANDSHAKE_SECONDS)
        try:
            secured, hello = self._hear(visit)
            self.crowd.leave(link)  # it is no stranger
            with suppress(OSError):  # a neighbour that comes too early or too late comes again
                self._answer(secured, hello)
        except ssl.SSLError as error:
            words = _words(error)
            self._turn_away(visit.party, f"it does not hold the key of replica {self.me.replica} ({words})")
        except ConnectionRefusedError as error:
            self._turn_away(visit.party, str(error))
        except OSError:
            self._turn_away(visit.party, "it proved nothing in time")
        finally:
            self.crowd.leave(link)
            link.close()

    def _turn_away(self, who: str, why: str) -> None:
        self.notes.say(f"turned away {who} at the port of stage {self.me.stage}: {why}")

    def _hear(self, visit: Visit) -> tuple[socket.socket, Hello]:
        """The authenticated connection and its HELLO. The caller still closes the visit's own."""
        link = visit.link
        link.settimeout(HANDSHAKE_SECONDS)
        if self.contexts:
            if not (first := link.recv(len(CLIENT_HELLO), socket.MSG_PEEK)):
                raise ConnectionResetError("hung up")
            if not CLIENT_HELLO.startswith(first):  # silence and noise cost no handshake
                raise ConnectionRefusedError("it does not talk TLS")
            while not visit.cut and (pause := self.pace.pause()):
                self.closed.wait(pause)
        secured = link.dup()
        try:
            if self.contexts:
                secured = self.contexts[0].wrap_socket(secured, server_side=True)
            said = _read(secured)
            try:
                return secured, Hello.unpack(said)
            except ConnectionRefusedError:
                secured.sendall(HELLO.pack(MAGIC, self.of, *[0] * 5))  # so that its log has the reason too
                raise
        except BaseException:
            secured.close()
            raise

    def _answer(self, link: socket.socket, hello: Hello) -> None:
        me, neighbour = self.me, self.neighbours.get(hello.stage)
        try:
            if hello.of != self.of or hello.neighbour != me.stage or hello.direction not in DIRECTIONS:
                self._turn_away("a holder of our key", "it came for another run, replica or stage")
                raise ConnectionResetError
            if neighbour is None:
                raise ConnectionResetError("not expected yet")
            newest = neighbour.welcome(hello)
            link.sendall(replace(hello.mirror, start=me.start, theirs=newest).pack())
            if hello.theirs == me.start and newest == hello.start:
                neighbour.take(hello, link)
                return
        except BaseException:
            link.close()
            raise
        link.close()


class Neighbour:
    """The connections of a link with one neighbouring stage. Both come from one start of that stage."""

    def __init__(
        self, endpoint: Endpoint, stage: int, peers: LinkPeers, find: Find | None, seconds: float
    ) -> None:
        self.endpoint, self.stage, self.peers, self.find, self.seconds = endpoint, stage, peers, find, seconds
        self.start = UNKNOWN  # the neighbour's, if known
        self.linked = False  # a connection of this start is in use: another start needs another link
        self.why = ""  # the last dial's failure
        self.came: dict[int, socket.socket] = {}  # direction -> a connection that nobody uses yet
        self.changed = threading.Condition()
        self.closed = False
        self.pause, self.dial_at = RETRY_SECONDS, 0.0

    @property
    def trouble(self) -> str:
        """Why the link does not exist yet."""
        return self.why or getattr(self.endpoint.listener, "trouble", "") or NO_ANSWER

    def open(self, outward: bool) -> socket.socket:
        """Return the connection of one direction; RunError if there is none in time."""
        direction = FORTH if outward == (self.endpoint.me.stage < self.stage) else BACK
        wanted = (direction,) if self.linked or self.find else DIRECTIONS
        if not self.reach(self.seconds, wanted):
            raise RunError(self.peers.lost(self.why or f"it did not come within {self.seconds:g} s"))
        with self.changed:
            self.linked = True
            return self.came.pop(direction)

    def reach(self, seconds: float, wanted: Sequence[int] = DIRECTIONS) -> bool:
        """Dial the neighbour, or wait for it. Return whether the connections exist within these seconds."""
        deadline = time.monotonic() + seconds

        def came() -> bool:
            return self.came.keys() >= set(wanted)

        while True:
            if self.find and time.monotonic() >= self.dial_at:
                self._dial_all(wanted, self.find)
            until = min(deadline, self.dial_at) if self.find else deadline
            with self.changed:
                self.changed.wait_for(lambda: came() or self.closed, max(0.0, until - time.monotonic()))
                if came() or self.closed or time.monotonic() >= deadline:
                    return came() and not self.closed

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self._drop()
            self.changed.notify_all()

    # The end that is dialed

    def welcome(self, hello: Hello) -> int:
        """The newest known start of this neighbour that we accept for a link."""
        with self.changed:
            if self.linked and hello.start > self.start:
                raise ConnectionResetError("we are about to notice that the start before has ended")
            return max(self.start, hello.start)

    def take(self, hello: Hello, link: socket.socket) -> None:
        """Keep an authenticated connection; close those of older starts."""
        with self.changed:
            if self.closed or hello.start < self.start or (self.linked and hello.start != self.start):
                raise ConnectionResetError("too late")
            self._know(hello.start)
            if before := self.came.pop(hello.direction, None):
                before.close()  # its dialer has given up on it
            self.came[hello.direction] = link
            self.changed.notify_all()

    def _know(self, start: int) -> None:
        """Connections of an older start are of no use."""
        if start > self.start:
            self.start = start
            self._drop()

    def _drop(self) -> None:
        for link in self.came.values():
            link.close()
        self.came.clear()

    # The end that dials

    def _dial_all(self, wanted: Sequence[int], find: Find) -> None:
        """Dial the missing connections. If that fails, keep the reason and when to try again."""
        try:
            for direction in wanted:
                if direction not in self.came:
                    self.came[direction] = self._dial(direction, find)
            self.pause, self.why = RETRY_SECONDS, ""
            return
        except _OtherStart:
            return  # dial again with the start number that the neighbour sent
        except ssl.SSLCertVerificationError:
            self.why = "whoever answers there does not hold this replica's key"
        except ssl.SSLError as error:
            self.why = f"it does not take our key, or talks no TLS ({_words(error)})"
        except OSError as error:
            self.why = error.strerror or str(error) or "no answer"
        self.dial_at = time.monotonic() + self.pause
        self.pause = min(1.5 * self.pause, LONGEST_RETRY_SECONDS)

    def _dial(self, direction: int, find: Find) -> socket.socket:
        me = self.endpoint.me
        places, start = find()
        if not self.linked:
            self._know(start)
        hello = Hello(self.endpoint.of, direction, me.stage, self.stage, me.start, self.start)
        link = self._reach(places)
        try:
            link.sendall(hello.pack())
            answer = Hello.unpack(_read(link))
            if answer != hello.mirror:
                self._learn(answer, hello)
            return link
        except BaseException:
            link.close()
            raise

    def _learn(self, answer: Hello, hello: Hello) -> None:
        """Raise what an answer means that is not the mirror of our HELLO."""
        if replace(answer, start=0, theirs=0) != replace(hello.mirror, start=0, theirs=0):
            raise ConnectionResetError("it answered for another run, replica or stage")
        if answer.theirs > hello.start:
            raise RunError(
                f"replica {self.peers.replica}: stage {self.peers.stage} was started again elsewhere, and "
                f"{self.peers.them} is linked to that start; stop one of the two"
            )
        if self.linked:
            raise RunError(self.peers.lost("it has started again"))
        if answer.start > hello.theirs:
            self._know(answer.start)
            raise _OtherStart
        raise ConnectionResetError("an older start answers there")

    def _reach(self, places: Sequence[Place]) -> socket.socket:
        """A secured connection to the first place that accepts one."""
        fault: OSError = ConnectionRefusedError("it gives no address, and does not come to ours")
        for place in places:
            try:
                link = place.dial(HANDSHAKE_SECONDS)
                try:
                    link.settimeout(HANDSHAKE_SECONDS)
                    contexts = self.endpoint.contexts
                    return contexts[1].wrap_socket(link) if contexts else link
                except BaseException:
                    link.close()
                    raise
            except OSError as error:
                fault = error
        raise fault


class _OtherStart(Exception):
    """The neighbour has sent its start number."""


def _words(error: ssl.SSLError) -> str:
    return (error.reason or "TLS").replace("_", " ").lower()


def _read(link: socket.socket) -> bytes:
    data = bytearray(HELLO.size)
    receive_into(link, memoryview(data))
    return bytes(data)
