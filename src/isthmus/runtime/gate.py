"""The port at which the stages of a replica meet, and the way of the others to it.

torch's TCPStore asks nobody who they are. So the stores of a replica's machines listen on loopback only, and
stage 0's launcher keeps a gate at the public HOST:PORT: whoever proves that it holds the replica's key
(`runtime.handshake`) is joined to the store that it came for, byte by byte. On the other machines a way leads
from a port on loopback through that gate. Strangers have a few seconds, a few connections each, and one line
in the log now and then; the newcomer always finds room (`isthmus.crowd`).

An encrypted channel would take the place of the plain sockets in `join_sockets`, and of nothing else.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from isthmus.crowd import Crowd
from isthmus.errors import Unreachable
from isthmus.runtime.handshake import (
    ANSWER_BYTES,
    HELLO,
    KNOCK,
    SIGNATURE_BYTES,
    Credentials,
    Guest,
    Host,
    Purpose,
    Stranger,
)
from isthmus.runtime.process import Log

LOOPBACK = "127.0.0.1"
BACKLOG = 512
MOST_STRANGERS, MOST_OF_ONE = 128, 32  # connections that have proved nothing yet; of one address
PROOF_SECONDS = 5.0  # without a byte; the crowd limits the whole
LOG_SECONDS = 60.0  # between lines about strangers
SWEEP_SECONDS = 0.5
RETRY_SECONDS = 0.2
DRAIN_SECONDS = 2.0
CHUNK_BYTES = 2**16
WELCOME, NOT_YET = b"+", b"-"

Clock = Callable[[], float]


class NotYet(Exception):
    """The gate knows us, and what we came for is not there."""


class Gate:
    """Joins whoever holds the key to a port on loopback: the one that was opened last for its purpose."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        log: Log = lambda text: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.credentials = credentials
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self.listener.settimeout(SWEEP_SECONDS)
        self.address = f"{host}:{self.listener.getsockname()[1]}"
        self.port = self.listener.getsockname()[1]
        self.crowd = Crowd(MOST_STRANGERS, MOST_OF_ONE, clock)
        self.notes = RareNotes(log, clock)
        self.ways: dict[
            int, tuple[int, int, Joined]
        ] = {}  # what -> generation, port on loopback, who is there
        self.lock = threading.Lock()
        self.closing = False
        self.thread = threading.Thread(target=self._accept, daemon=True, name="gate")
        self.thread.start()

    def lead(self, what: int, port: int, generation: int = 0) -> None:
        """From now on `what` is at this port; whoever was joined to the one before is cut off."""
        with self.lock:
            before = self.ways.get(what)
            self.ways[what] = generation, port, Joined()
        if before:
            before[2].cut()

    def close(self) -> None:
        """Free the port. What the stores have answered by now still arrives."""
        self.closing = True
        _stop(self.listener, self.thread)
        with self.lock:
            ways, self.ways = self.ways, {}
        deadline = time.monotonic() + DRAIN_SECONDS
        for _, _, joined in ways.values():
            joined.end(deadline)

    def _accept(self) -> None:
        while not self.closing:
            self.crowd.sweep()
            found = _accept(self.listener)
            if found is None:
                continue
            link, who = found
            visit = self.crowd.enter(link, who)
            if visit is None:
                link.close()
                continue
            visit.request()
            threading.Thread(target=self._meet, args=(link, who), daemon=True).start()

    def _meet(self, link: socket.socket, who: str) -> None:
        try:
            purpose = self._admit(link)
        except Stranger as error:
            self.notes.say(f"turned away {who} at {self.address}: {error}")
            link.close()
            return
        except OSError:
            self.notes.say(f"turned away {who} at {self.address}: it proved nothing in time")
            link.close()
            return
        finally:
            self.crowd.leave(link)
        with suppress(OSError), link:
            self._join(link, purpose)

    def _admit(self, link: socket.socket) -> Purpose:
        _prepare(link, PROOF_SECONDS)
        host = Host(self.credentials, _read(link, HELLO.size))
        link.sendall(host.answer())
        return host.check(_read(link, SIGNATURE_BYTES))

    def _join(self, link: socket.socket, purpose: Purpose) -> None:
        with self.lock:
            generation, port, joined = self.ways.get(purpose.what, (0, 0, None))
        if purpose.what == KNOCK:
            link.sendall(WELCOME)
            return
        if joined is None or generation != purpose.generation:
            link.sendall(NOT_YET)
            return
        try:
            there = socket.create_connection((LOOPBACK, port), PROOF_SECONDS)
        except OSError:
            link.sendall(NOT_YET)
            return
        with there:
            link.sendall(WELCOME)
            joined.run(link, there)


class Way:
    """A port on loopback that leads through stage 0's gate, for as long as the machine wants it."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        purpose: Purpose,
        patience_seconds: float = 600.0,
        log: Log = lambda text: None,
    ) -> None:
        """A local client is kept for patience_seconds while stage 0 is not there yet."""
        self.host, self.gate_port, self.credentials, self.purpose = host, port, credentials, purpose
        self.patience_seconds, self.notes = patience_seconds, RareNotes(log)
        self.listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self.listener.settimeout(SWEEP_SECONDS)
        self.port = self.listener.getsockname()[1]
        self.joined, self.closed = Joined(), threading.Event()
        self.thread = threading.Thread(target=self._accept, daemon=True, name="way")
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        _stop(self.listener, self.thread)
        self.joined.end(time.monotonic() + DRAIN_SECONDS)

    def _accept(self) -> None:
        while not self.closed.is_set():
            if found := _accept(self.listener):
                threading.Thread(target=self._lead, args=(found[0],), daemon=True).start()

    def _lead(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            _prepare(link, None)
            deadline = time.monotonic() + self.patience_seconds
            while not self.closed.is_set() and time.monotonic() < deadline:
                try:
                    there = enter(self.host, self.gate_port, self.credentials, self.purpose)
                except Stranger as error:
                    self.notes.say(f"{self.host}:{self.gate_port} is not our stage 0: {error}")
                except (OSError, NotYet):
                    pass
                else:
                    with there:
                        self.joined.run(link, there)
                    return
                self.closed.wait(RETRY_SECONDS)


def enter(
    host: str, port: int, credentials: Credentials, purpose: Purpose, timeout_seconds: float = PROOF_SECONDS
) -> socket.socket:
    """A connection through the gate at host:port. OSError, Stranger or NotYet where there is none."""
    link = socket.create_connection((host, port), timeout_seconds)
    try:
        _prepare(link, timeout_seconds)
        guest = Guest(credentials, purpose)
        link.sendall(guest.hello)
        link.sendall(guest.prove(_read(link, ANSWER_BYTES)))
        if _read(link, 1) != WELCOME:
            raise NotYet
    except BaseException:
        link.close()
        raise
    return link


class Joined:
    """Pairs of sockets that are joined now."""

    def __init__(self) -> None:
        self.pairs: set[tuple[socket.socket, socket.socket]] = set()
        self.changed = threading.Condition()
        self.over = False

    def run(self, guest: socket.socket, store: socket.socket) -> None:
        """Carry bytes both ways until both sides have ended."""
        with self._listed(guest, store) as listed:
            if listed:
                join_sockets(guest, store)

    @contextmanager
    def _listed(self, *pair: socket.socket) -> Iterator[bool]:
        guest, store = pair
        with self.changed:
            if not self.over:
                self.pairs.add((guest, store))
        try:
            yield not self.over
        finally:
            with self.changed:
                self.pairs.discard((guest, store))
                self.changed.notify_all()

    def cut(self) -> None:
        with self.changed:
            self.over = True
            for pair in self.pairs:
                for end in pair:
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    def end(self, deadline: float) -> None:
        """Tell the second side of each pair that no more comes, and wait for its last words."""
        with self.changed:
            self.over = True
            for _, store in self.pairs:
                with suppress(OSError):
                    store.shutdown(socket.SHUT_WR)
            self.changed.wait_for(lambda: not self.pairs, max(0.0, deadline - time.monotonic()))
        self.cut()


def join_sockets(one: socket.socket, two: socket.socket) -> None:
    """Carry bytes both ways until both sides have ended; an end travels as one."""
    for end in (one, two):
        _prepare(end, None)
    other = threading.Thread(target=_carry, args=(two, one), daemon=True)
    other.start()
    _carry(one, two)
    other.join()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # broken: neither direction is of use any more
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> tuple[socket.socket, str] | None:
    """Who comes next, and from where; None where nobody does within SWEEP_SECONDS."""
    try:
        link, address = listener.accept()
        return link, str(address[0])
    except TimeoutError:
        return None
    except OSError:  # gone before we looked, the listener is closing, or no file descriptor is left
        time.sleep(0.01)
        return None


def _stop(listener: socket.socket, thread: threading.Thread) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
    thread.join()
    listener.close()


def _prepare(link: socket.socket, timeout_seconds: float | None) -> None:
    link.settimeout(timeout_seconds)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that lost its power says nothing


def _read(link: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many, and not one more: what follows belongs to the store."""
    data = b""
    while len(data) < num_bytes:
        part = link.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("hung up")
        data += part
    return data


class RareNotes:
    """Log lines about strangers: the first at once, then one in LOG_SECONDS that counts the others."""

    def __init__(self, log: Log, clock: Clock = time.monotonic) -> None:
        self.log, self.clock = log, clock
        self.next, self.unsaid = 0.0, 0
        self.lock = threading.Lock()

    def say(self, text: str) -> None:
        with self.lock:
            now = self.clock()
            if now < self.next:
                self.unsaid += 1
                return
            more = f" (and {self.unsaid} more since the last such line)" if self.unsaid else ""
            self.next, self.unsaid = now + LOG_SECONDS, 0
        self.log(text + more)


def knock(host: str, port: int, credentials: Credentials, stage: int) -> None:
    """See that stage 0 of our replica is there; OSError, or Unreachable where somebody else is."""
    try:
        enter(host, port, credentials, Purpose(KNOCK, stage)).close()
    except Stranger as error:
        raise Unreachable(
            f"{host}:{port} is not stage 0 of replica {credentials.signer.replica} in this run: {error}; "
            "correct --master or --key"
        ) from None
