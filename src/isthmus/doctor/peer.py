"""The link between two machines: one listens (`isthmus doctor --listen`), the other asks.

What is measured is a stage link, made by the code that trains (`doctor.stage_link`), in a process of its own
on both sides. This module is how the two find each other: one TCP port, on which the asker says how long it
will measure and the listener says where its end of the link waits. Every message is a header of 25 bytes. The
listener measures with one machine at a time, for a bounded time, and hangs up on everything else. Standard
library only.
"""

import ipaddress
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from isthmus.crowd import Crowd, Visit
from isthmus.doctor.checks import WRONG_CLOCK_SECONDS, Check, LinkRate, Say
from isthmus.errors import ConfigError

PORT = 29510
HEADER = struct.Struct(">16scQ")
MAGIC = b"isthmus-doctor/2"
# ASK: milliseconds. WAIT: the listener's clock in microseconds. LINK: the port at which its end waits.
ASK, WAIT, LINK, BUSY, FAILED = b"A", b"W", b"L", b"B", b"F"
MOST_MILLISECONDS = 60_000
SILENCE_SECONDS = 10.0  # after so long without an answer the other side is gone
START_SECONDS = 60.0  # until the process with the listener's end runs
GRACE_SECONDS = 3.0  # from the asker's end of the link to ours
SESSION_SECONDS = 300.0  # the listener ends every measurement after this time
MOST_CONNECTIONS = 16
MOST_OF_ONE = 4  # address


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


# Both sides


def _read_header(link: socket.socket) -> tuple[bytes, int]:
    """(letter, number). ValueError as soon as it is another protocol, before the rest has come."""
    data = b""
    while len(data) < HEADER.size:
        part = link.recv(HEADER.size - len(data))
        if not part:
            raise ConnectionResetError("hung up")
        data += part
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise ValueError("another protocol")
    return HEADER.unpack(data)[1:]


def _write_header(link: socket.socket, letter: bytes, number: int = 0) -> None:
    link.sendall(HEADER.pack(MAGIC, letter, number))


@contextmanager
def _stage_link(role: str, host: str, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """One end of the link, in a process that does not outlive this block or the session's time."""
    command = [sys.executable, "-m", "isthmus.doctor.stage_link", role, host, str(seconds)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    limit = threading.Timer(SESSION_SECONDS, child.kill)
    limit.daemon = True
    limit.start()
    try:
        with child:
            try:
                yield child
            finally:
                child.kill()
    finally:
        limit.cancel()


def _line(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The next thing that the process says; nothing where it ends without a word."""
    assert child.stdout is not None
    return json.loads(child.stdout.readline() or "{}")


# The side that asks


def check_peer(host: str, port: int, seconds: float, say: Say) -> tuple[list[Check], LinkRate | None]:
    where = shown(host, port)
    there = f"start `isthmus doctor --listen` there, and let TCP port {port} through its firewall"
    say(f"measuring the link to {where}")
    try:
        rate, ahead = _measure(host, port, seconds, there)
    except PeerFault as fault:
        return [Check(name=where, ok=False, words=fault.words, cure=fault.cure)], None
    facts = asdict(rate) | {"clock_ahead_seconds": ahead}
    checks = [Check(name=where, ok=True, words=rate.describe(), facts=facts)]
    if abs(ahead) > WRONG_CLOCK_SECONDS:
        words = f"the clocks of {where} and of this machine differ by {abs(ahead):.0f} s"
        cure = "set both by NTP; a bucket refuses requests of a machine that is some minutes off"
        checks.append(Check(name="clock", ok=False, words=words, cure=cure))
    return checks, rate


def _measure(host: str, port: int, seconds: float, there: str) -> tuple[LinkRate, float]:
    """The link, and by how many seconds the listener's clock is ahead of ours."""
    where = shown(host, port)
    with _connected(host, port, there) as link:
        try:
            began = time.time()
            _write_header(link, ASK, int(seconds * 1000))
            letter, clock = _read_header(link)
            ahead = clock / 1e6 - (began + time.time()) / 2
            if letter == WAIT:
                return _ask(link, where, seconds), ahead
            if letter != BUSY:
                raise ValueError("another protocol")
        except ValueError:
            raise PeerFault(f"{where} talks another protocol than isthmus doctor", there) from None
        except TimeoutError:
            raise PeerFault(f"{where} took the connection and went silent", there) from None
        except OSError:
            words = f"{where} hung up: it does not talk isthmus doctor's protocol, or the link broke"
            raise PeerFault(words, there) from None
    raise PeerFault(f"{where} is measuring with another machine", "try again in a minute")


def _ask(link: socket.socket, where: str, seconds: float) -> LinkRate:
    """Start our end while the listener starts its own, then join the two."""
    with _stage_link("ask", link.getpeername()[0], seconds) as child:
        link.settimeout(START_SECONDS)
        letter, port = _read_header(link)
        if letter != LINK:
            words = f"{where} could not start its end of a stage link"
            raise PeerFault(words, "see what `isthmus doctor --listen` says there")
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # it ended; what it said before tells why
            os.write(child.stdin.fileno(), f"{port}\n".encode())
        found = _line(child)
    if not found:
        words = f"this machine's end of the stage link to {where} ended without a word"
        raise PeerFault(words, "see whether torch can be loaded here: python -c 'import torch'")
    if "fault" in found:
        raise PeerFault(
            f"{where} answers, but the stage link to it fails: {found['fault']}",
            "let all TCP ports through between the two machines while you measure: this takes one that "
            "the system chooses, stages take the one of --master",
        )
    return LinkRate(**found)


def _connected(host: str, port: int, there: str) -> socket.socket:
    where = shown(host, port)
    try:
        return socket.create_connection((host, port), timeout=SILENCE_SECONDS)
    except socket.gaierror:
        cure = "correct it, or give the machine's address"
        raise PeerFault(f"the name {host} does not resolve", cure) from None
    except TimeoutError:
        raise PeerFault(f"{where} does not answer", there) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PeerFault(f"cannot reach {where}: {reason}", there) from None


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
    """Answers machines that ask, until the caller is interrupted."""

    def __init__(self, host: str, port: int, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.counts = say, Counter[str]()
        self._measuring, self._crowd = threading.Lock(), Crowd(MOST_CONNECTIONS, MOST_OF_ONE, clock)
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
                self._crowd.sweep()
                try:
                    link, address = self.server.accept()
                except TimeoutError:
                    continue
                except OSError:  # the other side was gone before we looked
                    time.sleep(0.05)
                    continue
                visit = self._crowd.enter(link, str(address[0]))
                if visit is None:
                    link.close()
                    continue
                visit.request()  # one message of 25 bytes is all that is waited for
                threading.Thread(target=self._meet, args=(visit, str(address[0])), daemon=True).start()
        finally:
            self.server.close()

    def _meet(self, visit: Visit, who: str) -> None:
        link, measuring = visit.link, False
        try:
            with link:
                link.settimeout(SILENCE_SECONDS)
                letter, milliseconds = _read_header(link)
                if letter != ASK or not 0 < milliseconds <= MOST_MILLISECONDS:
                    raise ValueError("junk")
                # The machine before may be gone, and its process not yet.
                measuring = self._measuring.acquire(timeout=1.0)
                if not measuring:
                    _write_header(link, BUSY)
                    self._tell(f"sent away {who}: another machine is being measured", "sent away")
                    return
                visit.keep(SESSION_SECONDS)
                self._serve(link, who, milliseconds / 1000)
        except ValueError:
            self._tell(f"refused {who}: it does not talk isthmus doctor's protocol", "refused")
        except OSError:
            self._tell(f"lost {who}: it went silent or away", "lost")
        finally:
            if measuring:
                self._measuring.release()
            self._crowd.leave(link)

    def _serve(self, link: socket.socket, who: str, seconds: float) -> None:
        self.say(f"measuring with {who}")
        _write_header(link, WAIT, int(time.time() * 1e6))
        address = link.getsockname()[0].removeprefix("::ffff:")  # IPv4 on a socket for both
        with _stage_link("serve", address, seconds) as child:
            first = self._hear(child, link)
            if "port" not in first:
                why = first.get(
                    "fault", "the process with this end of the link did not start; is torch installed?"
                )
                self._tell(f"cannot measure with {who}: {why}", "lost")
                _write_header(link, FAILED)
                return
            _write_header(link, LINK, first["port"])
            last = self._hear(child, link)
        if "moved" not in last:
            raise ConnectionResetError("the link broke")
        self._tell(f"done with {who}: {last['moved'] / 1e6:.1f} MB moved", "served")

    def _hear(self, child: subprocess.Popen[str], link: socket.socket) -> dict[str, Any]:
        """What our end says next. The asker is silent meanwhile, and hangs up when its own end is done."""
        assert child.stdout is not None
        heard, _, _ = select.select([link, child.stdout], [], [], SESSION_SECONDS)
        if child.stdout not in heard:
            if link.recv(1):
                raise ValueError("junk")
            if not select.select([child.stdout], [], [], GRACE_SECONDS)[0]:
                raise ConnectionResetError("hung up")
        return _line(child)

    def _tell(self, words: str, what: str) -> None:
        self.counts[what] += 1
        self.say(words)
