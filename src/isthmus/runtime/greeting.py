"""The greeting with which an end of a link proves to a relay that it holds the replica's key.

    relay -> end    a nonce
    end -> relay    magic, part, the replica's public key, a label, and a signature over these and the nonce
    relay -> end    one byte, as soon as the other end has come

The label names what the two ends have in common: the start of the stage that waits. The relay pairs equal
labels under one key and does not interpret them. A greeting cannot be replayed: the next connection has
another nonce. The ends tell each other the connection's direction and their starts (`runtime.peer`).
"""

import socket
import struct

from isthmus.protocol.trust import Signer, signed_by

MAGIC = b"isthmus-relay/2\0"
KIND = "relay greeting"  # what the signature covers; no document of a run has this kind
SAID = struct.Struct(">16sc32s32s")
NONCE_BYTES, SIGNATURE_BYTES = 32, 64
GREETING_BYTES = SAID.size + SIGNATURE_BYTES
HOST, GUEST = b"H", b"G"  # the end that waits, the end that calls
PAIRED = b"+"


def read_nonce(link: socket.socket) -> bytes:
    nonce = b""
    while len(nonce) < NONCE_BYTES:
        part = link.recv(NONCE_BYTES - len(nonce))
        if not part:
            raise ConnectionResetError("it is no relay of this version")
        nonce += part
    return nonce


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
