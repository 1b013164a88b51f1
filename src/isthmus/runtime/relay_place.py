"""A stage's place at a relay, for stages that cannot reach each other: one end waits there, the other calls.

    relay -> end    a nonce
    end -> relay    magic, part, the replica's public key, a label, and a signature over these and the nonce
    relay -> end    one byte, as soon as the other end has come

The label names what the two ends have in common: the start of the stage that waits. The relay pairs equal
labels under one key and does not interpret them. A greeting cannot be replayed: the next connection has
another nonce. The ends tell each other the connection's direction and their starts (`runtime.peer`).
"""

import hashlib
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from isthmus.protocol.trust import Signer, signed_by
from isthmus.replica.framing import receive_into
from isthmus.runtime.addresses import Address, keep_alive

MAGIC = b"isthmus-relay/2\0"
KIND = "relay greeting"  # what the signature covers; no document of a run has this kind
SAID = struct.Struct(">16sc32s32s")
NONCE_BYTES, SIGNATURE_BYTES = 32, 64
GREETING_BYTES = SAID.size + SIGNATURE_BYTES
HOST, GUEST = b"H", b"G"  # the end that waits, the end that calls
PAIRED = b"+"
PAUSE_SECONDS, WAIT_SECONDS = 0.5, 0.5  # between calls to a relay that does not answer; of one `accept`


def greet(signer: Signer, part: bytes, meeting: bytes, nonce: bytes) -> bytes:
    said = SAID.pack(MAGIC, part, bytes.fromhex(signer.public_key), meeting)
    return said + signer.sign(KIND, "", nonce + said)


def understood(greeting: bytes, nonce: bytes) -> tuple[bytes, bytes] | None:
    """(part, key and label) of a greeting that its key has signed for this nonce."""
    said, signature = greeting[: SAID.size], greeting[SAID.size :]
    magic, part, key, meeting = SAID.unpack(said)
    if magic != MAGIC or part not in (HOST, GUEST) or not signed_by(key.hex(), signature, KIND, nonce + said):
        return None
    return part, key + meeting


@dataclass(frozen=True, slots=True)
class RelayPlace:
    """The place where a stage's start waits."""

    relay: Address
    signer: Signer
    host: tuple[str, str, int, int]  # run, replica, stage, start: both ends know them

    def dial(self, seconds: float) -> socket.socket:
        link = self.greet(GUEST, seconds)
        try:
            if link.recv(1) != PAIRED:
                raise ConnectionResetError(f"stage {self.host[2]} does not wait at the relay")
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
            keep_alive(link)
            nonce = bytearray(NONCE_BYTES)
            receive_into(link, memoryview(nonce))
            label = hashlib.sha256("\0".join(map(str, self.host)).encode()).digest()
            link.sendall(greet(self.signer, part, label, bytes(nonce)))
        except BaseException:
            link.close()
            raise
        return link


class RelayListener:
    """Waits at a relay for an Endpoint: one connection; once that is paired, the next."""

    def __init__(self, place: RelayPlace, seconds: float) -> None:
        """The relay must answer within these seconds."""
        self.place, self.seconds = place, seconds
        self.link: socket.socket | None = None
        self.trouble = ""  # why it cannot be reached
        self.closed = False

    def accept(self) -> tuple[socket.socket, str]:
        """The next connection and its address; TimeoutError if none comes within WAIT_SECONDS."""
        try:
            if self.link is None:
                self.link = self.place.greet(HOST, self.seconds)
                self.link.settimeout(WAIT_SECONDS)
                self.trouble = ""
            said = self.link.recv(1)
            link, self.link = self.link, None
            if said == PAIRED:
                return link, f"relay {self.place.relay}"
            link.close()  # the relay ended, or made room for others
        except TimeoutError:
            if self.link:
                raise
            self.trouble = f"the relay at {self.place.relay} took our call and says nothing"
        except OSError as error:
            self.link, self.trouble = None, error.strerror or str(error)
        if not self.closed:
            time.sleep(PAUSE_SECONDS)
        raise TimeoutError("nobody came")

    def close(self) -> None:
        self.closed = True
        if link := self.link:
            with suppress(OSError):
                link.close()
