"""What strangers can take at a stage's port: bounded places, bounded time, bounded handshakes a second."""

import socket

import pytest

from isthmus.runtime.strangers import (
    BURST,
    ENDING,
    HANDSHAKE_SECONDS,
    HANDSHAKES_PER_SECOND,
    MOST_PENDING,
    MOST_PENDING_OF_ONE,
    HandshakeLimiter,
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limiter(clock):
    return HandshakeLimiter(clock, choose=lambda pending: pending[0])


@pytest.fixture
def links():
    """Makes connections, as the port sees them."""
    made = []

    def link():
        made.extend(socket.socketpair())
        return made[-1]

    yield link
    for each in made:
        each.close()


def is_cut(link):
    link.setblocking(False)
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False


def test_an_address_that_holds_its_share_loses_one_of_its_own_for_each_newcomer(limiter, links):
    held = [links() for _ in range(MOST_PENDING_OF_ONE)]
    other = links()
    assert all(limiter.enter(link, "192.0.2.1") for link in (*held,))
    assert limiter.enter(other, "192.0.2.2")
    newcomer = links()
    assert limiter.enter(newcomer, "192.0.2.1")
    assert [is_cut(link) for link in (*held, other, newcomer)] == [True] + [False] * (len(held) + 1)


def test_where_all_places_are_taken_the_fullest_address_makes_room(limiter, links):
    crowd = [links() for _ in range(MOST_PENDING_OF_ONE)]
    for link in crowd:
        limiter.enter(link, "192.0.2.1")
    others = [links() for _ in range(MOST_PENDING - len(crowd))]
    for i, link in enumerate(others):
        limiter.enter(link, f"198.51.100.{i}")
    honest = links()
    assert limiter.enter(honest, "203.0.113.9")
    assert [is_cut(link) for link in (crowd[0], *others, honest)] == [True] + [False] * (len(others) + 1)
    assert len(limiter.pending) == MOST_PENDING


def test_the_64_bits_that_one_customer_gets_of_ipv6_count_as_one_address(limiter, links):
    held = [links() for _ in range(MOST_PENDING_OF_ONE + 1)]
    for i, link in enumerate(held):
        limiter.enter(link, f"2001:db8::{i + 1:x}")
    assert is_cut(held[0])


def test_whoever_is_not_done_in_time_is_cut(limiter, links, clock):
    first, second = links(), links()
    limiter.enter(first, "192.0.2.1")
    clock.now += HANDSHAKE_SECONDS
    limiter.enter(second, "192.0.2.1")
    limiter.sweep()
    assert not is_cut(first)
    clock.now += 0.1
    limiter.sweep()
    assert [is_cut(first), is_cut(second)] == [True, False]
    with pytest.raises(ConnectionAbortedError):
        limiter.pause(first)


def test_handshakes_a_second_are_bounded_and_go_on_as_time_passes(limiter, links, clock):
    link = links()
    limiter.enter(link, "192.0.2.1")
    assert [limiter.pause(link) for _ in range(int(BURST))] == [0.0] * int(BURST)
    wait = limiter.pause(link)
    assert wait == pytest.approx(1 / HANDSHAKES_PER_SECOND)
    clock.now += wait
    assert limiter.pause(link) == 0.0
    assert limiter.pause(link) > 0


def test_threads_that_still_end_are_bounded_and_make_room_as_they_do(limiter, links):
    cut = [links() for _ in range(ENDING * MOST_PENDING)]
    assert all(limiter.enter(link, "192.0.2.1") for link in cut)
    newcomer = links()
    assert not limiter.enter(newcomer, "192.0.2.2")
    limiter.leave(cut[0])
    assert limiter.enter(newcomer, "192.0.2.2")
