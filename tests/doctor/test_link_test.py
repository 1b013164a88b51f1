"""The link test between two machines: a listener in a process of its own, strangers, and a relay between."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from isthmus.cli.doctor import parse_host
from isthmus.doctor import link_test
from isthmus.doctor.link_test import FIRST_BYTES, check_link, frame_sizes, measure
from isthmus.errors import ConfigError
from isthmus.runtime.addresses import LOOPBACK, Address, free_port
from isthmus.runtime.relay import Relay


def quiet(words):
    pass


@pytest.fixture
def listener():
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.main", "doctor", "--listen", f"127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = process.stderr.readline()
    assert re.search(rf"listening on 127.0.0.1, port {port}, until Ctrl-C", first), first
    yield process, port
    process.kill()
    process.communicate()


def test_rates_latency_clock_and_what_control_waits_are_measured_and_ctrl_c_ends_it(listener):
    process, port = listener
    for _ in range(2):  # and again: it listens anew
        checks, rate = check_link(Address(LOOPBACK, port), None, 0.2, quiet)
        assert [check.ok for check in checks] == [True], checks
        assert min(rate.up_mbps, rate.down_mbps, rate.both_ways_mbps, rate.round_trip_ms) > 0
        assert rate.control_wait_ms < 1000
        assert abs(checks[0].facts["clock_ahead_seconds"]) < 60
    said = iter(process.stderr.readline, "")
    for _ in range(2):
        assert next(line for line in said if "MB moved" in line)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "Stopped listening.\n")
    assert "Traceback" not in err


def test_strangers_are_turned_away_and_the_next_is_served(listener):
    _, port = listener
    for junk in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + os.urandom(200), b""):
        with socket.create_connection((LOOPBACK, port), timeout=60) as link:
            link.sendall(junk)
    checks, rate = check_link(Address(LOOPBACK, port), None, 0.1, quiet)
    assert checks[0].ok, checks
    assert rate is not None


def test_the_link_through_a_relay_is_measured(tmp_path):
    relay = Relay(LOOPBACK, 0, quiet)
    threading.Thread(target=relay.serve, daemon=True).start()
    at, ready = Address(LOOPBACK, relay.port), threading.Event()
    serving = threading.Thread(target=link_test.serve, args=(at, at, quiet, ready.set), daemon=True)
    serving.start()
    assert ready.wait(60)
    checks, rate = check_link(at, at, 0.1, quiet)
    assert checks[0].ok, checks
    assert checks[0].name == f"relay {at}"
    assert min(rate.up_mbps, rate.down_mbps) > 0


def test_what_cannot_be_reached_and_who_is_no_listener_are_one_line_each(monkeypatch):
    monkeypatch.setattr(link_test, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    checks, rate = check_link(Address(LOOPBACK, free_port()), None, 0.1, quiet)
    assert (checks[0].ok, rate) == (False, None)
    assert "connection refused" in checks[0].words
    assert "isthmus doctor --listen" in checks[0].cure
    with socket.create_server((LOOPBACK, 0)) as other:
        checks, rate = check_link(Address(LOOPBACK, other.getsockname()[1]), None, 0.1, quiet)
    assert (checks[0].ok, rate) == (False, None)
    assert "no stage link" in checks[0].words


def test_hosts_are_read_and_shown_alike():
    for text in ("10.0.0.2:29510", "[fe80::1]:7", "a-b.example:1"):
        assert str(parse_host(text)) == text
    assert parse_host("10.0.0.2") == Address("10.0.0.2", 29510)
    assert parse_host("::1") == Address("::1", 29510)
    for bad in ("", "a b", "host:0", "host:65536", "host:", ":1", "s3:/x", "a:b:c:z"):
        with pytest.raises(ConfigError, match="neither a bucket nor a machine"):
            parse_host(bad)


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
