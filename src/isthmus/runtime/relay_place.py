"""The two ends of a relay, for stages that cannot reach each other: one waits there, the other calls."""

import hashlib
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from isthmus.protocol.trust import Signer
from isthmus.runtime.addresses import Address, keep_alive
from isthmus.runtime.greeting import GUEST, HOST, PAIRED, greet, read_nonce
from isthmus.runtime.peer import HANDSHAKE_SECONDS, SWEEP_SECONDS, StageStart

PAUSE_SECONDS = 0.5  # between two calls to a relay that does not answer


def label(host: StageStart) -> bytes:
    """The common label of both ends: the start of the waiting stage. Only the next stage calls."""
    said = "\0".join((host.run_id, host.replica, str(host.stage), str(host.start)))
    return hashlib.sha256(said.encode()).digest()


@dataclass(frozen=True, slots=True)
class RelayPlace:
    """A stage's waiting place at a relay."""

    relay: Address
    signer: Signer
    host: StageStart

    def __str__(self) -> str:
        return f"relay {self.relay}"

    def dial(self, seconds: float) -> socket.socket:
        link = self.greet(GUEST, seconds)
        try:
            if link.recv(1) != PAIRED:
                raise ConnectionResetError(f"stage {self.host.stage} does not wait at the relay")
        except BaseException:
            link.close()
            raise
        return link

    def greet(self, part: bytes, seconds: float) -> socket.socket:
        try:
            link = self.relay.dial(seconds)
        except OSError as error:
            why = error.strerror or "no answer"
            raise ConnectionRefusedError(
                f"no relay at {self.relay} ({why}); start `isthmus relay` there"
            ) from None
        try:
            link.settimeout(seconds)
            keep_alive(link)
            link.sendall(greet(self.signer, part, label(self.host), read_nonce(link)))
        except BaseException:
            link.close()
            raise
        return link


class RelayListener:
    """The listener of an Endpoint that waits at a relay: one connection; once that is paired, the next."""

    def __init__(self, place: RelayPlace, pause: Callable[[float], None] = time.sleep) -> None:
        self.place, self.pause = place, pause
        self.link: socket.socket | None = None
        self.trouble = ""  # why it cannot be reached
        self.closed = False

    def accept(self) -> tuple[socket.socket, str]:
        """The next connection and its address; TimeoutError if none comes within SWEEP_SECONDS."""
        try:
            if self.link is None:
                self.link = self.place.greet(HOST, HANDSHAKE_SECONDS)
                self.link.settimeout(SWEEP_SECONDS)
                self.trouble = ""
            try:
                said = self.link.recv(1)
            except TimeoutError:
                raise TimeoutError("nobody came") from None
            link, self.link = self.link, None
            if said == PAIRED:
                return link, str(self.place)
            link.close()  # the relay ended, or made room for others
        except TimeoutError:
            if self.link:
                raise
            self.trouble = f"the relay at {self.place.relay} took our call and says nothing"
        except OSError as error:
            self.link, self.trouble = None, error.strerror or str(error)
        if not self.closed:
            self.pause(PAUSE_SECONDS)
        raise TimeoutError("nobody came")

    def close(self) -> None:
        self.closed = True
        if link := self.link:
            with suppress(OSError):
                link.close()
