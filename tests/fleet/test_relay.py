"""The relay: it pairs whoever names the same meeting under one key, and strangers cost it little.

It is driven turn by turn from the test; its clock is the test's.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from clocks import Clock

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.protocol.trust import Signer
from isthmus.runtime import relay as relays
from isthmus.runtime.addresses import Address, free_port
from isthmus.runtime.greeting import GUEST, HOST, MAGIC, NONCE_BYTES, PAIRED, greet
from isthmus.runtime.peer import StageStart
from isthmus.runtime.relay import Relay
from isthmus.runtime.relay_place import RelayListener, RelayPlace, label

LOOPBACK = "127.0.0.1"
ROOM, OTHER = b"r" * 32, b"o" * 32
KEY, STRANGER = Signer("edge", b"k" * 32), Signer("edge", b"s" * 32)
MEETING = bytes.fromhex(KEY.public_key) + ROOM  # as the relay knows it


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def relay(said) -> Iterator[Relay]:
    relay = Relay(LOOPBACK, 0, said.append, Clock())
    yield relay
    relay.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until(relay: Relay, happened: Callable[[], object]) -> None:
    for _ in range(3000):
        if happened():
            return
        relay.turn(0.01)
    raise AssertionError("it did not happen")


def comes(
    relay: Relay, stack: ExitStack, role: bytes = b"", room: bytes = ROOM, key: Signer = KEY
) -> socket.socket:
    """Somebody who has said who it is, or nothing."""
    return said_by(relay, stack, lambda nonce: greet(key, role, room, nonce) if role else b"")


def said_by(relay: Relay, stack: ExitStack, words: Callable[[bytes], bytes]) -> socket.socket:
    """Somebody who says these words, made from the relay's nonce."""
    link = stack.enter_context(socket.create_connection((LOOPBACK, relay.port), 20))
    link.setblocking(False)
    link.sendall(words(heard(relay, link, NONCE_BYTES)))
    return link


def heard(relay: Relay, link: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()

    def more() -> bool:
        with suppress(BlockingIOError):
            data.extend(link.recv(num_bytes - len(data)))
        return len(data) == num_bytes

    until(relay, more)
    return bytes(data)


def closed(relay: Relay, link: socket.socket) -> bool:
    ended = []

    def looked() -> bool:
        try:
            ended.append(link.recv(1) == b"")
        except BlockingIOError:
            pass
        except ConnectionResetError:
            ended.append(True)
        return bool(ended)

    until(relay, looked)
    return ended[0]


def pair(relay: Relay, stack: ExitStack, room: bytes = ROOM) -> tuple[socket.socket, socket.socket]:
    host, guest = comes(relay, stack, HOST, room), comes(relay, stack, GUEST, room)
    for link in (host, guest):
        assert heard(relay, link, 1) == PAIRED
    return host, guest


@pytest.mark.parametrize("first", [HOST, GUEST])
def test_whoever_comes_first_the_two_are_paired_and_bytes_pass_as_they_are(relay, stack, first):
    one = comes(relay, stack, first)
    until(relay, lambda: relay.meetings)
    two = comes(relay, stack, GUEST if first == HOST else HOST)
    for link in (one, two):
        assert heard(relay, link, 1) == PAIRED
    for here, there in ((one, two), (two, one)):
        words = os.urandom(100_000)
        here.sendall(words)
        assert heard(relay, there, len(words)) == words
    assert relay.carried == 200_000


def test_what_was_said_arrives_before_the_end_and_the_pair_goes(relay, stack):
    host, guest = pair(relay, stack)
    guest.sendall(b"last")
    guest.close()
    assert heard(relay, host, 4) == b"last"
    assert closed(relay, host)
    until(relay, lambda: not relay.connections)
    assert not relay.pairs


def test_who_is_lost_takes_its_partner_along(relay, stack):
    host, guest = pair(relay, stack)
    host.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    host.close()  # by a reset
    assert closed(relay, guest)


def test_only_those_who_name_the_same_bytes_and_opposite_parts_are_paired(relay, stack):
    comes(relay, stack, HOST, ROOM)
    comes(relay, stack, HOST, ROOM)
    comes(relay, stack, GUEST, OTHER)
    until(relay, lambda: sum(map(len, relay.meetings.values())) == 3)
    assert not relay.pairs
    pair(relay, stack, b"x" * 32)


def test_the_same_bytes_under_another_key_are_another_meeting(relay, stack):
    comes(relay, stack, HOST, ROOM, STRANGER)
    until(relay, lambda: relay.meetings)
    guest = comes(relay, stack, GUEST)
    until(relay, lambda: len(relay.meetings) == 2)
    assert not relay.pairs
    for link in (guest, comes(relay, stack, HOST)):
        assert heard(relay, link, 1) == PAIRED


@pytest.mark.parametrize("part", [HOST, GUEST])
def test_a_greeting_that_was_overheard_blocks_nobody(relay, stack, part):
    overheard = []
    first = said_by(
        relay, stack, lambda nonce: overheard.append(greet(KEY, part, ROOM, nonce)) or overheard[0]
    )
    until(relay, lambda: relay.meetings)
    first.close()
    until(relay, lambda: not relay.meetings)
    for _ in range(3):
        assert closed(relay, said_by(relay, stack, lambda nonce: overheard[0]))
    pair(relay, stack)


def test_who_waits_is_paired_again_and_again(relay, stack):
    for number in range(5):
        host, guest = pair(relay, stack)
        guest.sendall(bytes([number]))
        assert heard(relay, host, 1) == bytes([number])
    assert sum(relay.pairs.values()) == 5


def test_a_guest_whose_gate_does_not_come_is_sent_away(relay, stack):
    guest = comes(relay, stack, GUEST)
    until(relay, lambda: relay.meetings)
    relay.clock.now += relays.GUEST_SECONDS + 1
    assert closed(relay, guest)
    until(relay, lambda: not relay.meetings and not relay.connections)


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
def test_junk_is_dropped_at_once_and_keeps_nothing(relay, stack, words):
    link = said_by(relay, stack, words)
    assert closed(relay, link)
    assert not relay.connections
    assert not relay.meetings


def test_silence_and_half_a_greeting_end_by_the_clock(relay, stack):
    links = [comes(relay, stack), comes(relay, stack)]
    links[1].sendall(MAGIC[:7])
    until(relay, lambda: len(relay.connections) == 2)
    relay.clock.now += 60
    assert all(closed(relay, link) for link in links)


def test_a_gate_that_hangs_up_while_it_waits_is_not_paired(relay, stack):
    gone = comes(relay, stack, HOST)
    until(relay, lambda: relay.meetings)
    gone.close()
    until(relay, lambda: not relay.meetings)
    pair(relay, stack)


def test_a_thousand_strangers_keep_nobody_out(relay, stack):
    waiting = comes(relay, stack, HOST)  # it was there before them
    until(relay, lambda: relay.meetings)
    for number in range(1000):
        words = (b"", MAGIC, b"junk")[number % 4 % 3]
        if number % 4 == 3:
            comes(relay, stack, HOST, os.urandom(32), STRANGER)
        else:
            said_by(relay, stack, lambda nonce, words=words: words)
        relay.turn(0)
    assert len(relay.connections) <= 2 * relays.MOST_WAITING_OF_ONE
    again = comes(relay, stack, HOST)  # where it had to make room, a gate comes again
    until(relay, lambda: again.fileno() and (MEETING, HOST) in relay.meetings)
    guest = comes(relay, stack, GUEST)
    assert heard(relay, guest, 1) == PAIRED
    assert waiting.fileno() > 0


def test_no_more_pairs_than_there_is_room_for(relay, stack, monkeypatch, said):
    monkeypatch.setattr(relays, "MOST_PAIRS_OF_ONE", 2)
    first = [pair(relay, stack) for _ in range(2)]
    comes(relay, stack, HOST)
    until(relay, lambda: relay.meetings)
    guest = comes(relay, stack, GUEST)
    assert closed(relay, guest)
    assert (MEETING, HOST) in relay.meetings  # the gate waits on
    assert len(said) == 1
    for link in first[0]:
        link.close()
    until(relay, lambda: sum(relay.pairs.values()) == 1)
    assert heard(relay, comes(relay, stack, GUEST), 1) == PAIRED


def test_who_takes_nothing_makes_the_sender_wait_and_not_the_relay_grow(relay, stack):
    host, guest = pair(relay, stack)
    sent = 0
    for _ in range(2000):
        with suppress(BlockingIOError):
            sent += host.send(bytes(2**16))
        relay.turn(0)
    assert all(len(each.waiting) <= relays.BUFFER_BYTES for each in relay.connections)
    assert sent < 2000 * 2**16
    assert heard(relay, guest, sent) == bytes(sent)


def test_a_pair_that_is_silent_for_long_is_dropped(relay, stack):
    host, guest = pair(relay, stack)
    relay.clock.now += relays.IDLE_SECONDS / 2
    guest.sendall(b"x")
    assert heard(relay, host, 1) == b"x"
    relay.clock.now += relays.IDLE_SECONDS / 2 + 1
    relay.turn(0)
    assert relay.pairs
    relay.clock.now += relays.IDLE_SECONDS
    assert closed(relay, host)
    assert closed(relay, guest)


def test_places_at_a_relay_differ_by_run_replica_stage_and_start():
    starts = [("run", "edge", 0, 7), ("run-2", "edge", 0, 7), ("run", "edge-2", 0, 7)]
    starts += [("run", "edge", 1, 7), ("run", "edge", 0, 8)]
    hosts = [StageStart(*start) for start in starts]
    assert len(set(map(label, hosts))) == 5
    assert label(hosts[0]) == label(StageStart("run", "edge", 0, 7))


def test_a_port_that_is_taken_and_one_that_is_none_are_one_line(capsys):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on {LOOPBACK}:{port}: address already in use"):
            Relay(LOOPBACK, port)
        assert main(["relay", "--host", LOOPBACK, "--port", str(port)]) == 2
    assert main(["relay", "--port", "70000"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["isthmus", "isthmus"]


def test_who_waits_says_that_there_is_no_relay_and_when_there_is_one_again(said):
    port = free_port()
    place = RelayPlace(Address(LOOPBACK, port), KEY, StageStart("f" * 32, "edge", 0, 7))
    listener = RelayListener(place, pause=lambda seconds: None)
    with pytest.raises(TimeoutError):
        listener.accept()
    why = f"no relay at {LOOPBACK}:{port} (Connection refused); start `isthmus relay` there"
    assert listener.trouble == why
    with pytest.raises(ConnectionRefusedError, match="no relay at"):
        place.dial(1.0)
    relay = Relay(LOOPBACK, port, said.append, Clock())
    serving = threading.Thread(target=relay.serve)
    serving.start()
    with pytest.raises(TimeoutError):  # nobody comes, and somebody could
        listener.accept()
    assert listener.trouble == ""
    listener.close()
    relay.stopped = True
    serving.join()
