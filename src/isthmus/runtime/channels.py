"""The connections of a TLS link, from the gate of the earlier stage, or through it for the later one."""

import queue
import socket
import ssl
import threading
import time
from contextlib import suppress

from isthmus.errors import RunError
from isthmus.replica.links import LinkPeers
from isthmus.runtime.addresses import Place
from isthmus.runtime.arrivals import Arrivals
from isthmus.runtime.gate import PROOF_SECONDS, RETRY_SECONDS, NotYet, enter
from isthmus.runtime.handshake import BACK, FORTH, Credentials, Purpose, Stranger
from isthmus.runtime.splice import prepare
from isthmus.runtime.tls import as_gate


class GateChannels:
    """Of the earlier stage: its neighbour comes."""

    def __init__(
        self, arrivals: Arrivals, credentials: Credentials, peers: LinkPeers, seconds: float
    ) -> None:
        self.arrivals, self.credentials, self.peers, self.seconds = arrivals, credentials, peers, seconds
        self.came: dict[int, queue.Queue[ssl.SSLSocket]] = {FORTH: queue.Queue(), BACK: queue.Queue()}
        self.fault = ""
        threading.Thread(target=self._welcome, daemon=True, name="channels").start()

    def open(self, outward: bool) -> ssl.SSLSocket:
        try:
            return self.came[FORTH if outward else BACK].get(timeout=self.seconds)
        except queue.Empty:
            raise RunError(self.fault or self.peers.silent(self.seconds)) from None

    def close(self) -> None:
        self.arrivals.close()

    def _welcome(self) -> None:
        with suppress(OSError):
            while True:
                link, purpose = self.arrivals.next()
                threading.Thread(target=self._secure, args=(link, purpose), daemon=True).start()

    def _secure(self, link: socket.socket, purpose: Purpose) -> None:
        with suppress(OSError):
            try:
                prepare(link, PROOF_SECONDS)
                if purpose.what not in self.came or purpose.stage != self.peers.neighbour:
                    raise Stranger("it came for something else")
                secured = as_gate(link, self.credentials, purpose, self.credentials.public_key)
                secured.settimeout(None)
                self.came[purpose.what].put(secured)
            except Stranger as error:
                self.fault = self.peers.lost(f"{error}; somebody else came to its gate")
                link.close()


class GuestChannels:
    """Of the later stage: it comes to its neighbour's gate."""

    def __init__(
        self, gate: Place, session: int, credentials: Credentials, peers: LinkPeers, seconds: float
    ) -> None:
        self.gate, self.session, self.credentials = gate, session, credentials
        self.peers, self.seconds = peers, seconds
        self.closed = threading.Event()

    def open(self, outward: bool) -> ssl.SSLSocket:
        purpose = Purpose(BACK if outward else FORTH, self.peers.stage, self.session)
        deadline, why = time.monotonic() + self.seconds, ""
        while time.monotonic() < deadline and not self.closed.is_set():
            try:
                link = enter(self.gate, self.credentials, purpose)
                link.settimeout(None)
                return link
            except Stranger as error:
                why = f"{error}; somebody else answers at its port"
            except NotYet:
                why = "its worker has ended, or does not wait for us"
            except OSError as error:
                why = error.strerror or str(error) or "no answer"
            self.closed.wait(RETRY_SECONDS)
        raise RunError(self.peers.lost(why))

    def close(self) -> None:
        self.closed.set()
