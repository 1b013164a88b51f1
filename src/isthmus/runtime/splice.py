"""Pairs of connected sockets, joined so that what comes out of one goes into the other."""

import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 2**16
LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

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
    """Carry bytes both ways until the store has said its last word, to a guest that may have ended before.

    In one thread: the guest's side is TLS, and OpenSSL lets one thread at a time use a connection.
    """
    for end in (guest, store):
        prepare(end, 0.0)
    there, back = Flow(guest, store, socket.SHUT_WR), Flow(store, guest, socket.SHUT_RDWR)
    try:
        while not back.over:
            if not any([there.step(), back.step()]):
                _until_ready(there, back)
    except OSError:  # broken: neither direction is of use any more
        for end in (guest, store):
            shut(end, socket.SHUT_RDWR)


class Flow:
    """One direction, between two sockets that do not block. At most CHUNK_BYTES wait in it."""

    def __init__(self, source: socket.socket, sink: socket.socket, at_the_end: int) -> None:
        self.source, self.sink, self.at_the_end = source, sink, at_the_end
        self.waiting, self.ended, self.over = memoryview(b""), False, False

    def step(self) -> bool:
        """Move what can be moved now; was there anything?"""
        moved = False
        with suppress(*LATER):
            if not self.waiting and not self.ended:
                data = self.source.recv(CHUNK_BYTES)
                self.waiting, self.ended, moved = memoryview(data), not data, True
            if self.waiting:
                self.waiting = self.waiting[self.sink.send(self.waiting) :]
                moved = True
        if self.ended and not self.over:
            self.over = True
            shut(self.sink, self.at_the_end)
        return moved

    @property
    def needs(self) -> tuple[socket.socket, int] | None:
        """What has to happen before the next step: the sink takes, or the source has, something."""
        if self.waiting:
            return self.sink, select.POLLOUT
        return None if self.ended else (self.source, select.POLLIN)


def _until_ready(*flows: Flow) -> None:
    """poll tells of an end, too, whatever it is asked for."""
    wanted: dict[int, int] = {}
    for need in (flow.needs for flow in flows):
        if need:
            wanted[need[0].fileno()] = wanted.get(need[0].fileno(), 0) | need[1]
    waiting = select.poll()
    for descriptor, events in wanted.items():
        if descriptor < 0:
            raise ConnectionResetError("closed here")
        waiting.register(descriptor, events)
    waiting.poll()


def shut(link: socket.socket, how: int) -> None:
    """Wakes the thread that reads it, too."""
    with suppress(OSError):  # it has gone already
        socket.socket.shutdown(link, how)  # that of an SSLSocket would let the rest pass undeciphered


def prepare(link: socket.socket, timeout_seconds: float | None) -> None:
    link.settimeout(timeout_seconds)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that lost its power says nothing
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # seconds, seconds, times; where the system lets us choose
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
