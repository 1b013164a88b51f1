"""The relay: it pairs whoever names the same meeting under one key, and strangers cost it little.

It serves in a thread; its clock is the test's.
"""

import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from clocks import Clock

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.protocol.trust import Signer
from isthmus.runtime import relay as relays
from isthmus.runtime import relay_place
from isthmus.runtime.addresses import Address, free_port
from isthmus.runtime.relay import Relay
from isthmus.runtime.relay_place import (
    GUEST,
    HOST,
    MAGIC,
    NONCE_BYTES,
    PAIRED,
    RelayListener,
    RelayPlace,
    greet,
)

LOOPBACK = "127.0.0.1"
ROOM, OTHER = b"r" * 32, b"o" * 32
KEY, STRANGER = Signer("edge", b"k" * 32), Signer("edge", b"s" * 32)
MEETING = bytes.fromhex(KEY.public_key) + ROOM  # as the relay knows it
FILES = 128


class Served:
    """A relay that serves, and those who come to it."""

    def __init__(self, files: int = relays.MOST_FILES, port: int = 0) -> None:
        self.said: list[str] = []
        self.clock = Clock()
        self.relay = Relay(LOOPBACK, port, self.said.append, self.clock, files)
        self.thread = threading.Thread(target=self.relay.serve)
        self.thread.start()
        self.stack = ExitStack()

    def close(self) -> None:
        self.relay.stopped = True
        self.stack.close()
        self.thread.join()

    def says(self, words: Callable[[bytes], bytes], address: str = LOOPBACK) -> socket.socket:
        """Somebody who says these words, made from the relay's nonce."""
        link = self.stack.enter_context(
            socket.create_connection((LOOPBACK, self.relay.port), 20, source_address=(address, 0))
        )
        link.sendall(words(heard(link, NONCE_BYTES)))
        return link

    def comes(
        self, role: bytes, room: bytes = ROOM, key: Signer = KEY, address: str = LOOPBACK
    ) -> socket.socket:
        return self.says(lambda nonce: greet(key, role, room, nonce), address)

    def pair(self, room: bytes = ROOM, address: str = LOOPBACK) -> tuple[socket.socket, socket.socket]:
        host, guest = (self.comes(role, room, address=address) for role in (HOST, GUEST))
        assert heard(host, 1) == heard(guest, 1) == PAIRED
        return host, guest

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.relay.waiting.values()))

    @property
    def num_pairs(self) -> int:
        return self.relay.pairs.by_party().total()


@pytest.fixture(autouse=True)
def swept_often(monkeypatch):
    monkeypatch.setattr(relays, "SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(relay_place, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def relay() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def small() -> Iterator[Served]:
    served = Served(FILES)
    yield served
    served.close()


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def heard(link: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = link.recv(num_bytes - len(data))
        assert part, "hung up"
        data += part
    return data


def closed(link: socket.socket) -> bool:
    """True once the relay has hung up; waits for it."""
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("first", [HOST, GUEST])
def test_whoever_comes_first_the_two_are_paired_and_bytes_pass_as_they_are(relay, first):
    one = relay.comes(first)
    until(lambda: relay.num_waiting)
    two = relay.comes(GUEST if first == HOST else HOST)
    assert heard(one, 1) == heard(two, 1) == PAIRED
    for here, there in ((one, two), (two, one)):
        words = os.urandom(100_000)
        here.sendall(words)
        assert heard(there, len(words)) == words
    assert relay.relay.carried == 200_000


def test_what_was_said_arrives_before_the_end_and_the_pair_goes(relay):
    host, guest = relay.pair()
    guest.sendall(b"last")
    guest.close()
    assert heard(host, 4) == b"last"
    assert closed(host)
    until(lambda: not relay.num_pairs)


def test_who_is_lost_takes_its_partner_along(relay):
    host, guest = relay.pair()
    host.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    host.close()  # by a reset
    assert closed(guest)


def test_the_same_bytes_under_another_key_are_another_meeting(relay):
    for role, room, key in (
        (HOST, ROOM, STRANGER),
        (GUEST, ROOM, KEY),
        (HOST, OTHER, KEY),
        (GUEST, b"x" * 32, KEY),
    ):
        relay.comes(role, room, key)
    until(lambda: relay.num_waiting == 4)
    assert not relay.num_pairs
    assert heard(relay.comes(HOST), 1) == PAIRED  # of the second
    until(lambda: relay.num_waiting == 3)


@pytest.mark.parametrize("part", [HOST, GUEST])
def test_a_greeting_that_was_overheard_blocks_nobody(relay, part):
    overheard = []
    first = relay.says(lambda nonce: overheard.append(greet(KEY, part, ROOM, nonce)) or overheard[0])
    until(lambda: relay.num_waiting)
    first.close()
    until(lambda: not relay.num_waiting)  # nobody is paired with an end that hung up while it waited
    for _ in range(3):
        assert closed(relay.says(lambda nonce: overheard[0]))
    relay.pair()


def test_a_stage_that_waits_is_paired_again_and_again(relay):
    for number in range(5):
        host, guest = relay.pair()
        guest.sendall(bytes([number]))
        assert heard(host, 1) == bytes([number])
    assert relay.num_pairs == 5


def test_a_guest_whose_host_does_not_come_is_sent_away(relay):
    guest = relay.comes(GUEST)
    until(lambda: relay.num_waiting)
    relay.clock.now += relays.GUEST_SECONDS + 1
    assert closed(guest)
    until(lambda: not relay.num_waiting)


@pytest.mark.parametrize(
    "words",
    [
        lambda nonce: b"GET / HTTP/1.1\r\n\r\n",
        lambda nonce: bytes(145),
        lambda nonce: greet(KEY, b"X", ROOM, nonce),
        lambda nonce: greet(KEY, HOST, ROOM, nonce) + b"!",
        lambda nonce: greet(KEY, HOST, ROOM, nonce)[:-64] + STRANGER.sign("relay greeting", "", nonce),
        lambda nonce: greet(KEY, HOST, ROOM, nonce).replace(ROOM, OTHER),
    ],
    ids=["http", "zeros", "no part", "more than a greeting", "signed by another key", "changed"],
)
def test_junk_is_dropped_at_once_and_keeps_nothing(relay, words):
    assert closed(relay.says(words))
    until(lambda: not relay.relay.unpaired.by_party())
    assert not relay.num_waiting


def test_silence_and_half_a_greeting_end_by_the_clock(relay):
    links = [relay.says(lambda nonce: b""), relay.says(lambda nonce: MAGIC[:7])]
    until(lambda: relay.relay.unpaired.by_party().total() == 2)
    relay.clock.now += 60
    assert all(closed(link) for link in links)


def test_a_thousand_strangers_keep_nobody_out(relay):
    relay.comes(HOST)  # it was there before them
    until(lambda: relay.num_waiting)
    for number in range(1000):
        if number % 4 == 3:
            relay.comes(HOST, os.urandom(32), STRANGER)
        else:
            relay.says(lambda nonce, number=number: (b"", MAGIC, b"junk")[number % 4])
    assert relay.relay.unpaired.by_party().total() <= relays.MOST_WAITING_OF_ONE
    relay.comes(HOST)  # where it had to make room, a host comes again
    until(lambda: (MEETING, HOST) in relay.relay.waiting)
    assert heard(relay.comes(GUEST), 1) == PAIRED


def test_no_more_pairs_than_there_is_room_for(relay):
    relay.relay.pairs.most_each = 2
    first = [relay.pair() for _ in range(2)]
    relay.comes(HOST)
    until(lambda: relay.num_waiting)
    assert closed(relay.comes(GUEST))
    assert (MEETING, HOST) in relay.relay.waiting  # the host waits on
    assert relay.said == ["no room for one more pair, of 127.0.0.1"]
    for link in first[0]:
        link.close()
    until(lambda: relay.num_pairs == 1)
    assert heard(relay.comes(GUEST), 1) == PAIRED


def test_who_takes_nothing_makes_the_sender_wait_and_not_the_relay_grow(relay):
    host, guest = relay.pair()
    host.settimeout(0.5)
    sent = 0
    with suppress(TimeoutError):
        for _ in range(2000):
            sent += host.send(bytes(2**16))
    assert sent < 1000 * 2**16
    assert heard(guest, sent) == bytes(sent)


def test_a_pair_that_is_silent_for_long_is_dropped(relay):
    host, guest = relay.pair()
    relay.clock.now += relays.IDLE_SECONDS / 2
    guest.sendall(b"x")
    assert heard(host, 1) == b"x"
    relay.clock.now += relays.IDLE_SECONDS / 2 + 1
    time.sleep(0.1)  # some sweeps
    assert relay.num_pairs
    relay.clock.now += relays.IDLE_SECONDS
    assert closed(host)
    assert closed(guest)


def test_a_relay_holds_no_more_connections_than_it_has_files(small):
    for number in range(40):
        for _ in range(5):
            small.comes(HOST, os.urandom(32), address=f"127.0.1.{1 + number}")
    until(lambda: 10 < small.relay.unpaired.by_party().total() <= FILES)
    small.pair(address="127.0.1.200")


def test_strangers_who_hold_all_pairs_make_room_for_somebody_else(small):
    most = small.relay.pairs.most
    for i in range(most):
        small.pair(os.urandom(32), f"127.0.1.{1 + i % 16}")
    assert small.num_pairs == most
    host, guest = small.pair(address="127.0.1.200")
    until(lambda: small.num_pairs == most)
    assert small.relay.pairs.by_party()["127.0.1.200"] == 1
    host.sendall(b"x")
    assert guest.recv(1) == b"x"


def test_who_has_no_fewer_pairs_than_the_others_gets_none_of_theirs(small):
    small.relay.pairs.most = 2
    for number in (1, 2):
        small.pair(bytes([number]) * 32, f"127.0.1.{number}")
    small.comes(HOST, address="127.0.1.3")
    until(lambda: small.num_waiting)
    assert closed(small.comes(GUEST, address="127.0.1.3"))
    assert small.relay.pairs.by_party() == {"127.0.1.1": 1, "127.0.1.2": 1}


def test_the_command_asks_for_as_many_files_as_it_may_have():
    words = (
        "import resource; from isthmus.cli.relay import allowed_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); print(allowed_files(5000))"
    )
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["300"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 300


def test_a_port_that_is_taken_and_one_that_is_none_are_one_line(capsys):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on {LOOPBACK}:{port}: address already in use"):
            Relay(LOOPBACK, port)
        assert main(["relay", "--host", LOOPBACK, "--port", str(port)]) == 2
    assert main(["relay", "--port", "70000"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["isthmus", "isthmus"]


def test_a_stage_that_waits_says_that_there_is_no_relay_until_there_is_one():
    port = free_port()
    at = Address(LOOPBACK, port)
    starts = [("run", "edge", 0, 7), ("run-2", "edge", 0, 7), ("run", "edge-2", 0, 7)]
    starts += [("run", "edge", 1, 7), ("run", "edge", 0, 8)]
    places = [RelayPlace(at, KEY, start) for start in starts]
    listener = RelayListener(places[0], 5.0)
    with pytest.raises(TimeoutError):
        listener.accept()
    why = f"no relay at {LOOPBACK}:{port} (Connection refused); start `isthmus relay` there"
    assert listener.trouble == why
    with pytest.raises(ConnectionRefusedError, match="no relay at"):
        places[0].dial(1.0)
    served = Served(port=port)
    with pytest.raises(TimeoutError):  # nobody comes, and somebody could
        listener.accept()
    assert listener.trouble == ""
    for place in places[1:]:  # another run, replica, stage, start
        with pytest.raises(TimeoutError):
            place.dial(0.1)
    places[0].dial(20).close()
    assert listener.accept()[1] == f"relay {at}"
    listener.close()
    served.close()
