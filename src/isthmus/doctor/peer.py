"""Rates and latency between two machines: one listens (`isthmus doctor --listen`), the other asks.

Plain TCP. Every message is a header of 25 bytes (magic with a version, one letter, a number); bulk bytes
follow where the number says how many. The listener counts what it is sent and keeps none of it. It answers
three letters, moves a bounded number of bytes in bounded time, measures with one machine at a time, and hangs
up on everything else. Standard library only.
"""

import ipaddress
import os
import re
import socket
import statistics
import struct
import threading
import time
from collections import Counter
from contextlib import suppress

from isthmus.doctor.checks import WRONG_CLOCK_SECONDS, Check, LinkRate, Say, mbps, ramp
from isthmus.errors import ConfigError

PORT = 29510
HEADER = struct.Struct(">16scQ")
MAGIC = b"isthmus-doctor/1"
PING, UP, DOWN, BUSY = b"P", b"U", b"D", b"B"  # a ping's answer carries the listener's clock, in microseconds
MOST_BYTES = 1 << 30  # of one transfer
FIRST_BYTES = 1 << 16
BLOCK_BYTES = 1 << 16
PINGS = 11
SILENCE_SECONDS = 10.0  # nothing moves for so long: the other side is gone
SESSION_SECONDS = 300.0  # no machine keeps the listener longer
MOST_CONNECTIONS = 16


class PeerFault(Exception):
    """Words for what went wrong, and a cure."""

    def __init__(self, words: str, cure: str) -> None:
        super().__init__(words)
        self.words, self.cure = words, cure


def parse_host(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT, [IPV6]:PORT."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?", text)
    if found is None and re.fullmatch(r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*", text):
        with suppress(ValueError):
            return str(ipaddress.IPv6Address(text)), PORT
    if found is None or not 0 < int(found[3] or PORT) < 65536:
        raise ConfigError(
            f'"{text}" is neither a bucket nor a machine; write s3://bucket/prefix, a folder with a slash '
            f"(./bucket), or HOST:PORT (port {PORT} if none is given)"
        )
    return found[1] or found[2], int(found[3] or PORT)


def shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# The wire


def _read(link: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = link.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionResetError("hung up")
        parts += part
    return bytes(parts)


def _drop(link: socket.socket, num_bytes: int, deadline: float) -> None:
    """Receive and forget."""
    room = memoryview(bytearray(BLOCK_BYTES))
    while num_bytes:
        if time.monotonic() > deadline:
            raise TimeoutError
        got = link.recv_into(room, min(num_bytes, len(room)))
        if not got:
            raise ConnectionResetError("hung up")
        num_bytes -= got


def _pour(link: socket.socket, num_bytes: int, block: bytes, deadline: float) -> None:
    while num_bytes:
        if time.monotonic() > deadline:
            raise TimeoutError
        part = memoryview(block)[: min(num_bytes, len(block))]
        link.sendall(part)
        num_bytes -= len(part)


def _noise() -> bytes:
    """Bytes that no tunnel can make smaller."""
    return os.urandom(BLOCK_BYTES)


# The side that asks


class Peer:
    """One connection to a listener."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self.where, self.seconds = shown(host, port), seconds
        self.deadline = time.monotonic() + SESSION_SECONDS
        self.block = _noise()
        self.there = f"start `isthmus doctor --listen` there, and let TCP port {port} through its firewall"
        try:
            self.link = socket.create_connection((host, port), timeout=SILENCE_SECONDS)
        except socket.gaierror:
            raise PeerFault(
                f"the name {host} does not resolve", "correct it, or give the machine's address"
            ) from None
        except TimeoutError:
            raise PeerFault(f"{self.where} does not answer", self.there) from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise PeerFault(f"cannot reach {self.where}: {reason}", self.there) from None
        self.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, letter: bytes, number: int = 0) -> int:
        """One header there, one back; the number that comes with it."""
        self.link.sendall(HEADER.pack(MAGIC, letter, number))
        return self.answer(letter)

    def answer(self, letter: bytes) -> int:
        # Enough to see whose protocol it is, before waiting for a whole header from somebody else's.
        start = self.link.recv(len(MAGIC))
        if not start:
            raise ConnectionResetError("hung up")
        if not MAGIC.startswith(start):
            raise PeerFault(f"{self.where} talks another protocol than isthmus doctor", self.there)
        magic, said, number = HEADER.unpack(start + _read(self.link, HEADER.size - len(start)))
        if magic != MAGIC or said not in (letter, BUSY):
            raise PeerFault(f"{self.where} talks another protocol than isthmus doctor", self.there)
        if said == BUSY:
            raise PeerFault(f"{self.where} is measuring with another machine", "try again in a minute")
        return number

    def up(self, num_bytes: int) -> None:
        self.link.sendall(HEADER.pack(MAGIC, UP, num_bytes))
        _pour(self.link, num_bytes, self.block, self.deadline)
        self.answer(UP)

    def down(self, num_bytes: int) -> None:
        if self.ask(DOWN, num_bytes) != num_bytes:
            raise PeerFault(f"{self.where} talks another protocol than isthmus doctor", self.there)
        _drop(self.link, num_bytes, self.deadline)

    def measure(self) -> tuple[LinkRate, float]:
        """The link, and by how many seconds the listener's clock is ahead of ours."""
        trips, ahead = [], []
        for _ in range(PINGS):
            began, unix = time.perf_counter(), time.time()
            there = self.ask(PING) / 1e6
            trips.append(time.perf_counter() - began)
            ahead.append(there - unix - trips[-1] / 2)
        trip = statistics.median(trips)
        up = ramp(self.up, self.seconds, FIRST_BYTES, MOST_BYTES)
        down = ramp(self.down, self.seconds, FIRST_BYTES, MOST_BYTES)
        rate = LinkRate(up_mbps=mbps(*up, trip), down_mbps=mbps(*down, trip), round_trip_ms=trip * 1e3)
        return rate, statistics.median(ahead)


def check_peer(host: str, port: int, seconds: float, say: Say) -> tuple[list[Check], LinkRate | None]:
    where = shown(host, port)
    say(f"measuring the link to {where}")
    peer = None
    try:
        peer = Peer(host, port, seconds)
        rate, ahead = peer.measure()
    except PeerFault as fault:
        return [Check(name=where, ok=False, words=fault.words, cure=fault.cure)], None
    except TimeoutError:
        words = f"{where} took the connection and went silent"
        return [Check(name=where, ok=False, words=words, cure=peer.there)], None
    except OSError:
        words = f"{where} hung up: it does not talk isthmus doctor's protocol, or the link broke"
        return [Check(name=where, ok=False, words=words, cure=peer.there)], None
    finally:
        if peer is not None:
            peer.link.close()
    facts = {
        "up_mbps": rate.up_mbps,
        "down_mbps": rate.down_mbps,
        "round_trip_ms": rate.round_trip_ms,
        "clock_ahead_seconds": ahead,
    }
    checks = [Check(name=where, ok=True, words=rate.describe(), facts=facts)]
    if abs(ahead) > WRONG_CLOCK_SECONDS:
        words = f"the clocks of {where} and of this machine differ by {abs(ahead):.0f} s"
        cure = "set both by NTP; a bucket refuses requests of a machine that is some minutes off"
        checks.append(Check(name="clock", ok=False, words=words, cure=cure))
    return checks, rate


# The side that listens


def _bind(host: str, port: int) -> socket.socket:
    """A server on one address, or on all there are, IPv4 and IPv6."""
    if host:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class Listener:
    """Answers machines that ask, until it is told to stop."""

    def __init__(self, host: str, port: int, say: Say) -> None:
        self.say, self.counts = say, Counter[str]()
        self._measuring, self._room = threading.Lock(), threading.Semaphore(MOST_CONNECTIONS)
        self._block = _noise()
        try:
            self.server = _bind(host, port)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot listen on {shown(host or '0.0.0.0', port)}: {reason}; "
                "give --listen an address of this machine and a free port"
            ) from None
        self.port = self.server.getsockname()[1]

    def serve(self) -> None:
        """Until KeyboardInterrupt, which the caller expects."""
        self.server.settimeout(0.5)
        try:
            while True:
                try:
                    link, address = self.server.accept()
                except TimeoutError:
                    continue
                except OSError:  # the other side was gone before we looked
                    time.sleep(0.05)
                    continue
                if not self._room.acquire(blocking=False):
                    link.close()
                    continue
                threading.Thread(target=self._meet, args=(link, address[0]), daemon=True).start()
        finally:
            self.server.close()

    def _meet(self, link: socket.socket, who: str) -> None:
        held = False
        try:
            with link:
                link.settimeout(SILENCE_SECONDS)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                first = self._header(link)
                # A moment's grace: the one before may be gone and not yet missed.
                held = self._measuring.acquire(timeout=1.0)
                if not held:
                    link.sendall(HEADER.pack(MAGIC, BUSY, 0))
                    self._tell(f"sent away {who}: another machine is being measured", "sent away")
                    return
                self._serve(link, who, *first)
        except ValueError:
            self._tell(f"refused {who}: it does not talk isthmus doctor's protocol", "refused")
        except OSError:
            self._tell(f"lost {who}: it went silent or away", "lost")
        finally:
            if held:
                self._measuring.release()
            self._room.release()

    def _header(self, link: socket.socket) -> tuple[bytes, int]:
        start = _read(link, len(MAGIC))
        if start != MAGIC:  # said before the rest is waited for
            raise ValueError("junk")
        _, letter, number = HEADER.unpack(start + _read(link, HEADER.size - len(MAGIC)))
        if letter not in (PING, UP, DOWN) or number > MOST_BYTES:
            raise ValueError("junk")
        return letter, number

    def _serve(self, link: socket.socket, who: str, letter: bytes, number: int) -> None:
        self.say(f"measuring with {who}")
        deadline, moved = time.monotonic() + SESSION_SECONDS, 0
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError
            if letter == UP:
                _drop(link, number, deadline)
            back = int(time.time() * 1e6) if letter == PING else number
            link.sendall(HEADER.pack(MAGIC, letter, back))
            if letter == DOWN:
                _pour(link, number, self._block, deadline)
            moved += 0 if letter == PING else number
            try:
                letter, number = self._header(link)
            except ConnectionResetError:
                self._tell(f"done with {who}: {moved / 1e6:.1f} MB moved", "served")
                return

    def _tell(self, words: str, what: str) -> None:
        self.counts[what] += 1
        self.say(words)
