"""Keys, signatures, and the exceptions for refused documents.

A signed document is `{"replica": name, "signature": hex, "body": {...}}`: Ed25519 over the kind of document,
the run id and the body's exact bytes. The signature covers kind and run id, so a commit cannot pass as a
manifest, nor a document of one run as another's.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from isthmus.errors import ConfigError
from isthmus.reading import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.x509 import Certificate, CertificateBuilder

MAX_DOCUMENT_BYTES = 4 * 2**20
MAX_KEY_BYTES = 1024
OWNER = "@owner"  # signs membership documents; no replica has such a name


class Refused(ValueError):
    """A document or update from the network does not count: words for people, and a code for programs."""

    def __init__(self, words: str, code: str = "malformed") -> None:
        super().__init__(words)
        self.code = code


class OtherAnchor(Refused):
    """An update that starts from another anchor than ours: its author or we have diverged."""

    def __init__(self, words: str, anchor: str = "") -> None:
        super().__init__(words, "other_anchor")
        self.anchor = anchor


class Sealed(msgspec.Struct, frozen=True):
    """A signed document as stored; the body is what was signed, byte for byte."""

    replica: Annotated[str, msgspec.Meta(max_length=100)]
    signature: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
    body: msgspec.Raw


def canonical(value: Any) -> bytes:
    """Encode a value to the same bytes on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _prefix(kind: str, run_id: str) -> bytes:
    return b"isthmus/2\0" + kind.encode() + b"\0" + run_id.encode() + b"\0"


class Signer:
    """One replica's private key. `pinned` is the sha256, from its file, of the run.json that it was made
    for."""

    def __init__(self, replica: str, secret: bytes, pinned: str = "") -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self.replica, self.pinned = replica, pinned
        self._key = Ed25519PrivateKey.from_private_bytes(secret)

    @property
    def public_key(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    def seal(self, kind: str, run_id: str, body: "Mapping[str, Any] | msgspec.Struct") -> bytes:
        raw = msgspec.json.encode(body) if isinstance(body, msgspec.Struct) else canonical(body)
        signature = self._key.sign(_prefix(kind, run_id) + raw).hex()
        return msgspec.json.encode(Sealed(self.replica, signature, msgspec.Raw(raw)))

    def sign(self, kind: str, run_id: str, data: bytes) -> bytes:
        """Return 64 bytes, for fixed-size messages that are not documents."""
        return self._key.sign(_prefix(kind, run_id) + data)

    def issue(self, builder: "CertificateBuilder") -> "Certificate":
        """Sign a certificate for a key that serves one connection between stages."""
        return builder.sign(self._key, None)

    def signed(self, signature: bytes, kind: str, run_id: str, data: bytes) -> bool:
        """Whether this very key made the signature."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.public_key().verify(signature, _prefix(kind, run_id) + data)
        except InvalidSignature:
            return False
        return True


def new_secret() -> bytes:
    return os.urandom(32)


def save_secret(path: Path, secret: bytes, run_digest: str) -> None:
    """Save a key, readable only by its owner; never overwrite one. `run_digest` pins the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        file.write(f"{secret.hex()}\nrun {run_digest}\n")
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
    if re.fullmatch(r"\s*[0-9a-f]{64}\s*", text):
        raise ConfigError(f"{path} is a key of a run that was made by isthmus 0.2; train or export it there")
    found = re.fullmatch(r"\s*([0-9a-f]{64})\s*\nrun ([0-9a-f]{64})\s*", text)
    if not found:
        raise ConfigError(
            f"{path} is not a key of `isthmus init` (64 hexadecimal digits, and the run it is for)"
        )
    return Signer(replica, bytes.fromhex(found[1]), found[2])


def open_raw(data: bytes, kind: str, run_id: str, keys: Mapping[str, str]) -> tuple[str, bytes]:
    """(replica, body) of a signed document, the body as its bytes; or Refused. It reads nothing before it has
    checked the signature."""
    sealed = _sealed(data, kind)
    _verify(sealed.replica, sealed.signature, bytes(sealed.body), kind, run_id, keys)
    return sealed.replica, bytes(sealed.body)


def raw_body(data: bytes, kind: str) -> bytes:
    """The body of a document whose signature is checked afterwards, by keys that the body names."""
    return bytes(_sealed(data, kind).body)


def _sealed(data: bytes, kind: str) -> Sealed:
    try:
        return msgspec.json.decode(data, type=Sealed)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Refused(f"the {kind} is not signed: it is not a document of ours", "unsigned") from None


def _verify(
    replica: str, signature: str, raw: bytes, kind: str, run_id: str, keys: Mapping[str, str]
) -> None:
    from cryptography.exceptions import InvalidSignature

    if replica not in keys:
        words = f"the {kind} is signed by a stranger ({replica!r:.80}), who is not on the run's list"
        raise Refused(words, "unsigned")
    try:
        _public_key(keys[replica]).verify(bytes.fromhex(signature), _prefix(kind, run_id) + raw)
    except (InvalidSignature, ValueError):
        raise Refused(f"the {kind} does not carry {replica}'s signature for this run", "unsigned") from None


def signed_by(public_key: str, signature: bytes, kind: str, data: bytes) -> bool:
    """Whether the holder of this key, whoever that is, signed a message that belongs to no run."""
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(public_key).verify(signature, _prefix(kind, "") + data)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(4096)
def _public_key(digits: str) -> "Ed25519PublicKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(digits))
