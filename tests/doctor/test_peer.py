"""The listener in a process of its own, peers that mean well, and peers that do not."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from isthmus.doctor import peer
from isthmus.doctor.peer import ASK, HEADER, LINK, MAGIC, WAIT, check_peer, parse_host, shown
from isthmus.doctor.stage_link import FIRST_BYTES, frame_sizes, measure
from isthmus.errors import ConfigError
from isthmus.runtime.rendezvous import free_port


def quiet(words):
    pass


def start(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.main", "doctor", "--listen", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = process.stderr.readline()
    found = re.search(r"port (\d+), until Ctrl-C", first)
    assert found, first + process.stderr.read()
    return process, int(found[1])


@pytest.fixture
def listener():
    port = free_port("127.0.0.1")
    process, found = start(f"127.0.0.1:{port}")
    assert found == port
    yield process, port
    process.kill()
    process.communicate()


def stop(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def said(port, *sent, host="127.0.0.1"):
    """The letters that the listener answers with."""
    letters = []
    with socket.create_connection((host, port), timeout=60) as link:
        for data in sent:
            link.sendall(data)
        with suppress(ConnectionResetError):  # it may hang up before it has read everything
            while data := link.recv(HEADER.size, socket.MSG_WAITALL):
                letters.append(HEADER.unpack(data)[1])
    return letters


def wait_for(process, words):
    while words not in (line := process.stderr.readline()):
        assert line, f"the listener ended and never said {words!r}"


def test_both_ways_and_the_latency_are_measured_and_ctrl_c_ends_it(listener):
    process, port = listener
    checks, rate = check_peer("127.0.0.1", port, 0.2, quiet)
    assert [check.ok for check in checks] == [True], checks
    assert min(rate.up_mbps, rate.down_mbps, rate.both_ways_mbps, rate.round_trip_ms) > 0
    assert abs(checks[0].facts["clock_ahead_seconds"]) < 60
    wait_for(process, "done with 127.0.0.1")
    code, out, err = stop(process)
    assert (code, out) == (0, "Stopped listening; 1 served.\n")
    assert "Traceback" not in err


class Cable:
    """A link with its own clock: `move` takes as long as the bytes need, the slower way of the two."""

    def __init__(self, up_mbps, down_mbps, latency_seconds, shared=False):
        self.rates, self.latency, self.shared, self.now = (up_mbps, down_mbps), latency_seconds, shared, 0.0

    def move(self, up, down):
        seconds = [n * 8e-6 / rate for n, rate in zip((up, down), self.rates, strict=True)]
        self.now += 2 * self.latency + (sum(seconds) if self.shared else max(seconds))


@pytest.mark.parametrize("mbps", [0.2, 16, 1000])
@pytest.mark.parametrize("latency", [0.0, 0.02])
def test_rates_and_latency_are_those_of_the_link(mbps, latency):
    cable = Cable(mbps, 2 * mbps, latency)
    rate = measure(cable.move, 1.0, clock=lambda: cable.now)
    assert rate.up_mbps == pytest.approx(mbps)
    assert rate.down_mbps == pytest.approx(2 * mbps)
    assert rate.both_ways_mbps == pytest.approx(mbps)  # the slower way ends last
    assert rate.latency_ms == pytest.approx(1000 * latency)
    assert rate.mbps == rate.up_mbps


def test_a_link_that_shares_its_rate_between_both_ways_promises_half():
    cable = Cable(16, 16, 0.0, shared=True)
    rate = measure(cable.move, 1.0, clock=lambda: cable.now)
    assert (rate.up_mbps, rate.down_mbps) == (pytest.approx(16), pytest.approx(16))
    assert rate.mbps == rate.both_ways_mbps == pytest.approx(8)


def test_no_frame_is_a_large_part_of_a_large_transfer():
    for num_bytes in (0, 1, FIRST_BYTES, 3 * FIRST_BYTES + 1, 10**7, 10**9):
        sizes = frame_sizes(num_bytes)
        assert sum(sizes) == num_bytes
        assert all(0 < size <= max(FIRST_BYTES, num_bytes / 16) for size in sizes)


ASKING = HEADER.pack(MAGIC, ASK, 100)
JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01" + os.urandom(200),
    b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR." * 4,
    HEADER.pack(MAGIC, b"X", 100),
    HEADER.pack(MAGIC, ASK, 0),
    HEADER.pack(MAGIC, ASK, 2**64 - 1),
    HEADER.pack(b"isthmus-doctor/1", ASK, 100),
]


def test_junk_is_hung_up_on_and_the_next_is_served(listener):
    process, port = listener
    for junk in JUNK:
        assert said(port, junk) == []
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(MAGIC[:5])  # half a header, and gone
    wait_for(process, "lost 127.0.0.1")
    # Junk in the middle of a conversation: it is hung up on without a port.
    assert said(port, ASKING, b"junk" * 10) == [WAIT]
    # One that asks and does not come to the link keeps the listener only until it hangs up.
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(ASKING)
        assert HEADER.unpack(link.recv(HEADER.size, socket.MSG_WAITALL))[1] == WAIT
    wait_for(process, "lost 127.0.0.1")
    checks, rate = check_peer("127.0.0.1", port, 0.1, quiet)
    assert rate, checks
    wait_for(process, "done with 127.0.0.1")
    code, out, err = stop(process)
    assert (code, out) == (0, f"Stopped listening; 1 served, {len(JUNK) + 1} refused, 2 lost.\n")
    assert "Traceback" not in err


def test_strangers_at_the_link_itself_end_that_measurement_and_no_more(listener):
    process, port = listener
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(ASKING)
        letters = [HEADER.unpack(link.recv(HEADER.size, socket.MSG_WAITALL))[1:3] for _ in range(2)]
        assert [letter for letter, _ in letters] == [WAIT, LINK]
        for junk in (b"", os.urandom(4096), bytes(4096), b"\xff" * 4096):
            with suppress(OSError), socket.create_connection(("127.0.0.1", letters[1][1])) as stranger:
                stranger.sendall(junk)
    wait_for(process, "lost 127.0.0.1")
    assert check_peer("127.0.0.1", port, 0.1, quiet)[1]


def test_a_second_machine_is_told_to_come_later_and_a_silent_one_keeps_nobody_waiting(listener):
    process, port = listener
    with socket.create_connection(("127.0.0.1", port)):  # says nothing
        with socket.create_connection(("127.0.0.1", port), timeout=60) as first:
            first.sendall(ASKING)
            assert HEADER.unpack(first.recv(HEADER.size, socket.MSG_WAITALL))[1] == WAIT
            checks, rate = check_peer("127.0.0.1", port, 0.1, quiet)
            assert rate is None
            assert "measuring with another machine" in checks[0].words
            assert "again" in checks[0].cure
        wait_for(process, "lost 127.0.0.1")
        assert said(port, ASKING, b"enough") == [WAIT]


@pytest.mark.parametrize(
    ("python", "words", "cure"),
    [
        (sys.executable, "answers, but the stage link to it fails", "TCP ports"),
        ("/bin/false", "ended without a word", "import torch"),
    ],
)
def test_a_link_that_cannot_be_made_is_one_line_and_says_what_to_do(python, words, cure, monkeypatch):
    monkeypatch.setattr(sys, "executable", python)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            link, _ = server.accept()
            link.recv(HEADER.size, socket.MSG_WAITALL)
            link.sendall(HEADER.pack(MAGIC, WAIT, 0) + HEADER.pack(MAGIC, LINK, 2**40))
            link.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        (check,), rate = check_peer("127.0.0.1", server.getsockname()[1], 0.1, quiet)
    assert rate is None
    assert words in check.words
    assert "\n" not in check.words
    assert cure in check.cure


@pytest.mark.parametrize(
    "greeting", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"i", b""]
)
def test_another_protocol_is_one_line(greeting):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            link, _ = server.accept()
            link.sendall(greeting)
            link.recv(100)
            link.close()

        threading.Thread(target=answer, daemon=True).start()
        (check,), rate = check_peer("127.0.0.1", server.getsockname()[1], 0.1, quiet)
    assert rate is None
    assert not check.ok
    assert "\n" not in check.words + check.cure
    assert "protocol" in check.words
    assert "isthmus doctor --listen" in check.cure


def test_what_cannot_be_reached_is_one_line(monkeypatch):
    (check,), _ = check_peer("127.0.0.1", 1, 0.1, quiet)
    assert check.words == "cannot reach 127.0.0.1:1: connection refused"
    assert "firewall" in check.cure
    (check,), _ = check_peer("no-such-host.invalid", 29510, 0.1, quiet)
    assert "does not resolve" in check.words
    monkeypatch.setattr(peer, "SILENCE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (check,), _ = check_peer("127.0.0.1", server.getsockname()[1], 0.1, quiet)
    assert "went silent" in check.words


def test_hosts_are_read_and_shown_alike():
    assert parse_host("10.0.0.1") == ("10.0.0.1", peer.PORT)
    assert parse_host("gpu-box.example:81") == ("gpu-box.example", 81)
    assert parse_host("[fe80::1]:81") == ("fe80::1", 81)
    assert parse_host("::1") == ("::1", peer.PORT)
    assert shown("::1", 81) == "[::1]:81"
    for wrong in ("", "a b", "host:0", "host:65536", "host:x", "http:", "user@host", "[::1", ":80"):
        with pytest.raises(ConfigError, match="neither a bucket nor a machine"):
            parse_host(wrong)


def test_a_port_that_is_taken_is_bad_input(listener):
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: .*in use"):
        peer.Listener("127.0.0.1", listener[1], quiet)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:29510"):
        peer.Listener("192.0.2.1", 29510, quiet)


def test_without_an_address_it_listens_on_all_interfaces():
    listener = peer.Listener("", 0, quiet)
    threading.Thread(target=listener.serve, daemon=True).start()
    assert said(listener.port, ASKING, b"enough", host="127.0.0.2") == [WAIT]
    checks, rate = check_peer(
        "::1" if socket.has_dualstack_ipv6() else "127.0.0.1", listener.port, 0.1, quiet
    )
    assert rate, checks
    listener.server.close()
