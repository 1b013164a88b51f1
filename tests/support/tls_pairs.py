"""Two ends of a TLS link in one process, joined by socket pairs, or by a wire that a test can spoil."""

import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from isthmus.protocol.trust import Signer
from isthmus.replica.links import LinkPeers
from isthmus.replica.tls_link import TlsLink
from isthmus.runtime.handshake import BACK, FORTH, Credentials, Purpose
from isthmus.runtime.tls import as_gate, as_guest

HOLDER = Credentials("run", Signer("edge-0", b"k" * 32))


def secured(
    purpose: Purpose, gate: Credentials = HOLDER, guest: Credentials = HOLDER, wire: "Wire | None" = None
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """The gate's end and the guest's."""
    near, far = wire.ends() if wire else socket.socketpair()
    for end in (near, far):
        end.settimeout(20)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(as_gate, near, gate, purpose, gate.signer.public_key)
        second = pool.submit(as_guest, far, guest, purpose, guest.signer.public_key)
        try:
            return first.result(), second.result()
        except BaseException:
            near.close()
            far.close()
            raise


class Wire:
    """Carries bytes both ways; `spoil` changes one bit of the next that pass, either way."""

    def __init__(self) -> None:
        self.spoilt, self.carried = threading.Event(), 0

    def ends(self) -> tuple[socket.socket, socket.socket]:
        (near, a), (b, far) = socket.socketpair(), socket.socketpair()
        for source, sink in ((a, b), (b, a)):
            threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()
        return near, far

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                if self.spoilt.is_set():
                    data[len(data) // 2] ^= 1
                    self.spoilt.clear()
                sink.sendall(data)
                self.carried += len(data)
            sink.shutdown(socket.SHUT_WR)


class PairedChannels:
    """One end's connections; the other end opens the same ones."""

    def __init__(self, meeting: "Meeting", stage: int) -> None:
        self.meeting, self.stage = meeting, stage

    def open(self, outward: bool) -> ssl.SSLSocket:
        link = self.meeting.open(self.stage, outward)
        link.settimeout(None)
        return link

    def close(self) -> None:
        pass


class Meeting:
    """Where the two ends of a link open connections, in whatever order."""

    def __init__(self, wire: Wire | None = None) -> None:
        self.wire, self.num_opened = wire, 0
        self.waiting: dict[tuple[int, bool], list[ssl.SSLSocket]] = {}
        self.lock = threading.Lock()

    def open(self, stage: int, outward: bool) -> ssl.SSLSocket:
        with self.lock:
            forth = outward == (stage == 0)
            mine = self.waiting.setdefault((stage, forth), [])
            if not mine:
                self.num_opened += 1
                gate, guest = secured(Purpose(FORTH if forth else BACK, 1, self.num_opened), wire=self.wire)
                self.waiting.setdefault((0, forth), []).append(gate)
                self.waiting.setdefault((1, forth), []).append(guest)
                mine = self.waiting[stage, forth]
            return mine.pop(0)


def tls_pair(
    timeout_seconds: float = 20.0,
    bytes_of_a_key: int = 2**38,
    wire: Wire | None = None,
    device: str = "cpu",
) -> tuple[TlsLink, TlsLink]:
    """The earlier stage's end, the later stage's."""
    meeting = Meeting(wire)
    early, late = (
        TlsLink(
            PairedChannels(meeting, stage),
            LinkPeers("edge-0", stage, 1 - stage, "10.0.0.7"),
            torch.device(device),
            timeout_seconds,
            bytes_of_a_key,
        )
        for stage in (0, 1)
    )
    return early, late
