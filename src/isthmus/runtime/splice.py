"""Pairs of connected sockets, joined so that what comes out of one goes into the other."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 2**16

Pair = tuple[socket.socket, socket.socket]  # who came, and what it came for


class Joined:
    """Pairs of sockets that are joined now."""

    def __init__(self) -> None:
        self.pairs: set[Pair] = set()
        self.changed = threading.Condition()
        self.over = False

    def run(self, guest: socket.socket, store: socket.socket) -> None:
        """`join_sockets`, unless this is over."""
        with self._listed((guest, store)) as listed:
            if listed:
                join_sockets(guest, store)

    @contextmanager
    def _listed(self, pair: Pair) -> Iterator[bool]:
        with self.changed:
            listed = not self.over
            if listed:
                self.pairs.add(pair)
        try:
            yield listed
        finally:
            with self.changed:
                self.pairs.discard(pair)
                self.changed.notify_all()

    def cut(self) -> None:
        with self.changed:
            self.over = True
            for pair in self.pairs:
                for end in pair:
                    shut(end, socket.SHUT_RDWR)

    def end(self, deadline: float) -> None:
        """Tell every store that no more comes, and wait for its last words."""
        with self.changed:
            self.over = True
            for _, store in self.pairs:
                shut(store, socket.SHUT_WR)
            self.changed.wait_for(lambda: not self.pairs, max(0.0, deadline - time.monotonic()))
        self.cut()


def join_sockets(guest: socket.socket, store: socket.socket) -> None:
    """Carry bytes both ways until the store has said its last word, to a guest that may have ended before."""
    for end in (guest, store):
        prepare(end, None)
    other = threading.Thread(target=_carry, args=(guest, store, socket.SHUT_WR), daemon=True)
    other.start()
    _carry(store, guest, socket.SHUT_RDWR)
    other.join()


def _carry(source: socket.socket, sink: socket.socket, at_the_end: int) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
        shut(sink, at_the_end)
    except OSError:  # broken: neither direction is of use any more
        for end in (source, sink):
            shut(end, socket.SHUT_RDWR)


def shut(link: socket.socket, how: int) -> None:
    """Wakes the thread that reads it, too."""
    with suppress(OSError):  # it has gone already
        link.shutdown(how)


def prepare(link: socket.socket, timeout_seconds: float | None) -> None:
    link.settimeout(timeout_seconds)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that lost its power says nothing
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # seconds, seconds, times; where the system lets us choose
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
