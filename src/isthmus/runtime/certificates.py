"""TLS 1.3 between the processes of one replica: both sides must hold the replica's key.

OpenSSL trusts certificates, not keys. So the anchor is a certificate that carries the replica's public key,
whoever signed it. A process makes a new key and certifies it with the replica's key. A wrong or missing key
fails inside the handshake. (A self-signed leaf fails against such an anchor, even with the right key.)
"""

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509

    from isthmus.protocol.trust import Signer

ANCHOR, LEAF = "key", "end"
ALWAYS = datetime(2000, 1, 1), datetime(2999, 1, 1)  # clocks may be wrong; a certificate lasts as its process


def contexts(signer: "Signer") -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A process's contexts for accepted and for dialed connections."""
    anchor, own = _anchor(signer.public_key), _own(signer)
    made = []
    with _as_file(own) as path:
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # keys matter here, not names
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the anchor is not a root certificate
            context.load_verify_locations(cadata=anchor)
            context.load_cert_chain(path)
            made.append(context)
    made[0].num_tickets = 0  # sessions are not resumed, and a side that only sends would never read tickets
    return made[0], made[1]


def _builder(subject: str, issuer: str, ca: bool) -> "x509.CertificateBuilder":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    builder = x509.CertificateBuilder(subject_name=name(subject), issuer_name=name(issuer))
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(ALWAYS[0]).not_valid_after(ALWAYS[1])
    constraints = x509.BasicConstraints(ca=ca, path_length=0 if ca else None)
    return builder.add_extension(constraints, critical=True)


def _anchor(public_key: str) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding

    builder = _builder(ANCHOR, "nobody", ca=True)
    builder = builder.public_key(Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)))
    return builder.sign(Ed25519PrivateKey.generate(), None).public_bytes(Encoding.DER)


def _own(signer: "Signer") -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    leaf = signer.issue(_builder(LEAF, ANCHOR, ca=False).public_key(key.public_key()))
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret + leaf.public_bytes(Encoding.PEM)


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """The path of a file with the data: ssl loads keys only from files. On Linux it never reaches a disk."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:  # only its owner can read it
            file.write(data)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)  # memory accepts all of it
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
