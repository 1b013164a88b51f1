"""Slow strangers at a port: each has a total time, one address has its share, and a newcomer is served."""

import http.client
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from clocks import Clock
from fabricate import make_run, recipe

from isthmus.crowd import IDLE_SECONDS, LEAST_RATE, LINGERING, REQUEST_SECONDS, Crowd, Pace
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


# The limits

MOST, MOST_OF_ONE = 32, 8


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def crowd(clock):
    return Crowd(MOST, MOST_OF_ONE, clock, choose=lambda visits: visits[0])


@pytest.fixture
def come(crowd):
    """Lets connections enter, as the port sees them; returns their visits."""
    made = []

    def enter(*addresses):
        links = []
        for _ in addresses:
            made.extend(socket.socketpair())
            links.append(made[-1])
        return [crowd.enter(link, address) for link, address in zip(links, addresses, strict=True)]

    yield enter
    for link in made:
        link.close()


@pytest.mark.parametrize(
    "held",
    [
        ["192.0.2.1"] * MOST_OF_ONE,
        [f"2001:db8::{i:x}" for i in range(MOST_OF_ONE)],  # the 64 bits that one customer gets
        ["::ffff:192.0.2.1"] * MOST_OF_ONE,
    ],
)
def test_an_address_with_its_share_loses_one_of_its_own_to_each_newcomer(come, held):
    there, (other,), (newcomer,) = come(*held), come("203.0.113.9"), come(held[-1])
    assert [visit.cut for visit in there] == [True] + [False] * (MOST_OF_ONE - 1)
    assert not other.cut
    assert not newcomer.cut
    assert not still_there(there[0].link)


def test_in_a_full_port_the_fullest_address_makes_room(crowd, come):
    fullest = come(*["192.0.2.1"] * MOST_OF_ONE)
    others = come(*[f"198.51.100.{i}" for i in range(MOST - MOST_OF_ONE)], "203.0.113.9")
    assert [visit.cut for visit in (*fullest, *others)] == [True] + [False] * MOST
    assert crowd.by_party().total() == MOST


def test_idle_connections_make_room_first_and_kept_ones_last(come):
    visits = come(*["192.0.2.1"] * 3)
    visits[0].keep(1000)
    visits[1].request()
    come(*["192.0.2.1"] * (MOST_OF_ONE - 3))
    come("192.0.2.1")
    assert [visit.cut for visit in visits] == [False, False, True]


def test_a_connection_is_cut_when_its_time_is_up(crowd, come, clock):
    (first,) = come("192.0.2.1")
    first.request()
    clock.now += REQUEST_SECONDS
    (second,) = come("192.0.2.1")
    second.request()
    crowd.sweep()
    assert not first.cut
    clock.now += 0.1
    crowd.sweep()
    assert (first.cut, second.cut) == (True, False)


def test_threads_of_cut_connections_are_bounded(crowd, come):
    cut = come(*["192.0.2.1"] * (LINGERING * MOST))
    assert all(cut)
    assert come("192.0.2.2") == [None]
    crowd.leave(cut[0].link)
    assert all(come("192.0.2.2"))


def test_a_pace_bounds_steps_a_second_and_goes_on_as_time_passes(clock):
    pace = Pace(100.0, clock)
    assert [pace.pause() for _ in range(100)] == [0.0] * 100
    wait = pace.pause()
    assert wait == pytest.approx(0.01)
    clock.now += wait
    assert pace.pause() == 0.0
    assert pace.pause() > 0


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
