"""Addresses between machines and on this one: parse them, dial them, and listen on them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from isthmus.errors import ConfigError

LOOPBACK = "127.0.0.1"
BACKLOG = 512
MOST_PATH = 100  # characters of a Unix socket's path; the kernel takes 107
PORTS = range(20_000, 29_000)  # for processes that meet on this machine
_picked = count()


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, option: str, example: str = "10.0.0.2:29500") -> "Address":
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f'{option} is "{text}"; write HOST:PORT, for example {example}')
        return cls(host.strip("[]"), int(port))

    def dial(self, seconds: float) -> socket.socket:
        return socket.create_connection((self.host, self.port), seconds)


@dataclass(frozen=True, slots=True)
class UnixPlace:
    """A stage's Unix socket in a folder of mode 0700, which only its owner may enter."""

    folder: Path
    stage: int

    def dial(self, seconds: float) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(seconds)
            with _short(self.folder) as folder:
                link.connect(f"{folder}/stage-{self.stage}")
        except BaseException:
            link.close()
            raise
        return link

    def listen(self) -> socket.socket:
        """Listen in place of any earlier start: the newest start holds the stage."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self.folder.stat()
        if mode.st_mode & 0o077 or mode.st_uid != os.geteuid():
            raise ConfigError(
                f"others can enter {self.folder}, where stages of this replica meet; chmod 700 it"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(self.folder) as folder:
            path = f"{folder}/stage-{self.stage}"
            fresh = f"{path}.{os.getpid()}"
            with suppress(FileNotFoundError):
                os.unlink(fresh)
            listener.bind(fresh)
            listener.listen(BACKLOG)
            os.replace(fresh, path)
        return listener


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A name of the folder that is short enough for a Unix socket."""
    if len(str(folder)) <= MOST_PATH - len("/stage-99.1234567"):
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def listen(host: str, port: int, cure: str) -> socket.socket:
    """Listen at one address, or without a host at all of them, IPv4 and IPv6. For port 0 the system picks
    one."""
    try:
        if host:
            (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        why = (getattr(error, "strerror", "") or str(error)).lower()
        raise ConfigError(f"cannot listen on {host or '*'}:{port}: {why}; {cure}") from None


def keep_alive(link: socket.socket) -> None:
    """Have the kernel probe an idle peer: a machine that lost its power says nothing."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # seconds, seconds, times; if the system supports them
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def free_port(host: str = LOOPBACK) -> int:
    """A port for a process that starts later, outside the range that the system uses for outgoing
    connections, one of which could take it meanwhile. Processes begin at different ports and count up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(100):
        port = PORTS.start + (os.getpid() * 97 + next(_picked)) % len(PORTS)
        with suppress(OSError), socket.create_server((host, port), family=family):
            return port
    with socket.create_server((host, 0), family=family) as probe:
        return probe.getsockname()[1]
