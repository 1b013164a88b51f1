"""The listener in a process of its own, peers that mean well, and peers that do not."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from isthmus.doctor import peer
from isthmus.doctor.peer import DOWN, HEADER, MAGIC, PING, UP, check_peer, parse_host, shown
from isthmus.errors import ConfigError


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process, found = start(f"127.0.0.1:{port}")
    assert found == port
    yield process, port
    process.kill()
    process.communicate()


def stop(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def test_both_ways_and_the_latency_are_measured_and_ctrl_c_ends_it(listener):
    process, port = listener
    checks, rate = check_peer("127.0.0.1", port, 0.3, quiet)
    assert [check.ok for check in checks] == [True]
    assert min(rate.up_mbps, rate.down_mbps) > 50
    assert 0 < rate.round_trip_ms < 500
    assert abs(checks[0].facts["clock_ahead_seconds"]) < 5
    while "done with 127.0.0.1" not in (line := process.stderr.readline()):
        assert line
    code, out, err = stop(process)
    assert (code, out) == (0, "Stopped listening; 1 served.\n")
    assert "Traceback" not in err


def relay(port, bytes_per_second, delay_seconds):
    """A thin link: what comes goes on at this rate, after a while. Its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def carry(source, target):
        with suppress(OSError):
            while data := source.recv(1 << 14):
                time.sleep(delay_seconds + len(data) / bytes_per_second)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve():
        with suppress(OSError):
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return server


def test_a_thin_link_is_found_to_be_thin(listener):
    with relay(listener[1], 2e6, 0.0) as thin:
        _, rate = check_peer("127.0.0.1", thin.getsockname()[1], 1.0, quiet)
    # 16 Mb/s; sleeping takes a little longer than asked for, and sockets hold a little.
    assert 8 < rate.up_mbps < 20
    assert 8 < rate.down_mbps < 20
    assert rate.mbps == min(rate.up_mbps, rate.down_mbps)


def test_latency_is_half_of_the_way_there_and_back(listener):
    with relay(listener[1], 1e9, 0.02) as far:
        _, rate = check_peer("127.0.0.1", far.getsockname()[1], 0.1, quiet)
    assert 18 < rate.latency_ms < 60


JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01" + os.urandom(200),
    b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR." * 4,
    MAGIC + b"X" + bytes(8),
    HEADER.pack(MAGIC, DOWN, peer.MOST_BYTES + 1),
    HEADER.pack(MAGIC, UP, 2**64 - 1),
    HEADER.pack(b"isthmus-doctor/2", PING, 0),
]


def test_junk_is_hung_up_on_and_the_next_is_served(listener):
    process, port = listener
    for junk in JUNK:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
            link.sendall(junk)
            with suppress(ConnectionResetError):  # bytes that it did not read
                assert link.recv(100) == b""
    # Half a header and gone; junk in the middle of a conversation; an upload that stops.
    for part in (MAGIC[:5], HEADER.pack(MAGIC, PING, 0) + b"junk" * 10, HEADER.pack(MAGIC, UP, 10**6) + b"x"):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
            link.sendall(part)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # until it has let go of the last one
        checks, rate = check_peer("127.0.0.1", port, 0.1, quiet)
        if rate:
            break
    assert rate, checks
    time.sleep(0.5)
    code, out, err = stop(process)
    assert code == 0
    refused = int(re.search(r"(\d+) refused", out)[1])
    assert refused == len(JUNK) + 1
    assert "2 lost" in out
    assert "Traceback" not in err


def test_a_second_machine_is_told_to_come_later_and_a_silent_one_keeps_nobody_waiting(listener):
    _, port = listener
    with socket.create_connection(("127.0.0.1", port)):  # says nothing
        with socket.create_connection(("127.0.0.1", port)) as first:
            first.sendall(HEADER.pack(MAGIC, PING, 0))
            assert HEADER.unpack(first.recv(100))[0] == MAGIC
            checks, rate = check_peer("127.0.0.1", port, 0.1, quiet)
            assert rate is None
            assert "measuring with another machine" in checks[0].words
            assert "again" in checks[0].cure
        time.sleep(0.3)
        assert check_peer("127.0.0.1", port, 0.1, quiet)[1]


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"i", b""])
def test_another_protocol_is_one_line(said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            link, _ = server.accept()
            link.sendall(said)
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
    hosts = ["127.0.0.1", "127.0.0.2", *(["::1"] if socket.has_dualstack_ipv6() else [])]
    for host in hosts:
        checks, rate = check_peer(host, listener.port, 0.1, quiet)
        assert rate, checks
    listener.server.close()
