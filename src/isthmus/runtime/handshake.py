"""Two processes of one replica prove to each other that they hold its key, in three messages of fixed size.

    guest -> gate    magic and version, the guest's nonce, what it comes for
    gate -> guest    the gate's nonce, its signature
    guest -> gate    the guest's signature

Both sign all that was said, the run, the replica and their own part in it. So a signature is worth nothing
in another run or replica, on another connection, for another purpose, or sent back to whoever made it.
Nothing is parsed before it is proved. What this cannot exclude is somebody between the two who passes every
byte on, and later changes some: so TLS follows (`runtime.tls`), except on links by gloo.
"""

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.protocol.trust import Signer, load_signer

KIND = "stage handshake"  # of what is signed: no document of a run is of this kind
MAGIC = b"isthmus-stages/2"
NONCE_BYTES, SIGNATURE_BYTES = 32, 64
HELLO = struct.Struct(">16s32sBHQ")
ANSWER_BYTES = NONCE_BYTES + SIGNATURE_BYTES

# What a guest comes for. KNOCK: to see that it is the right gate; LINK: to be a neighbour by gloo; FORTH and
# BACK: to be one over TLS, for the one direction and the other.
KNOCK, LAUNCHERS, WORKERS, LINK, FORTH, BACK = range(6)

Nonce = Callable[[], bytes]


class Stranger(Exception):
    """The other side does not prove that it holds the replica's key; the text says what it did instead."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a connection is for."""

    what: int
    stage: int  # the guest's
    generation: int = 0  # of workers: which start of the replica's workers they belong to


class Credentials:
    """What all processes of one replica hold, and nobody else.

    `path` is the key's file, where there is one: a key may be replaced while we run.
    """

    def __init__(self, run_id: str, signer: Signer, path: Path | None = None) -> None:
        self.run_id, self.path = run_id, path
        self._signer, self._seen = signer, None if path is None else _state(path)

    @property
    def signer(self) -> Signer:
        """The key that the file has now."""
        if self.path and (now := _state(self.path)) not in (None, self._seen):
            self._seen = now
            with suppress(ConfigError):  # half written: the next look finds it whole
                self._signer = load_signer(self.path, self._signer.replica)
        return self._signer

    @property
    def public_key(self) -> str:
        """The one that the other side must hold the private half of: all stages of a replica share it."""
        return self.signer.public_key

    def sign(self, part: bytes, said: bytes) -> bytes:
        return self.signer.sign(KIND, self.run_id, self._words(part, said))

    def signed(self, signature: bytes, part: bytes, said: bytes) -> bool:
        return self.signer.signed(signature, KIND, self.run_id, self._words(part, said))

    def _words(self, part: bytes, said: bytes) -> bytes:
        return part + b"\0" + self.signer.replica.encode() + b"\0" + said


def _state(path: Path) -> tuple[int, int] | None:
    """Of a file that is replaced, never rewritten."""
    try:
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    except OSError:
        return None


def fresh_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


class Guest:
    """The side that comes."""

    def __init__(self, credentials: Credentials, purpose: Purpose, nonce: Nonce = fresh_nonce) -> None:
        self.credentials = credentials
        self.hello = HELLO.pack(MAGIC, nonce(), purpose.what, purpose.stage, purpose.generation)

    def prove(self, answer: bytes) -> bytes:
        """Our proof, once the gate's is good."""
        said = self.hello + answer[:NONCE_BYTES]
        if not self.credentials.signed(answer[NONCE_BYTES:], b"gate", said):
            raise Stranger("it does not hold this replica's key for this run")
        return self.credentials.sign(b"guest", said)


class Host:
    """The side that is at the gate."""

    def __init__(self, credentials: Credentials, hello: bytes, nonce: Nonce = fresh_nonce) -> None:
        if len(hello) != HELLO.size or not hello.startswith(MAGIC):
            raise Stranger("it does not talk this protocol")
        self.credentials = credentials
        self.hello, self.nonce = hello, nonce()

    def answer(self) -> bytes:
        return self.nonce + self.credentials.sign(b"gate", self.hello + self.nonce)

    def check(self, proof: bytes) -> Purpose:
        """What the guest comes for: read only now that it is known who says so."""
        if not self.credentials.signed(proof, b"guest", self.hello + self.nonce):
            raise Stranger("it does not hold this replica's key for this run")
        _, _, what, stage, generation = HELLO.unpack(self.hello)
        return Purpose(what, stage, generation)
