"""The place at which the stages of a replica meet, and the way of the others to it.

torch's TCPStore asks nobody who they are. So the stores of a replica's machines listen on loopback only, and
stage 0's launcher keeps a gate (`runtime.addresses`): whoever proves that it holds the replica's key
(`runtime.handshake`) is joined, over TLS (`runtime.tls`), to the store that it came for, byte by byte. On the
other machines a way leads from a port on loopback through that gate. The neighbour on a link comes through
the gate of the earlier stage, too; its connection is handed over to the worker as it is. Strangers have a few
seconds, a few connections each, and one line in the log now and then; the newcomer always finds room
(`isthmus.crowd`), and OpenSSL hears nothing of those who have proved nothing.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from isthmus.crowd import Crowd
from isthmus.errors import Unreachable
from isthmus.runtime.addresses import BACKLOG, SWEEP_SECONDS, Place
from isthmus.runtime.handshake import (
    ANSWER_BYTES,
    HELLO,
    KNOCK,
    MAGIC,
    SIGNATURE_BYTES,
    Credentials,
    Guest,
    Host,
    Purpose,
    Stranger,
)
from isthmus.runtime.process import Log
from isthmus.runtime.rare_notes import Clock, RareNotes
from isthmus.runtime.splice import Joined, prepare, shut
from isthmus.runtime.tls import as_gate, as_guest

LOOPBACK = "127.0.0.1"
MOST_STRANGERS, MOST_OF_ONE = 128, 32  # connections that have proved nothing yet; of one address
PROOF_SECONDS = 5.0  # without a byte; the crowd limits the whole
RETRY_SECONDS = 0.2
DRAIN_SECONDS = 2.0
WELCOME, NOT_YET = b"+", b"-"

Take = Callable[[socket.socket, Purpose], None]


class NotYet(Exception):
    """The gate knows us, and what we came for is not there."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where guests go who come for one thing."""

    generation: int
    port: int = 0  # of a store, on loopback
    take: Take | None = None  # or who gets the connection itself
    joined: Joined | None = None


class Gate:
    """Leads whoever holds the key to what was opened last for its purpose."""

    def __init__(
        self,
        place: Place,
        credentials: Credentials,
        log: Log = lambda text: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.credentials, self.door = credentials, place.door()
        self.place = self.door.place
        self.crowd = Crowd(MOST_STRANGERS, MOST_OF_ONE, clock)
        self.notes = RareNotes(log, clock)
        self.open: dict[int, Route] = {}  # what a guest may come for -> where it goes
        self.lock = threading.Lock()
        self.closing = False
        self.thread = threading.Thread(target=self._listen, daemon=True, name="gate")
        self.thread.start()

    def lead(self, what: int, port: int, generation: int = 0) -> None:
        """From now on `what` is the store at this port; whoever was joined to the one before is cut off."""
        with self.lock:
            before = self.open.get(what)
            self.open[what] = Route(generation, port, joined=Joined())
        if before and before.joined:
            before.joined.cut()

    def hand_over(self, what: Sequence[int], take: Take, generation: int) -> None:
        """From now on `take` gets the connections of those who come for one of these."""
        with self.lock:
            self.open |= {each: Route(generation, take=take) for each in what}

    def close(self) -> None:
        """Free the place. What the stores have answered by now still arrives."""
        self.closing = True
        self.door.close()
        self.thread.join()
        with self.lock:
            joined, self.open = [each.joined for each in self.open.values() if each.joined], {}
        deadline = time.monotonic() + DRAIN_SECONDS
        for each in joined:
            each.end(deadline)

    def _listen(self) -> None:
        while not self.closing:
            self.crowd.sweep()
            if found := self.door.accept():
                link, who = found
                visit = self.crowd.enter(link, who)
                if visit is None:
                    link.close()
                    continue
                visit.request()
                threading.Thread(target=self._meet, args=(link, who), daemon=True).start()

    def _meet(self, link: socket.socket, who: str) -> None:
        with link, suppress(OSError):
            try:
                try:
                    purpose = self._admit(link)
                finally:
                    self.crowd.leave(link)
                self._lead(link, purpose)
            except Stranger as error:
                self.notes.say(f"turned away {who} at {self.place}: {error}")
            except OSError:
                self.notes.say(f"turned away {who} at {self.place}: it proved nothing in time")

    def _admit(self, link: socket.socket) -> Purpose:
        prepare(link, PROOF_SECONDS)
        host = Host(self.credentials, _read(link, HELLO.size, MAGIC))
        link.sendall(host.answer())
        return host.check(_read(link, SIGNATURE_BYTES))

    def _lead(self, link: socket.socket, purpose: Purpose) -> None:
        if purpose.what == KNOCK:
            link.sendall(WELCOME)
            return
        with self.lock:
            route = self.open.get(purpose.what)
        if route is None or route.generation != purpose.generation:
            link.sendall(NOT_YET)
        elif route.take:
            link.sendall(WELCOME)
            with suppress(OSError):  # the worker has ended; the guest finds out
                route.take(link, purpose)
        else:
            self._join(link, purpose, route)

    def _join(self, link: socket.socket, purpose: Purpose, route: Route) -> None:
        try:
            store = socket.create_connection((LOOPBACK, route.port), PROOF_SECONDS)
        except OSError:
            link.sendall(NOT_YET)
            return
        with store:
            link.sendall(WELCOME)
            with as_gate(link, self.credentials, purpose, self.credentials.public_key) as secured:
                assert route.joined
                with suppress(OSError):
                    route.joined.run(secured, store)


class Way:
    """A port on loopback that leads through stage 0's gate, for as long as the machine wants it."""

    def __init__(
        self,
        gate: Place,
        credentials: Credentials,
        purpose: Purpose,
        patience_seconds: float = 600.0,
        log: Log = lambda text: None,
    ) -> None:
        """A local client is kept for patience_seconds while stage 0 is not there yet."""
        self.gate, self.credentials, self.purpose = gate, credentials, purpose
        self.patience_seconds, self.notes = patience_seconds, RareNotes(log)
        self.listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self.listener.settimeout(SWEEP_SECONDS)
        self.port = self.listener.getsockname()[1]
        self.joined, self.closed = Joined(), threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True, name="way")
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        shut(self.listener, socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()
        self.joined.end(time.monotonic() + DRAIN_SECONDS)

    def _listen(self) -> None:
        while not self.closed.is_set():
            try:
                client, _ = self.listener.accept()
            except TimeoutError:
                continue
            except OSError:  # the listener is closing, or no file descriptor is left
                time.sleep(0.01)
                continue
            threading.Thread(target=self._lead, args=(client,), daemon=True).start()

    def _lead(self, client: socket.socket) -> None:
        deadline = time.monotonic() + self.patience_seconds
        with client, suppress(OSError):
            while not (self.closed.is_set() or time.monotonic() > deadline or _hung_up(client)):
                if through := self._try():
                    with through:
                        self.joined.run(client, through)
                    return
                self.closed.wait(RETRY_SECONDS)

    def _try(self) -> ssl.SSLSocket | None:
        try:
            return enter(self.gate, self.credentials, self.purpose)
        except Stranger as error:
            self.notes.say(f"{self.gate} is not our stage 0: {error}")
        except (OSError, NotYet):
            pass
        return None


def enter(
    gate: Place, credentials: Credentials, purpose: Purpose, timeout_seconds: float = PROOF_SECONDS
) -> ssl.SSLSocket:
    """A connection through a gate, over TLS. OSError, Stranger or NotYet where there is none."""
    link = _prove(gate, credentials, purpose, timeout_seconds)
    try:
        return as_guest(link, credentials, purpose, credentials.public_key)
    except BaseException:
        link.close()
        raise


def knock(gate: Place, credentials: Credentials, stage: int, timeout_seconds: float = PROOF_SECONDS) -> None:
    """See that stage 0 of our replica is there; OSError, or Unreachable where somebody else is."""
    try:
        _prove(gate, credentials, Purpose(KNOCK, stage), timeout_seconds).close()
    except Stranger as error:
        raise Unreachable(
            f"{gate} is not stage 0 of replica {credentials.signer.replica} in this run: {error}; "
            "correct --master, --relay or --key"
        ) from None


def _prove(gate: Place, credentials: Credentials, purpose: Purpose, timeout_seconds: float) -> socket.socket:
    """A connection to a gate that has taken us, and that we have taken."""
    link = gate.dial(timeout_seconds)
    try:
        prepare(link, timeout_seconds)
        guest = Guest(credentials, purpose)
        link.sendall(guest.hello)
        link.sendall(guest.prove(_read(link, ANSWER_BYTES)))
        if _read(link, 1) != WELCOME:
            raise NotYet
    except BaseException:
        link.close()
        raise
    return link


def _hung_up(client: socket.socket) -> bool:
    """Without a word. What it has said is left for whoever it said it to."""
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _read(link: socket.socket, num_bytes: int, start: bytes = b"") -> bytes:
    """Exactly so many, and not one more: what follows belongs to the store. Stranger as soon as the first of
    them are not those of `start`."""
    data = b""
    while len(data) < num_bytes:
        part = link.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("hung up")
        data += part
        if not start.startswith(data[: len(start)]):
            raise Stranger("it does not talk this protocol")
    return data
