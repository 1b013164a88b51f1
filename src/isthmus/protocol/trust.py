"""Keys, signatures, and what is refused and why.

A signed document is `{"body": {...}, "replica": name, "signature": hex}`: Ed25519 over the kind of
document, the run id and the body in canonical JSON. Kind and run id are part of what is signed, so a commit
cannot be passed off as a manifest, nor a document of one run as another's.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError
from isthmus.reading import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.x509 import Certificate, CertificateBuilder

MAX_DOCUMENT_BYTES = 4 * 2**20
MAX_KEY_BYTES = 1024
# Levels of a document. Python's own limit counts the callers too: what one reader could just read, a closer
# say, another would refuse. A document that holds others' may be deeper than they are.
MOST_DEPTH, MOST_DEPTH_AROUND = 32, 64
HOLDS_OTHERS = ("manifest", "membership")
OWNER, INVITED = "@owner", "@invited"  # who signs, where it is no replica; no replica has such a name


class Refused(ValueError):
    """Something from the network does not count; the text is the reason, for logs and manifests."""


class OtherAnchor(Refused):
    """An update that starts from another anchor than ours: it or we have diverged."""

    def __init__(self, words: str, anchor: str = "") -> None:
        super().__init__(words)
        self.anchor = anchor


def canonical(value: Any) -> bytes:
    """The same bytes for the same value on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _signed_bytes(kind: str, run_id: str, body: Mapping[str, Any]) -> bytes:
    return _prefix(kind, run_id) + canonical(body)


def _prefix(kind: str, run_id: str) -> bytes:
    return b"isthmus/1\0" + kind.encode() + b"\0" + run_id.encode() + b"\0"


class Signer:
    """One replica's private key. `pinned` is the sha256 of the run.json that it was made for, as its file
    says; files up to 0.2 do not."""

    def __init__(self, replica: str, secret: bytes, pinned: str = "") -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self.replica, self.pinned = replica, pinned
        self._key = Ed25519PrivateKey.from_private_bytes(secret)

    @property
    def public_key(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    @property
    def secret(self) -> bytes:
        """For the other machines of this replica, and for nobody else."""
        return self._key.private_bytes_raw()

    def seal(self, kind: str, run_id: str, body: Mapping[str, Any]) -> bytes:
        signature = self._key.sign(_signed_bytes(kind, run_id, body)).hex()
        return canonical({"body": body, "replica": self.replica, "signature": signature})

    def sign(self, kind: str, run_id: str, data: bytes) -> bytes:
        """64 bytes, for messages of a fixed size that are not documents."""
        return self._key.sign(_prefix(kind, run_id) + data)

    def issue(self, builder: "CertificateBuilder") -> "Certificate":
        """A certificate by this key, of a key that serves one connection between stages."""
        return builder.sign(self._key, None)

    def signed(self, signature: bytes, kind: str, run_id: str, data: bytes) -> bool:
        """Is that a signature by this very key?"""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.public_key().verify(signature, _prefix(kind, run_id) + data)
        except InvalidSignature:
            return False
        return True


def new_secret() -> bytes:
    return os.urandom(32)


def save_secret(path: Path, secret: bytes, run_digest: str = "") -> None:
    """Readable by its owner alone, and never over another key. `run_digest` pins the run: see `Signer`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        file.write(secret.hex() + "\n" + (f"run {run_digest}\n" if run_digest else ""))
        file.flush()
        os.fsync(file.fileno())


def load_signer(path: Path, replica: str) -> Signer:
    try:
        text = read_bytes(path, MAX_KEY_BYTES).decode("ascii")
    except FileNotFoundError:
        raise ConfigError(
            f"no key for replica {replica} at {path}; copy it from where `isthmus init` ran, or give --key"
        ) from None
    except (ConfigError, ValueError):
        text = ""
    found = re.fullmatch(r"\s*([0-9a-f]{64})\s*(?:\nrun ([0-9a-f]{64})\s*)?", text)
    if not found:
        raise ConfigError(
            f"{path} is not a key of `isthmus init` (64 hexadecimal digits, and the run it is for)"
        )
    return Signer(replica, bytes.fromhex(found[1]), found[2] or "")


def open_sealed(data: bytes, kind: str, run_id: str, keys: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """(replica, body) of a signed document, or Refused: no byte is trusted before its signature."""
    return open_document(parse_document(data), kind, run_id, keys)


def parse_document(data: bytes) -> Any:
    """What lies in a document's place, as JSON. None where it is none, is nested deeper than any of ours, or
    has a number that JSON has not: it could not be put into another document."""
    try:
        document = json.loads(data, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return None if _is_deeper(document, MOST_DEPTH_AROUND) else document


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is too large")
    return value


def _is_deeper(document: Any, most: int) -> bool:
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(most):
        if not level:
            return False
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
    return bool(level)


def open_document(
    document: Any, kind: str, run_id: str, keys: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """The same of one that was inside another."""
    from cryptography.exceptions import InvalidSignature

    try:
        body, replica, signature = document["body"], document["replica"], document["signature"]
        if not isinstance(body, dict) or not isinstance(replica, str):
            raise TypeError
        if not re.fullmatch("[0-9a-f]{128}", signature):  # one document has one form
            raise ValueError
        if kind not in HOLDS_OTHERS and _is_deeper(document, MOST_DEPTH):
            raise ValueError
        signed = _signed_bytes(kind, run_id, body)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refused(f"the {kind} is not signed: it is not a document of ours") from None
    if replica not in keys:
        raise Refused(f"the {kind} is signed by a stranger ({replica!r:.80}), who is not on the run's list")
    try:
        _public_key(keys[replica]).verify(bytes.fromhex(signature), signed)
    except (InvalidSignature, ValueError):
        raise Refused(f"the {kind} does not carry {replica}'s signature for this run") from None
    return replica, body


@lru_cache(4096)
def _public_key(digits: str) -> "Ed25519PublicKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(digits))


def without_extras(data: bytes) -> bytes:
    """A signed document as `seal` writes it: whatever else lay beside its three fields is dropped."""
    document = json.loads(data)
    return canonical({name: document[name] for name in ("body", "replica", "signature")})
