"""The port at which the stages of a replica meet, and the way of the others to it.

torch's TCPStore asks nobody who they are. So the stores of a replica's machines listen on loopback only, and
stage 0's launcher keeps a gate at the public HOST:PORT: whoever proves that it holds the replica's key
(`runtime.handshake`) is joined to the store that it came for, byte by byte. On the other machines a way leads
from a port on loopback through that gate. Strangers have a few seconds, a few connections each, and one line
in the log now and then; the newcomer always finds room (`isthmus.crowd`).

An encrypted channel would take the place of the plain sockets that `runtime.splice` joins.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from isthmus.crowd import Crowd
from isthmus.errors import Unreachable
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
from isthmus.runtime.splice import Joined, prepare, shut

LOOPBACK = "127.0.0.1"
BACKLOG = 512
MOST_STRANGERS, MOST_OF_ONE = 128, 32  # connections that have proved nothing yet; of one address
PROOF_SECONDS = 5.0  # without a byte; the crowd limits the whole
LOG_SECONDS = 60.0  # between lines about strangers
SWEEP_SECONDS = 0.5
RETRY_SECONDS = 0.2
DRAIN_SECONDS = 2.0
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
        self.port = self.listener.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self.crowd = Crowd(MOST_STRANGERS, MOST_OF_ONE, clock)
        self.notes = RareNotes(log, clock)
        # What a guest may come for -> of which generation, at which port on loopback, and who is there.
        self.open: dict[int, tuple[int, int, Joined]] = {}
        self.lock = threading.Lock()
        self.closing = False
        self.thread = threading.Thread(target=self._listen, daemon=True, name="gate")
        self.thread.start()

    def lead(self, what: int, port: int, generation: int = 0) -> None:
        """From now on `what` is at this port; whoever was joined to the one before is cut off."""
        with self.lock:
            before = self.open.get(what)
            self.open[what] = generation, port, Joined()
        if before:
            before[2].cut()

    def close(self) -> None:
        """Free the port. What the stores have answered by now still arrives."""
        self.closing = True
        _stop(self.listener, self.thread)
        with self.lock:
            joined, self.open = [each[2] for each in self.open.values()], {}
        deadline = time.monotonic() + DRAIN_SECONDS
        for each in joined:
            each.end(deadline)

    def _listen(self) -> None:
        while not self.closing:
            self.crowd.sweep()
            if found := _accept(self.listener):
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
                purpose = self._admit(link)
            except Stranger as error:
                self.notes.say(f"turned away {who} at {self.address}: {error}")
                return
            except OSError:
                self.notes.say(f"turned away {who} at {self.address}: it proved nothing in time")
                return
            finally:
                self.crowd.leave(link)
            self._join(link, purpose)

    def _admit(self, link: socket.socket) -> Purpose:
        prepare(link, PROOF_SECONDS)
        host = Host(self.credentials, _read(link, HELLO.size, MAGIC))
        link.sendall(host.answer())
        return host.check(_read(link, SIGNATURE_BYTES))

    def _join(self, link: socket.socket, purpose: Purpose) -> None:
        if purpose.what == KNOCK:
            link.sendall(WELCOME)
            return
        with self.lock:
            generation, port, joined = self.open.get(purpose.what, (0, 0, None))
        if joined is None or generation != purpose.generation:
            link.sendall(NOT_YET)
            return
        try:
            store = socket.create_connection((LOOPBACK, port), PROOF_SECONDS)
        except OSError:
            link.sendall(NOT_YET)
            return
        with store:
            link.sendall(WELCOME)
            joined.run(link, store)


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
        self.gate, self.credentials, self.purpose = (host, port), credentials, purpose
        self.patience_seconds, self.notes = patience_seconds, RareNotes(log)
        self.listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self.listener.settimeout(SWEEP_SECONDS)
        self.port = self.listener.getsockname()[1]
        self.joined, self.closed = Joined(), threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True, name="way")
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        _stop(self.listener, self.thread)
        self.joined.end(time.monotonic() + DRAIN_SECONDS)

    def _listen(self) -> None:
        while not self.closed.is_set():
            if found := _accept(self.listener):
                threading.Thread(target=self._lead, args=(found[0],), daemon=True).start()

    def _lead(self, client: socket.socket) -> None:
        deadline = time.monotonic() + self.patience_seconds
        with client, suppress(OSError):
            while not (self.closed.is_set() or time.monotonic() > deadline or _hung_up(client)):
                if through := self._try():
                    with through:
                        self.joined.run(client, through)
                    return
                self.closed.wait(RETRY_SECONDS)

    def _try(self) -> socket.socket | None:
        try:
            return enter(*self.gate, self.credentials, self.purpose)
        except Stranger as error:
            self.notes.say(f"{self.gate[0]}:{self.gate[1]} is not our stage 0: {error}")
        except (OSError, NotYet):
            pass
        return None


def enter(
    host: str, port: int, credentials: Credentials, purpose: Purpose, timeout_seconds: float = PROOF_SECONDS
) -> socket.socket:
    """A connection through the gate at host:port. OSError, Stranger or NotYet where there is none."""
    link = socket.create_connection((host, port), timeout_seconds)
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


def knock(host: str, port: int, credentials: Credentials, stage: int) -> None:
    """See that stage 0 of our replica is there; OSError, or Unreachable where somebody else is."""
    try:
        enter(host, port, credentials, Purpose(KNOCK, stage)).close()
    except Stranger as error:
        raise Unreachable(
            f"{host}:{port} is not stage 0 of replica {credentials.signer.replica} in this run: {error}; "
            "correct --master or --key"
        ) from None


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


def _hung_up(client: socket.socket) -> bool:
    """Without a word. What it has said is left for whoever it said it to."""
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _stop(listener: socket.socket, thread: threading.Thread) -> None:
    shut(listener, socket.SHUT_RDWR)
    thread.join()
    listener.close()


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
