"""Who holds the replica's key gets in, and nothing that a stranger has, hears or sends back does."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from isthmus.protocol.trust import Signer
from isthmus.runtime.handshake import (
    ANSWER_BYTES,
    HELLO,
    LAUNCHERS,
    LINK,
    NONCE_BYTES,
    SIGNATURE_BYTES,
    WORKERS,
    Credentials,
    Guest,
    Host,
    Purpose,
    Stranger,
)

RUN = "0" * 32


def holder(replica="edge", run_id=RUN, secret=b"k" * 32):
    return Credentials(run_id, Signer(replica, secret))


def numbered():
    """Nonces that differ, without chance."""
    numbers = count()
    return lambda: hashlib.sha256(str(next(numbers)).encode()).digest()


def meet(guest, host_credentials):
    host = Host(host_credentials, guest.hello)
    return host.check(guest.prove(host.answer()))


def test_two_holders_of_the_key_let_each_other_in_and_the_purpose_is_what_was_signed():
    purpose = Purpose(WORKERS, stage=3, generation=2**40)
    assert meet(Guest(holder(), purpose), holder()) == purpose


def test_messages_have_one_size():
    guest = Guest(holder(), Purpose(LAUNCHERS, 1))
    host = Host(holder(), guest.hello)
    assert len(guest.hello) == HELLO.size
    assert len(host.answer()) == ANSWER_BYTES
    assert len(guest.prove(host.answer())) == SIGNATURE_BYTES


@pytest.mark.parametrize(
    "other",
    [holder(secret=b"x" * 32), holder(replica="edge-2"), holder(run_id="1" * 32)],
    ids=["key", "replica", "run"],
)
def test_whoever_has_another_key_replica_or_run_is_a_stranger_to_both_sides(other):
    purpose = Purpose(LAUNCHERS, 1)
    with pytest.raises(Stranger, match="does not hold this replica's key"):
        meet(Guest(other, purpose), holder())
    guest = Guest(other, purpose)  # one that does not ask who the host is
    host = Host(holder(), guest.hello)
    said = guest.hello + host.answer()[:NONCE_BYTES]
    with pytest.raises(Stranger, match="does not hold this replica's key"):
        host.check(other.sign(b"guest", said))


def test_a_recorded_handshake_is_worth_nothing_on_another_connection():
    guest = Guest(holder(), Purpose(LAUNCHERS, 1))
    first = Host(holder(), guest.hello)
    answer = first.answer()
    proof = guest.prove(answer)
    assert first.check(proof)
    with pytest.raises(Stranger):
        Host(holder(), guest.hello).check(proof)  # to the gate: its nonce is another
    with pytest.raises(Stranger):
        Guest(holder(), Purpose(LAUNCHERS, 1)).prove(answer)  # to a guest: so is its own


def test_what_the_gate_signs_is_no_proof_of_a_guest():
    """A stranger sends back what it was given, also from a second connection with the same nonces."""
    guest = Guest(holder(), Purpose(LAUNCHERS, 1))
    host = Host(holder(), guest.hello)
    reflected = host.answer()[NONCE_BYTES:]
    with pytest.raises(Stranger):
        host.check(reflected)
    fixed = Host(holder(), guest.hello, nonce=lambda: host.nonce)
    with pytest.raises(Stranger):
        host.check(fixed.answer()[NONCE_BYTES:])


def test_a_proof_for_one_purpose_is_none_for_another():
    """The same nonces on both: only the purpose differs."""
    proofs = []
    for purpose in (Purpose(LAUNCHERS, 1), Purpose(WORKERS, 1), Purpose(LINK, 1), Purpose(LAUNCHERS, 2)):
        nonce = numbered()
        guest = Guest(holder(), purpose, nonce)
        host = Host(holder(), guest.hello, nonce)
        proofs.append((host, guest.prove(host.answer())))
    for i, (host, _) in enumerate(proofs):
        for j, (_, proof) in enumerate(proofs):
            if i == j:
                assert host.check(proof)
            else:
                with pytest.raises(Stranger):
                    host.check(proof)


@pytest.mark.parametrize("change", range(HELLO.size))
def test_no_byte_of_a_hello_can_be_changed_on_its_way(change):
    guest = Guest(holder(), Purpose(LAUNCHERS, 1))
    changed = bytearray(guest.hello)
    changed[change] ^= 1
    with pytest.raises(Stranger):
        guest.prove(Host(holder(), bytes(changed)).answer())


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n" * 8, bytes(HELLO.size), b"isthmus-stages/2"])
def test_another_protocol_is_not_answered(hello):
    with pytest.raises(Stranger, match="does not talk this protocol"):
        Host(holder(), hello)


def test_nonces_are_fresh():
    with ThreadPoolExecutor(4) as pool:
        guests = list(pool.map(lambda _: Guest(holder(), Purpose(LAUNCHERS, 1)), range(64)))
    assert len({guest.hello for guest in guests}) == 64
    hosts = [Host(holder(), guests[0].hello) for _ in range(64)]
    assert len({host.nonce for host in hosts}) == 64
