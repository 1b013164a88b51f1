"""Stages find each other at one port by the replica's key, and a connection is between two certain starts."""

import os
import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from link_pairs import (
    EARLY,
    HOST,
    LATE,
    SIGNER,
    at_port,
    close,
    in_folder,
    link_pair,
    start_of,
    tls_endpoint,
    unix_endpoint,
)

from isthmus.errors import ConfigError, RunError
from isthmus.protocol.trust import Signer
from isthmus.runtime.addresses import UnixPlace
from isthmus.runtime.certificates import contexts
from isthmus.runtime.peer import HELLO, MAGIC, Endpoint, Hello

OTHER = Signer("edge-0", b"\7" * 32)


class Lines(list):
    """The log, and a way to wait for a line."""

    def __init__(self):
        super().__init__()
        self.came = threading.Condition()

    def __call__(self, text):
        with self.came:
            self.append(text)
            self.came.notify_all()

    def wait_for(self, words):
        with self.came:
            assert self.came.wait_for(lambda: any(words in line for line in self), 20), self


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture
def endpoints():
    made = []
    yield lambda *args, **named: made.append(tls_endpoint(*args, **named)) or made[-1]
    for endpoint in made:
        endpoint.close()


def refused(find, endpoint, seconds=1.0, stage=0):
    """Why a later stage gets no connection to the stage before it."""
    with pytest.raises(RunError) as error:
        endpoint.meet(stage, LATE, find, seconds).open(True)
    return str(error.value)


def test_an_end_with_another_key_fails_in_the_handshake_on_both_sides(endpoints, lines):
    early, late = endpoints(0, log=lines), endpoints(1, signer=OTHER)
    early.meet(1, EARLY, None)
    assert "whoever answers there does not hold this replica's key" in refused(at_port(early.port), late)
    lines.wait_for("does not hold the key of replica edge-0")
    assert early.neighbours[1].came == {}


def test_a_client_without_a_certificate_fails_in_the_handshake(endpoints, lines):
    early = endpoints(0, log=lines)
    early.meet(1, EARLY, None)
    naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    naked.check_hostname, naked.verify_mode = False, ssl.CERT_NONE
    link = socket.create_connection((HOST, early.port), 20)
    with naked.wrap_socket(link) as secured, pytest.raises(ssl.SSLError, match="certificate required"):
        secured.recv(1)
    lines.wait_for("peer did not return a certificate")


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + os.urandom(600)])
def test_whoever_talks_no_tls_is_turned_away_with_a_line(endpoints, lines, junk):
    early = endpoints(0, log=lines)
    early.meet(1, EARLY, None)
    with socket.create_connection((HOST, early.port), 20) as link:
        link.sendall(junk)
        lines.wait_for("turned away 127.0.0.1 at the port of stage 0")


def test_an_older_tls_is_refused(endpoints, lines):
    early = endpoints(0, log=lines)
    context = contexts(SIGNER)[1]
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((HOST, early.port), 20) as link, pytest.raises(ssl.SSLError):
        context.wrap_socket(link)
    lines.wait_for("unsupported protocol")


@pytest.mark.parametrize(
    ("me", "to"),
    [
        ({"stage": 1, "run_id": "cd" * 16}, 0),
        ({"stage": 1, "replica": "edge-1"}, 0),
        ({"stage": 1}, 2),
    ],
    ids=["another run", "another replica", "another stage"],
)
def test_the_same_key_opens_nothing_for_another_run_replica_or_stage(endpoints, lines, me, to):
    early = endpoints(0, log=lines)
    early.meet(1, EARLY, None)
    late = Endpoint(start_of(**me), socket.create_server((HOST, 0)), contexts(SIGNER))
    assert "stage 1 lost its link to stage 0 at 10.0.0.7" in refused(at_port(early.port), late, 0.5, stage=to)
    lines.wait_for("it came for another run, replica or stage")
    assert early.neighbours[1].came == {}
    late.close()


def test_a_stage_of_another_version_is_refused_and_both_logs_say_why(endpoints, lines):
    early, late = endpoints(0, log=lines), endpoints(1)
    early.meet(1, EARLY, None)
    with late.contexts[1].wrap_socket(socket.create_connection((HOST, early.port), 20)) as link:
        link.sendall(HELLO.pack(b"isthmus-link/1.1", late.of, 1, 1, 0, 3, 0))
        answer = b""
        while len(answer) < HELLO.size:
            answer += link.recv(HELLO.size)
    lines.wait_for("it talks b'isthmus-link/1.1' and this stage b'isthmus-link/1.2'; run one version")
    with pytest.raises(ConnectionRefusedError, match="run one version of Isthmus"):
        Hello.unpack(answer.replace(MAGIC, b"isthmus-link/1.3"))
    assert answer.startswith(MAGIC)
    assert early.neighbours[1].came == {}


def test_a_dialer_learns_the_start_it_did_not_know_and_one_it_had_wrong(endpoints):
    for believed in (0, 6):
        early, late = endpoints(0, start=7), endpoints(1, start=3)
        ends = link_pair(early, late, at_port(early.port, believed))
        assert late.neighbours[0].start == 7
        assert early.neighbours[1].start == 3
        close(*ends)


def test_a_stale_start_is_answered_with_the_right_one_and_closed(endpoints):
    early = endpoints(0, start=7)
    early.meet(1, EARLY, None)
    link = socket.create_connection((HOST, early.port), 20)
    with contexts(SIGNER)[1].wrap_socket(link) as secured:
        secured.sendall(HELLO.pack(MAGIC, early.of, 0, 1, 0, 3, 6))
        assert HELLO.unpack(secured.recv(HELLO.size)) == (MAGIC, early.of, 0, 0, 1, 7, 3)
        assert secured.recv(1) == b""
    assert early.neighbours[1].came == {}


def test_a_start_that_was_replaced_elsewhere_ends_with_a_line_instead_of_retrying(endpoints):
    early, newer, older = endpoints(0), endpoints(1, start=9), endpoints(1, start=8)
    ends = link_pair(early, newer)
    assert refused(at_port(early.port), older, 60.0) == (
        "replica edge-0: stage 1 was started again elsewhere, and stage 0 at 10.0.0.7 is linked to that "
        "start; stop one of the two"
    )
    ends[0].send_message(b"the link lives on")
    assert ends[1].receive_message() == b"the link lives on"
    close(*ends)


def test_a_newer_start_takes_the_place_of_connections_that_nobody_has_used_yet(endpoints):
    early, older, newer = endpoints(0), endpoints(1, start=8), endpoints(1, start=9)
    waiting = early.meet(1, EARLY, None, 20)
    half = older.meet(0, LATE, at_port(early.port), 20).open(True)
    links = [newer.meet(0, LATE, at_port(early.port), 20)]
    links = [links[0].open(outward) for outward in (True, False)]
    ours = [waiting.open(outward) for outward in (True, False)]
    assert half.recv(1) == b""
    ours[0].sendall(b"x")
    assert links[1].recv(1) == b"x"
    for link in (*links, *ours, half):
        link.close()


def test_a_newer_start_waits_until_the_link_to_the_one_before_has_ended(endpoints, lines):
    early, older, newer = endpoints(0, log=lines), endpoints(1, start=8), endpoints(1, start=9)
    ends = link_pair(early, older)
    assert "lost its link" in refused(at_port(early.port), newer, 0.5)
    assert early.neighbours[1].start == 8
    assert lines == []  # it is no stranger
    close(*ends)


def test_a_neighbour_that_comes_back_on_another_port_is_found_because_each_dial_asks_anew(endpoints):
    places = [(1, 0)]  # a port where nobody listens
    late = endpoints(1)
    asked = threading.Event()

    def find():
        asked.set()
        return at_port(*places[-1])()

    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(late.meet(0, LATE, find, 20).open, True)
        assert asked.wait(20)
        early = endpoints(0, start=5)
        early.meet(1, EARLY, None)
        places.append((early.port, 5))
        opening.result().close()


def test_a_stage_looks_for_its_neighbour_now_and_then_and_says_why_it_is_missing(endpoints):
    places = [1]  # a port where nobody listens
    late = endpoints(1).meet(0, LATE, lambda: at_port(places[-1])(), 20)
    early = endpoints(0)
    waiting = early.meet(1, EARLY, None, 20)
    assert not late.reach(0.1)
    assert late.trouble == "Connection refused"
    assert not waiting.reach(0.1)
    assert waiting.trouble == "no answer; start `isthmus join` there"
    places.append(early.port)
    assert late.reach(20)
    assert waiting.reach(20)
    for one, other in ((True, False), (False, True)):  # the link then uses these very connections
        ours, theirs = late.open(one), waiting.open(other)
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        ours.close()
        theirs.close()


def test_a_neighbour_that_never_comes_is_named(endpoints):
    with pytest.raises(RunError) as error:
        endpoints(0).meet(1, EARLY, None, 0.2).open(True)
    assert str(error.value) == (
        "replica edge-0: stage 0 lost its link to stage 1 at 10.0.0.8: it did not come within 0.2 s"
    )


def test_unix_sockets_are_only_made_in_a_folder_that_others_cannot_enter(tmp_path):
    folder = tmp_path / "links"
    unix_endpoint(folder, 0).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="others can enter"):
        UnixPlace(folder, 0).listen()


def test_a_new_start_takes_over_the_unix_socket_of_one_that_was_killed_even_in_a_deep_folder(tmp_path):
    folder = tmp_path / ("deep" * 30)
    unix_endpoint(folder, 0, start=1)  # never closed
    early, late = unix_endpoint(folder, 0, start=2), unix_endpoint(folder, 1)
    close(*link_pair(early, late, in_folder(folder, 0)))
    assert late.neighbours[0].start == 2


@pytest.mark.parametrize("source", ["127.0.0.2", HOST], ids=["another address", "the neighbour's address"])
def test_a_flood_of_strangers_does_not_keep_the_neighbour_out(endpoints, source):
    """Connections that say nothing, noise, or the beginning of a handshake, opened again and again."""
    early, late = endpoints(0), endpoints(1)
    over = threading.Event()

    def flood(what):
        while not over.is_set():
            links = []
            for _ in range(10):
                with suppress(OSError):
                    links.append(socket.create_connection((HOST, early.port), 5, source_address=(source, 0)))
                    links[-1].sendall(what)
            over.wait(0.1)
            for link in links:
                link.close()

    with ThreadPoolExecutor(4) as pool:
        for what in (b"", b"\x16\x03\x01\x02\x00\x01", os.urandom(64), struct.pack(">Q", 2**60)):
            pool.submit(flood, what)
        try:
            ends = link_pair(early, late)
            assert early.crowd.by_party().total() <= 32
        finally:
            over.set()
    close(*ends)
