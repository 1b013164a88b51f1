"""The stage port: strangers stay out, cost little and keep nobody out; whoever holds the key is joined.

Sockets are real. Time that must pass is the test's own clock; a test waits for what happens.
"""

import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
from clocks import Clock
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - it is public
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from isthmus.errors import Unreachable, passes
from isthmus.protocol.trust import Signer
from isthmus.runtime import gate as gates
from isthmus.runtime import rendezvous
from isthmus.runtime.addresses import Address
from isthmus.runtime.gate import LOOPBACK, Gate, NotYet, Way, enter, knock
from isthmus.runtime.handshake import (
    ANSWER_BYTES,
    HELLO,
    LAUNCHERS,
    LINK,
    WORKERS,
    Credentials,
    Guest,
    Purpose,
    Stranger,
)
from isthmus.runtime.rare_notes import LOG_SECONDS, RareNotes
from isthmus.runtime.rendezvous import PORTS, StageRendezvous, free_port
from isthmus.runtime.splice import shut

HOLDER = Credentials("run", Signer("edge", b"k" * 32))
STRANGER = Credentials("run", Signer("edge", b"x" * 32))
FIRST = Purpose(LAUNCHERS, 1)
WAIT_SECONDS = 30.0


class Echo:
    """Stands for a store: says everything back, and whose words they were."""

    def __init__(self, name: bytes = b"") -> None:
        self.name, self.server = name, socket.create_server((LOOPBACK, 0), backlog=512)
        self.port = self.server.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self.server.accept()
                self.accepted += 1
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            while data := link.recv(2**16):
                link.sendall(self.name + data)

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def echo(stack) -> Echo:
    store = Echo()
    stack.callback(store.close)
    return store


@pytest.fixture
def gate(stack, echo, said) -> Gate:
    gate = Gate(Address(LOOPBACK, 0), HOLDER, said.append, Clock())
    stack.callback(gate.close)
    gate.lead(LAUNCHERS, echo.port)
    return gate


def connect(port: int) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), WAIT_SECONDS)


def heard(link: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (part := link.recv(num_bytes - len(data))):
        data += part
    return data


def closed(link: socket.socket) -> bool:
    """Waits until the other side hangs up, without a word."""
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def works(gate: Gate, words: bytes = b"hello") -> bool:
    with enter(gate.place, HOLDER, FIRST, WAIT_SECONDS) as link:
        link.sendall(words)
        return heard(link, len(words)) == words


def test_whoever_holds_the_key_is_joined_and_bytes_pass_both_ways_as_they_are(gate):
    with enter(gate.place, HOLDER, FIRST, WAIT_SECONDS) as link:
        for size in (1, 2**14 + 1, *[2**16] * 16):  # in one thread: a TLS connection is not for two at a time
            noise = os.urandom(size)
            link.sendall(noise)
            assert heard(link, size) == noise
        shut(link, socket.SHUT_WR)
        assert closed(link)  # an end travels, there and back


def test_a_stranger_with_another_key_reaches_nothing(gate, echo, said):
    with pytest.raises(Stranger):
        enter(gate.place, STRANGER, FIRST, WAIT_SECONDS)
    with connect(gate.place.port) as link:  # one that does not care who the gate is
        guest = Guest(STRANGER, FIRST)
        link.sendall(guest.hello)
        answer = heard(link, ANSWER_BYTES)
        link.sendall(STRANGER.sign(b"guest", guest.hello + answer[:32]))
        assert closed(link)
    assert echo.accepted == 0
    assert said
    assert works(gate)


def recorded(gate: Gate) -> bytes:
    """What a holder of the key sends, as somebody on the way hears it, from the hello to its last word."""
    words: list[bytes] = []

    def carry(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                if keep:
                    words.append(data)
                sink.sendall(data)
        shut(sink, socket.SHUT_RDWR)

    with socket.create_server((LOOPBACK, 0)) as tap, ThreadPoolExecutor(3) as pool:
        entering = pool.submit(enter, Address(*tap.getsockname()), HOLDER, FIRST, WAIT_SECONDS)
        near, _ = tap.accept()
        with near, connect(gate.place.port) as far:
            for source, sink in ((near, far), (far, near)):
                pool.submit(carry, source, sink, source is near)
            with entering.result() as link:
                link.sendall(b"secret")
                assert heard(link, 6) == b"secret"  # the store has it, and has counted it
            pool.shutdown()
    return b"".join(words)


def test_a_recorded_handshake_does_not_open_the_gate_again(gate, echo):
    words = recorded(gate)
    assert b"secret" not in words
    with connect(gate.place.port) as link:
        link.sendall(words[: HELLO.size])
        heard(link, ANSWER_BYTES)
        link.sendall(words[HELLO.size :])
        assert closed(link)
    assert echo.accepted == 1


def test_what_the_gate_says_does_not_open_it(gate, echo):
    with connect(gate.place.port) as link:
        link.sendall(Guest(STRANGER, FIRST).hello)
        answer = heard(link, ANSWER_BYTES)
        link.sendall(answer[32:])
        assert closed(link)
    assert echo.accepted == 0


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9, os.urandom(2**20), bytes(2**20), b"isthmus-stages/2" * 4],
)
def test_junk_of_any_size_is_turned_away_and_the_next_one_served(gate, echo, words):
    with connect(gate.place.port) as link:
        with suppress(ConnectionError):
            link.sendall(words)
            link.sendall(words)
            heard(link, ANSWER_BYTES)
        with suppress(ConnectionError):
            assert closed(link)
    assert echo.accepted == 0
    assert works(gate)


def test_a_client_of_torchs_store_gets_no_answer(gate):
    with pytest.raises(RuntimeError):
        TCPStore(LOOPBACK, gate.place.port, None, False, timedelta(seconds=1), wait_for_workers=False)
    assert works(gate)


@pytest.mark.parametrize(
    "purpose", [Purpose(WORKERS, 1, 1), Purpose(LINK, 1), Purpose(200, 1), Purpose(LAUNCHERS, 1, 7)]
)
def test_a_purpose_or_generation_that_is_not_open_leads_nowhere(gate, echo, purpose):
    with pytest.raises(NotYet):
        enter(gate.place, HOLDER, purpose, WAIT_SECONDS)
    assert echo.accepted == 0


@pytest.mark.parametrize("part", [b"", b"isth", "hello"], ids=["silent", "slow", "half open"])
def test_a_guest_that_proves_nothing_in_time_is_cut_off(gate, part):
    """However it spreads its bytes; the clock is ours."""
    with connect(gate.place.port) as link:
        if part == "hello":
            link.sendall(Guest(HOLDER, FIRST).hello)
            heard(link, ANSWER_BYTES)
            link.sendall(b"\0")
        else:
            link.sendall(part)
        until(lambda: gate.crowd._visits)
        gate.crowd.clock.now += 60.0  # type: ignore[attr-defined]
        assert closed(link)
    assert works(gate)


def test_an_end_in_the_middle_is_turned_away(gate, said):
    with connect(gate.place.port) as link:
        link.sendall(b"isthmus")
        link.shutdown(socket.SHUT_WR)
        assert closed(link)
    assert "proved nothing" in said[0]


def test_two_hundred_connections_keep_nobody_out(gate, stack, echo):
    for number in range(200):
        link = stack.enter_context(connect(gate.place.port))
        with suppress(ConnectionError):
            link.sendall(b"isthmus-stages/2"[: number % 17])
    assert works(gate)
    assert len(gate.crowd._visits) <= 200
    assert echo.accepted == 1


def test_a_crowd_does_not_move_those_who_are_in(gate, stack):
    link = stack.enter_context(enter(gate.place, HOLDER, FIRST, WAIT_SECONDS))
    for _ in range(100):
        stack.enter_context(connect(gate.place.port))
    gate.crowd.clock.now += 3600.0
    link.sendall(b"still here")
    assert heard(link, 10) == b"still here"


def test_strangers_take_one_line_of_the_log_in_a_minute(said):
    clock = Clock()
    notes = RareNotes(said.append, clock)
    for _ in range(100):
        notes.say("turned away")
    clock.now += LOG_SECONDS
    notes.say("turned away")
    assert said == ["turned away", "turned away (and 99 more since the last such line)"]


def test_a_new_store_in_the_place_of_another_cuts_off_the_old_ones_guests(gate, stack):
    old = enter(gate.place, HOLDER, FIRST, WAIT_SECONDS)
    old.sendall(b"x")
    assert heard(old, 1) == b"x"
    new = Echo(b"new ")
    stack.callback(new.close)
    gate.lead(LAUNCHERS, new.port)
    with old:
        assert closed(old)
    with enter(gate.place, HOLDER, FIRST, WAIT_SECONDS) as link:
        link.sendall(b"x")
        assert heard(link, 5) == b"new x"


def test_the_last_words_of_a_store_arrive_although_the_gate_closes(stack):
    """At the end of a run stage 0's launcher ends first; the others still read its answer."""
    with socket.create_server((LOOPBACK, 0)) as store:
        gate = Gate(Address(LOOPBACK, 0), HOLDER)
        gate.lead(LAUNCHERS, store.getsockname()[1])
        link = stack.enter_context(enter(gate.place, HOLDER, FIRST, WAIT_SECONDS))
        serving, _ = store.accept()
        with ThreadPoolExecutor(1) as pool, serving:
            closing = pool.submit(gate.close)
            assert serving.recv(1) == b""  # the gate has told it that no more comes
            serving.sendall(b"done")
            serving.close()
            closing.result()
        assert heard(link, 4) == b"done"
        assert closed(link)


def test_a_way_waits_for_its_gate_and_leads_through_it(stack, echo):
    port = free_port(LOOPBACK)
    way = Way(Address(LOOPBACK, port), HOLDER, FIRST)
    stack.callback(way.close)
    client = stack.enter_context(connect(way.port))
    client.sendall(b"early")
    gate = Gate(Address(LOOPBACK, port), HOLDER)
    stack.callback(gate.close)
    gate.lead(LAUNCHERS, echo.port)
    assert heard(client, 5) == b"early"


def test_a_client_that_hangs_up_before_the_gate_is_there_is_not_led_through(stack, echo, monkeypatch):
    tries = []
    monkeypatch.setattr(gates, "enter", lambda *where: tries.append(where) or refuse())
    way = Way(Address(LOOPBACK, free_port(LOOPBACK)), HOLDER, FIRST)
    stack.callback(way.close)
    client = connect(way.port)
    until(lambda: len(tries) > 1)  # it is waited for
    client.close()
    until(lambda: not [thread for thread in threading.enumerate() if "_lead" in thread.name])


def refuse() -> socket.socket:
    raise ConnectionRefusedError


def test_a_way_does_not_lead_to_whoever_sits_at_the_gates_port(stack, said):
    """A false gate learns nothing: the client's words never leave the machine."""
    false = Gate(Address(LOOPBACK, 0), STRANGER)
    store = Echo()
    stack.callback(store.close)
    stack.callback(false.close)
    false.lead(LAUNCHERS, store.port)
    way = Way(false.place, HOLDER, FIRST, log=said.append)
    with connect(way.port) as client:
        client.sendall(b"secret")
        until(lambda: said)
        way.close()
        assert closed(client)
    assert store.accepted == 0
    assert "is not our stage 0: it does not hold this replica's key" in said[0]


def test_a_knock_says_who_is_not_there(gate):
    knock(gate.place, HOLDER, 1)
    with pytest.raises(
        Unreachable, match=r"is not stage 0 of replica edge in this run.*--master, --relay or --key"
    ) as error:
        knock(gate.place, STRANGER, 1)
    assert passes(error.value)
    with pytest.raises(ConnectionRefusedError):
        knock(Address(LOOPBACK, free_port(LOOPBACK)), HOLDER, 1)


# The rendezvous behind it


def meet(port: int, credentials: tuple[Credentials, ...] = (HOLDER, HOLDER)) -> list[StageRendezvous]:
    return [
        StageRendezvous("edge", i, 2, Address(LOOPBACK, port), each, 20.0)
        for i, each in enumerate(credentials)
    ]


def together(handlers: list[StageRendezvous], call: Callable[[StageRendezvous], object]) -> list:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(call, handlers))


def test_ten_rendezvous_in_one_process_meet_at_one_port():
    """Although somebody still holds every store that ever was."""
    port, held = free_port(LOOPBACK), []
    for _ in range(10):
        handlers = meet(port)
        for generation in (1, 2):
            held += together(handlers, StageRendezvous.next_rendezvous)
            assert [handler.generation for handler in handlers] == [generation] * 2
        held += [handler.store for handler in handlers]
        together(handlers, StageRendezvous.shutdown)
    with socket.create_server((LOOPBACK, port)):
        pass  # it is free


def test_workers_find_stage_0s_store_and_the_store_of_another_start_is_closed_to_them():
    handlers = meet(free_port(LOOPBACK))
    infos = together(handlers, StageRendezvous.next_rendezvous)
    here, way = (info.bootstrap_store_info.master_port for info in infos)
    assert [info.bootstrap_store_info.master_addr for info in infos] == [LOOPBACK] * 2
    seconds = timedelta(seconds=20)
    served = TCPStore(LOOPBACK, here, None, True, seconds, wait_for_workers=False)
    client = TCPStore(LOOPBACK, way, None, False, seconds, wait_for_workers=False)
    served.set("key", "value")
    assert client.get("key") == b"value"
    together(handlers, StageRendezvous.next_rendezvous)
    with pytest.raises(RuntimeError):
        client.get("key")
    together(handlers, StageRendezvous.shutdown)


@pytest.mark.parametrize("value", ["x", "", "-1", "1e3", "9" * 400, "\x00", "१"])
def test_a_generation_that_is_no_number_is_named_and_passes_and_the_next_meeting_is_clean(value):
    port = free_port(LOOPBACK)
    handlers = meet(port)
    together(handlers, StageRendezvous.next_rendezvous)
    assert handlers[1].store is not None
    handlers[1].store.set("generation", value)
    handlers[1].store.get("generation")  # a set is not answered: now the store has it

    def look(handler: StageRendezvous) -> Exception | int:
        try:
            return handler.num_nodes_waiting()
        except RendezvousConnectionError as error:
            return error

    for error in together(handlers, look):
        assert isinstance(error, RendezvousConnectionError)
        assert passes(error)
        assert "its store says that this is generation" in str(error)
        assert len(str(error)) < 300
    together(handlers, StageRendezvous.shutdown)
    handlers = meet(port)
    together(handlers, StageRendezvous.next_rendezvous)
    assert together(handlers, look) == [0, 0]
    together(handlers, StageRendezvous.shutdown)


def test_a_process_without_the_key_does_not_become_stage_1(monkeypatch):
    first, false = meet(free_port(LOOPBACK), (HOLDER, STRANGER))
    first.join_seconds = 3.0
    false.join_seconds = 1.0
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")

    def join(handler: StageRendezvous) -> Exception | None:
        try:
            handler.next_rendezvous()
        except RendezvousConnectionError as error:
            return error
        return None

    waited, refused = together([first, false], join)
    assert "stage 1 did not come" in str(waited)
    assert refused is not None
    together([first, false], StageRendezvous.shutdown)


def test_one_machine_alone_has_no_gate_and_listens_on_loopback():
    alone = StageRendezvous("rack", 0, 1)
    info = alone.next_rendezvous()
    assert alone.gate is None
    assert info.bootstrap_store_info.master_addr == LOOPBACK
    assert listening_elsewhere() == set()
    alone.shutdown()


def listening_elsewhere() -> set[str]:
    """This process's listeners on other addresses than 127.0.0.1."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            rows = [line.split() for line in file][1:]
        found |= {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
    loopback = struct.pack("<I", 0x7F000001).hex().upper()
    return found - {loopback}


def test_a_port_for_later_is_free_its_own_and_none_of_the_systems(monkeypatch):
    """Between the pick and the start of who listens there, an outgoing connection must not take it."""
    found = [free_port(LOOPBACK) for _ in range(20)]
    assert len(set(found)) == 20
    assert set(found) <= set(PORTS)
    ours = os.getpid()
    monkeypatch.setattr(rendezvous, "_picked", itertools.count())
    first = free_port(LOOPBACK)
    with socket.create_server((LOOPBACK, first)):
        monkeypatch.setattr(rendezvous, "_picked", itertools.count())
        assert free_port(LOOPBACK) != first
    for pid in range(ours + 1, ours + 5000, 97):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        monkeypatch.setattr(rendezvous, "_picked", itertools.count())
        assert free_port(LOOPBACK) != first, "processes begin at different ports"
