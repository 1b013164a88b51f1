"""Slow strangers at a port: each has a total time, one address has its share, and a newcomer is served."""

import http.client
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from clocks import Clock
from fabricate import make_run, recipe

from isthmus.crowd import IDLE_SECONDS, LEAST_RATE, REQUEST_SECONDS
from isthmus.page.server import Server, Watcher
from isthmus.page.source import open_source


def hung_up(link):
    """True once the other side has; waits for it."""
    link.settimeout(60)
    with suppress(ConnectionError):
        while link.recv(1 << 16):
            pass
    return True


def still_there(link):
    link.setblocking(False)
    try:
        return link.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    finally:
        link.settimeout(60)


def slow(port, address, *said):
    """A connection from one of this machine's many loopback addresses, which sends that and no more."""
    link = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0))
    for data in said:
        link.sendall(data)
    return link


# The page


@pytest.fixture(scope="module")
def watcher(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("crowd") / "run", recipe(), 2)
    watcher = Watcher(open_source(str(run.path)))
    watcher.start()
    return watcher


@contextmanager
def page(watcher, clock):
    with Server("127.0.0.1", 0, watcher, clock) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server, server.server_address[1]
        server.shutdown()


def ask(port, path="/", source="127.0.0.1"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=(source, 0))
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize("addresses", [1, 64])
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nA: "], ids=["silent", "half"])
def test_a_hundred_slow_connections_do_not_take_the_page_away(watcher, addresses, said):
    with page(watcher, Clock(0.0)) as (_, port):  # its time stands still: nobody is ever too late
        links = [slow(port, f"127.0.0.{2 + n % addresses}", said) for n in range(100)]
        for source in ("127.0.0.1", "127.0.0.2"):
            status, body = ask(port, "/page.js", source)
            assert (status, len(body) > 1000) == (200, True)
        for link in links:
            link.close()


def test_bytes_that_trickle_in_do_not_prolong_a_request(watcher):
    clock = Clock(0.0)
    with page(watcher, clock) as (_, port):
        link = slow(port, "127.0.0.1", b"GET / HTTP/1.1\r\n")
        done = threading.Event()

        def trickle():
            with suppress(OSError):
                while not done.is_set():
                    link.sendall(b"A: b\r\n")
                    clock.now += 0.5  # each comes well before any time of silence is over

        threading.Thread(target=trickle, daemon=True).start()
        assert hung_up(link)
        done.set()
        assert clock.now > REQUEST_SECONDS
        assert ask(port)[0] == 200


def test_an_answer_is_taken_at_a_least_rate(watcher, monkeypatch):
    clock, body = Clock(0.0), bytes(64 << 20)
    with page(watcher, clock) as (server, port):
        server.pages["/large"] = ("text/plain", body)
        link = slow(port, "127.0.0.1", b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert link.recv(4) == b"HTTP"
        clock.now = len(body) / LEAST_RATE  # a link that is slow, and not too slow
        server.crowd.sweep()
        assert still_there(link)
        clock.now = REQUEST_SECONDS + len(body) / LEAST_RATE + 1
        server.crowd.sweep()
        link.settimeout(60)
        received = 0
        with suppress(ConnectionError):
            while data := link.recv(1 << 20):
                received += len(data)
        assert received < len(body)
        assert ask(port)[0] == 200


def test_a_connection_that_asks_again_in_time_is_kept_and_a_silent_one_is_not(watcher):
    clock = Clock(0.0)
    with page(watcher, clock) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        silent = slow(port, "127.0.0.1")
        for _ in range(4):
            connection.request("GET", "/")
            assert connection.getresponse().read()
            kept = connection.sock
            clock.now += IDLE_SECONDS - 1
        assert hung_up(silent)
        assert connection.sock is kept


def test_a_body_is_not_taken_for_the_next_request(watcher):
    with page(watcher, Clock(0.0)) as (_, port):
        inner = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
        outer = b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(inner)
        link, answer = slow(port, "127.0.0.1", outer + inner), b""
        with suppress(ConnectionError):
            while data := link.recv(1 << 16):
                answer += data
        assert answer.count(b"HTTP/1.1 ") == 1
