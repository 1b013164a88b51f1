"""A relay with few files to open, or full of strangers' pairs: the next pair of somebody else still meets."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from clocks import Clock

from isthmus.protocol.trust import Signer
from isthmus.runtime import relay as relays
from isthmus.runtime.greeting import GUEST, HOST, NONCE_BYTES, PAIRED, greet
from isthmus.runtime.relay import Relay

FILES = 128
KEY = Signer("edge", b"k" * 32)


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay("127.0.0.1", 0, clock=Clock(), files=FILES)
    yield relay
    relay.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def turns(relay: Relay, count: int = 3) -> None:
    for _ in range(count):
        relay.turn(0.0)


def comes(relay: Relay, stack: ExitStack, number: int, role: bytes, room: bytes) -> socket.socket:
    """From one of the addresses that loopback has."""
    link = stack.enter_context(
        socket.create_connection(("127.0.0.1", relay.port), 20, source_address=(f"127.0.1.{number}", 0))
    )
    turns(relay)
    link.sendall(greet(KEY, role, room, link.recv(NONCE_BYTES)))
    link.setblocking(False)
    turns(relay)
    return link


def is_paired(relay: Relay, *links: socket.socket) -> bool:
    for link in links:
        for _ in range(1000):
            relay.turn(0.01)
            with suppress(BlockingIOError):
                if link.recv(1) != PAIRED:
                    return False
                break
        else:
            return False
    return True


def test_a_relay_holds_no_more_connections_than_it_has_files(relay: Relay, stack: ExitStack):
    for number in range(1, 41):
        for _ in range(5):
            comes(relay, stack, number, HOST, os.urandom(32))
    turns(relay, 50)
    assert 10 < len(relay.connections) <= FILES
    host, guest = (comes(relay, stack, 200, role, b"r" * 32) for role in (HOST, GUEST))
    assert is_paired(relay, host, guest)


def test_strangers_who_hold_all_pairs_make_room_for_somebody_else(relay: Relay, stack: ExitStack):
    most = relay._scaled(relays.MOST_PAIRS)
    for i in range(most):
        room = os.urandom(32)
        assert is_paired(relay, *(comes(relay, stack, 1 + i % 16, role, room) for role in (HOST, GUEST)))
    assert relay.pairs.total() == most
    host, guest = (comes(relay, stack, 200, role, b"r" * 32) for role in (HOST, GUEST))
    assert is_paired(relay, host, guest)
    assert (relay.pairs.total(), relay.pairs["127.0.1.200"]) == (most, 1)
    host.sendall(b"x")
    turns(relay, 10)
    guest.setblocking(True)
    assert guest.recv(1) == b"x"


def test_who_has_no_fewer_pairs_than_the_others_gets_none_of_theirs(
    relay: Relay, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(relays, "MOST_PAIRS", 0)  # two, at least
    for number in (1, 2):
        links = [comes(relay, stack, number, role, bytes([number]) * 32) for role in (HOST, GUEST)]
        assert is_paired(relay, *links)
    comes(relay, stack, 3, HOST, b"r" * 32)
    comes(relay, stack, 3, GUEST, b"r" * 32)
    turns(relay, 10)
    assert relay.pairs == {"127.0.1.1": 1, "127.0.1.2": 1}


def test_the_command_asks_for_as_many_files_as_it_may_have():
    words = (
        "import resource; from isthmus.cli.relay import allowed_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); print(allowed_files(5000))"
    )
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["300"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 300
