"""Where a stage's gate is found: at an address, or at a meeting that a relay keeps."""

import hashlib
import ipaddress
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from isthmus.errors import ConfigError
from isthmus.runtime.handshake import Credentials
from isthmus.runtime.relay import GUEST, HELLO, HOST, MAGIC, PAIRED
from isthmus.runtime.splice import prepare, shut

BACKLOG = 512
SWEEP_SECONDS = 0.5  # a door says as often that nobody has come
DIAL_SECONDS = 5.0
PAUSE_SECONDS = 1.0  # until a relay that does not answer is asked again


@dataclass(frozen=True, slots=True)
class Places:
    """Where the launchers of a replica meet: at stage 0's gate. Where a later stage has a gate: its `own`."""

    master: "Place | None" = None  # None: all stages are on this machine
    own: "Place | None" = None


class Door(Protocol):
    """The gate's own side of a place."""

    trouble: str  # why nobody can come to it; empty where they can

    @property
    def place(self) -> "Place":
        """Where others find it."""
        ...

    def accept(self) -> tuple[socket.socket, str] | None:
        """Who comes next, and from where; None where nobody does within SWEEP_SECONDS."""
        ...

    def close(self) -> None: ...


class Place(Protocol):
    def dial(self, seconds: float) -> socket.socket:
        """A connection to the gate there, of which nothing is known yet; OSError where there is none."""
        ...

    def door(self) -> Door: ...


@dataclass(frozen=True, slots=True)
class Address:
    """A gate that listens."""

    host: str  # a number
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, option: str, example: str = "10.0.0.2:29500") -> "Address":
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f'{option} is "{text}"; write HOST:PORT, for example {example}')
        return cls(host.strip("[]"), int(port))

    @property
    def here(self) -> bool:
        """Is it an address that no other machine reaches?"""
        address = ipaddress.ip_address(self.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    def dial(self, seconds: float) -> socket.socket:
        return socket.create_connection((self.host, self.port), seconds)

    def door(self) -> "ListeningDoor":
        return ListeningDoor(self)


class ListeningDoor:
    def __init__(self, place: Address) -> None:
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        self.listener = socket.create_server((place.host, place.port), family=family, backlog=BACKLOG)
        self.listener.settimeout(SWEEP_SECONDS)
        self.place = Address(place.host, self.listener.getsockname()[1])
        self.trouble = ""

    def accept(self) -> tuple[socket.socket, str] | None:
        try:
            link, address = self.listener.accept()
            return link, str(address[0])
        except TimeoutError:
            return None
        except OSError:  # gone before we looked, the listener is closing, or no file descriptor is left
            time.sleep(0.01)
            return None

    def close(self) -> None:
        shut(self.listener, socket.SHUT_RDWR)
        self.listener.close()


@dataclass(frozen=True, slots=True)
class Meeting:
    """A gate that cannot be reached, and waits at a relay for its guests."""

    relay: Address
    credentials: Credentials
    stage: int  # whose gate it is

    @property
    def secret(self) -> bytes:
        """What the relay pairs by: only holders of the replica's key know it. A signature by Ed25519 is the
        same each time, and without the key nobody can foretell it."""
        signer = self.credentials.signer
        said = f"{signer.replica}\0{self.stage}".encode()
        return hashlib.sha256(signer.sign("relay meeting", self.credentials.run_id, said)).digest()

    def __str__(self) -> str:
        return f"relay {self.relay}"

    def dial(self, seconds: float) -> socket.socket:
        link = self._greet(GUEST, seconds)
        try:
            if link.recv(1) != PAIRED:
                raise ConnectionResetError(f"stage {self.stage} does not wait there")
        except BaseException:
            link.close()
            raise
        return link

    def door(self) -> "WaitingDoor":
        return WaitingDoor(self)

    def _greet(self, role: bytes, seconds: float) -> socket.socket:
        link = self.relay.dial(seconds)
        prepare(link, seconds)
        link.sendall(HELLO.pack(MAGIC, role, self.secret))
        return link


class WaitingDoor:
    """One connection waits at the relay; as soon as it is paired, the next one does."""

    def __init__(self, place: Meeting, pause: Callable[[float], None] = time.sleep) -> None:
        self.place, self.pause = place, pause
        self.link: socket.socket | None = None
        self.secret = b""
        self.trouble = ""  # why nobody can come
        self.closed = False

    def accept(self) -> tuple[socket.socket, str] | None:
        try:
            if self.link and self.secret != self.place.secret:  # the replica has another key now
                self.link.close()
                self.link = None
            if self.link is None:
                self.secret = self.place.secret
                self.link = self.place._greet(HOST, DIAL_SECONDS)
                self.link.settimeout(SWEEP_SECONDS)
                self.trouble = ""
            link = self.link
            said = link.recv(1)
            self.link = None
            if said == PAIRED:
                return link, str(self.place)
            link.close()  # the relay has ended, or made room for others
        except OSError as error:  # there is no relay, or it was closed here meanwhile
            if self.link and isinstance(error, TimeoutError):
                return None
            if self.link is None:
                why = error.strerror or "no answer"
                self.trouble = f"no relay at {self.place.relay} ({why}); start `isthmus relay` there"
            self.link = None
        if not self.closed:
            self.pause(PAUSE_SECONDS)
        return None

    def close(self) -> None:
        self.closed = True
        if link := self.link:
            with suppress(OSError):
                link.close()
