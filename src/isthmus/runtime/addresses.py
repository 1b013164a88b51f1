"""Parse addresses from options and stage documents, and listen on them."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from isthmus.errors import ConfigError

LOOPBACK = "127.0.0.1"
BACKLOG = 512
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
