"""TLS between the processes of a replica: who holds the key, for this very purpose, and nobody else."""

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from tls_pairs import HOLDER, secured

from isthmus.protocol.trust import Signer
from isthmus.runtime.handshake import BACK, FORTH, LAUNCHERS, Credentials, Purpose, Stranger
from isthmus.runtime.tls import as_gate, as_guest

FIRST = Purpose(FORTH, 1, 7)


def meet(gate_purpose, guest_purpose, gate=HOLDER, guest=HOLDER):
    """What became of the gate, and of the guest."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(20)

    def attempt(side, link, who, purpose):
        with link:
            try:
                return side(link, who, purpose, who.signer.public_key).version()
            except (Stranger, OSError) as error:
                return error

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(attempt, as_gate, near, gate, gate_purpose)
        second = pool.submit(attempt, as_guest, far, guest, guest_purpose)
        return first.result(), second.result()


def test_two_holders_of_the_key_meet_by_tls_1_3_and_by_a_cipher_that_authenticates():
    gate, guest = secured(FIRST)
    assert gate.version() == guest.version() == "TLSv1.3"
    gate.sendall(b"a")
    guest.sendall(b"b")
    assert (guest.recv(1), gate.recv(1)) == (b"a", b"b")
    assert gate.getpeercert(True) != guest.getpeercert(True)


@pytest.mark.parametrize("side", ["gate", "guest"])
@pytest.mark.parametrize(
    "other",
    [
        Credentials("run", Signer("edge-0", b"x" * 32)),
        Credentials("run", Signer("edge-1", b"x" * 32)),
        Credentials("run", Signer("edge-1", b"k" * 32)),
        Credentials("another", Signer("edge-0", b"k" * 32)),
    ],
    ids=["key", "another replica", "name", "run"],
)
def test_the_key_of_another_replica_or_run_is_a_strangers_on_either_side(side, other):
    found = meet(FIRST, FIRST, **{side: other})
    assert isinstance(found[side == "gate"], Stranger)  # the honest side
    assert not any(isinstance(each, str) for each in found)


@pytest.mark.parametrize(
    "other", [Purpose(FORTH, 2, 7), Purpose(BACK, 1, 7), Purpose(FORTH, 1, 8), Purpose(LAUNCHERS, 1, 7)]
)
def test_a_certificate_for_another_stage_direction_or_start_is_refused_though_the_key_is_right(other):
    for found in (meet(FIRST, other), meet(other, FIRST)):
        assert any("another stage, start or purpose" in str(each) for each in found)
        assert not any(isinstance(each, str) for each in found)


def test_neither_side_speaks_an_older_tls_or_takes_a_guest_without_a_certificate():
    for settings in ({"maximum_version": ssl.TLSVersion.TLSv1_2}, {}):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for name, value in settings.items():
            setattr(context, name, value)
        near, far = socket.socketpair()
        with ThreadPoolExecutor(1) as pool, near, far:
            near.settimeout(20)
            far.settimeout(20)
            taken = pool.submit(as_gate, near, HOLDER, FIRST, HOLDER.signer.public_key)
            with suppress(ssl.SSLError, ConnectionError):
                assert context.wrap_socket(far).recv(1) == b""
            with pytest.raises((Stranger, ConnectionError)):
                taken.result()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", bytes(600), b"\x16\x03\x01\x02\x00" + bytes(512)]
)
def test_junk_is_named(words):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(words)
        near.settimeout(20)
        with pytest.raises(Stranger, match="does not talk TLS"):
            as_gate(near, HOLDER, FIRST, HOLDER.signer.public_key)


def test_a_recorded_connection_is_worth_nothing_once_more():
    said = []
    (near, tap), (wire, far) = socket.socketpair(), socket.socketpair()

    def carry(source, sink, keep):
        try:
            while data := source.recv(2**16):
                if keep:
                    said.append(data)
                sink.sendall(data)
        except OSError:
            pass

    with ThreadPoolExecutor(4) as pool:
        pool.submit(carry, wire, tap, True)
        pool.submit(carry, tap, wire, False)
        gate = pool.submit(as_gate, near, HOLDER, FIRST, HOLDER.signer.public_key)
        guest = as_guest(far, HOLDER, FIRST, HOLDER.signer.public_key)
        guest.sendall(b"secret")
        assert gate.result().recv(6) == b"secret"
        for end in (guest, gate.result(), tap, wire):
            end.close()
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(20)
        far.sendall(b"".join(said))
        with pytest.raises((Stranger, ConnectionError)):
            as_gate(near, HOLDER, FIRST, HOLDER.signer.public_key)
