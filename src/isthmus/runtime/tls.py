"""TLS 1.3 between two processes of one replica, each proved by the replica's key.

Each side makes a key for the one connection. The replica's Ed25519 key signs its certificate, whose subject
is a hash of the run, the replica, what the connection is for, whose it is, and which side this is. The other
side takes a certificate only if that very key has signed it and the subject is the one it expects: so neither
another replica, nor another stage, nor another start gets in, and no recorded byte is worth anything.
"""

import hashlib
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from isthmus.runtime.handshake import Credentials, Purpose, Stranger

if TYPE_CHECKING:
    from cryptography import x509

ISSUER = "the replica"
ALWAYS = datetime(2000, 1, 1), datetime(2999, 1, 1)  # clocks may be wrong, and a certificate serves once
WELCOME = b"+"
GATE, GUEST = "gate", "guest"


def as_gate(
    link: socket.socket, credentials: Credentials, purpose: Purpose, public_key: str
) -> ssl.SSLSocket:
    """The side that was called. `public_key` is the replica's; Stranger where the other does not hold it."""
    with _naming_strangers():
        context = _context(ssl.PROTOCOL_TLS_SERVER, credentials, purpose, GATE, public_key)
        context.num_tickets = 0  # nothing is resumed, and who only sends would never read them
        secured = context.wrap_socket(link, server_side=True)
        _check_subject(secured, credentials, purpose, GUEST)
        secured.sendall(WELCOME)  # a client of TLS 1.3 cannot know before that it was taken
        return secured


def as_guest(
    link: socket.socket, credentials: Credentials, purpose: Purpose, public_key: str
) -> ssl.SSLSocket:
    """The side that called."""
    with _naming_strangers():
        context = _context(ssl.PROTOCOL_TLS_CLIENT, credentials, purpose, GUEST, public_key)
        secured = context.wrap_socket(link)
        _check_subject(secured, credentials, purpose, GATE)
        if secured.recv(1) != WELCOME:
            raise ConnectionResetError("hung up")
        return secured


@contextmanager
def _naming_strangers() -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError:
        raise Stranger("its certificate does not bear this replica's signature") from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise ConnectionResetError("hung up") from None
    except ssl.SSLError as error:
        raise Stranger(f"it does not talk TLS 1.3, or turned us away ({error.reason or 'TLS'})") from None


def _context(
    side: int, credentials: Credentials, purpose: Purpose, part: str, public_key: str
) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF  # an end is an end: whoever reads knows what was due
    context.check_hostname = False  # names are not what we go by: see _check_subject
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the one we trust is no root
    context.load_verify_locations(cadata=_anchor(public_key))
    with _readable(_own(credentials, subject(credentials, purpose, part))) as path:
        context.load_cert_chain(path)
    return context


def subject(credentials: Credentials, purpose: Purpose, part: str) -> str:
    """64 hexadecimal digits, as long as a name may be."""
    words = (credentials.run_id, credentials.signer.replica, part)
    numbers = (purpose.what, purpose.stage, purpose.generation)
    said = "\0".join(("isthmus-stage-tls/1", *words, *map(str, numbers)))
    return hashlib.sha256(said.encode()).hexdigest()


def _check_subject(link: ssl.SSLSocket, credentials: Credentials, purpose: Purpose, part: str) -> None:
    """Before a byte is read: TLS has checked the signature, and knows nothing of stages."""
    from cryptography import x509

    found = x509.load_der_x509_certificate(link.getpeercert(True) or b"").subject
    if found != _name(subject(credentials, purpose, part)):
        link.close()
        raise Stranger("its certificate is for another stage, start or purpose")


def _name(text: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(name: str, issuer: str) -> "x509.CertificateBuilder":
    from cryptography import x509

    builder = x509.CertificateBuilder(subject_name=_name(name), issuer_name=_name(issuer))
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(ALWAYS[0]).not_valid_after(ALWAYS[1])


def _anchor(public_key: str) -> bytes:
    """The replica's public key as OpenSSL trusts one: in a certificate, which itself is signed by nobody."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding

    builder = _builder(ISSUER, "nobody").public_key(
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(Ed25519PrivateKey.generate(), None).public_bytes(Encoding.DER)


def _own(credentials: Credentials, name: str) -> bytes:
    """A new key, and its certificate by the replica's key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    builder = _builder(name, ISSUER).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret + credentials.signer.issue(builder).public_bytes(Encoding.PEM)


@contextmanager
def _readable(data: bytes) -> Iterator[str]:
    """The path of a file with that in it, as ssl takes keys from files only. On Linux no disk sees it."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:  # readable by its owner alone
            file.write(data)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)  # memory takes it whole
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
