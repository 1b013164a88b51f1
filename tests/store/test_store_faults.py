"""A bad network: lost replies, busy servers, slow links, a store that goes away and comes back."""

import math
import os
import threading
import time

import pytest
import servers
from faultproxy import FaultProxy
from servers import use

from isthmus.errors import ConfigError
from isthmus.store import StoreError, open_store
from isthmus.store.retry import Fault
from isthmus.store.timing import Absence

one_server = pytest.mark.parametrize("bad_network", ["seaweed"], indirect=True)  # where it takes seconds


def test_a_reply_lost_after_the_write_neither_loses_nor_doubles(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    proxy.trouble("lose", part="manifests", times=2)
    assert store.create("manifests/1.json", b"mine")
    assert not store.create("manifests/1.json", b"other")
    proxy.trouble("lose", part="payloads", times=2)
    store.put("payloads/rack/1/shard", b"bytes")
    assert store.get("payloads/rack/1/shard", max_bytes=9) == b"bytes"
    assert store.list() == ["manifests/1.json", "payloads/rack/1/shard"]


def test_a_conflict_without_an_object_is_tried_again(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    proxy.trouble("answer", status=409, code="ConditionalRequestConflict")
    assert store.create("manifests/1.json", b"mine")
    assert store.requests["create"] == 2


@pytest.mark.parametrize(
    ("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests")]
)
def test_a_busy_store_is_asked_again(bad_network: tuple[str, FaultProxy], status: int, code: str):
    url, proxy = bad_network
    store = open_store(url)
    for method in ("PUT", "GET"):
        proxy.trouble("answer", method, status=status, code=code)
    store.put("a", b"x")
    assert store.get("a", max_bytes=1) == b"x"
    assert (store.requests["put"], store.requests["get"]) == (2, 3)  # one GET was the opening's


def test_a_busy_store_is_given_up_at_the_deadline_in_one_line(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    proxy.trouble("answer", status=503, times=99)
    says = r"put a: the store is busy or failing \(SlowDown\) \(gave up after \d+ s and \d+ tries\)"
    began = time.monotonic()
    with pytest.raises(StoreError, match=says) as caught:
        store.put("a", b"x", deadline=began + 2)
    assert 1 < time.monotonic() - began < 30  # without a deadline it would try for a minute
    assert caught.value.kind == "busy"
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__  # obstore's own text could hold a key


def test_a_silent_or_broken_connection_is_replaced(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    store._up.least_seconds = 1.0
    proxy.trouble("stall", seconds=4)
    store.put("a", b"x" * 100_000)
    proxy.trouble("cut", "GET")
    assert store.get("a", max_bytes=100_000) == b"x" * 100_000
    assert store.requests["get"] == 3


@one_server
def test_a_slow_upload_gets_the_time_its_size_needs(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    store._up.least_seconds = store._down.least_seconds = 2.0
    data = os.urandom(250_000)
    proxy.bytes_per_second = 100_000
    store.put("a", data)
    assert store._up.bytes_per_second < 125_000
    assert store.get("a", max_bytes=len(data)) == data
    assert (store.requests["put"], store.requests["get"]) == (1, 2)


@one_server
def test_a_link_that_became_slow_is_found_out(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    store._up.least_seconds = 0.5
    store._up.saw(10**8, 1.0)  # it was fast
    proxy.bytes_per_second = 100_000
    store.put("a", b"x" * 120_000)
    assert store.requests["put"] > 1


@one_server
def test_a_heartbeat_passes_a_bulk_upload(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    proxy.bytes_per_second = 10_000  # per connection
    bulk = threading.Thread(target=store.put, args=("bulk", b"x" * 600_000))
    bulk.start()
    assert proxy.wait_for("bulk")
    store.put("members/rack/live.json", b"alive")
    assert bulk.is_alive()
    proxy.bytes_per_second = None
    bulk.join()
    assert store.head("bulk").size == 600_000


def test_refused_connections_are_waited_out(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    store.put("a", b"x")
    proxy.close_port()
    back = threading.Timer(1.5, proxy.open_port)
    back.start()
    assert store.get("a", max_bytes=1) == b"x"
    assert store.create("b", b"y")
    back.join()


@one_server
def test_expired_credentials_are_renewed_or_reported_in_one_line(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    proxy.trouble("answer", status=403, code="ExpiredToken", times=2)
    store.put("a", b"x")  # by then somebody had renewed them
    proxy.trouble("answer", status=400, code="ExpiredToken", times=99)
    with pytest.raises(StoreError, match=r"credentials have expired \(ExpiredToken\); renew them") as caught:
        store.put("a", b"x")
    assert caught.value.kind == "expired"
    for secret in servers.ADMIN:
        assert secret not in str(caught.value) + repr(caught.value) + repr(store)


def test_new_credentials_are_read_after_the_old_ones_expire(seaweed_url: str, seaweed_server, monkeypatch):
    proxy = FaultProxy(seaweed_server.port)
    use(monkeypatch, proxy.url)
    store = open_store(seaweed_url)
    proxy.trouble("answer", status=403, code="ExpiredToken")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StoreError, match="InvalidAccessKeyId"):  # so the environment was read again
        store.put("a", b"x")
    proxy.close_port()


def test_a_wrong_clock_is_not_called_a_wrong_permission(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    proxy.trouble("answer", "GET", status=403, code="RequestTimeTooSkewed")
    with pytest.raises(ConfigError, match=r"not a matter of permission: this machine's clock is wrong"):
        open_store(url)


def test_the_last_word_is_the_final_fault_not_an_earlier_one(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    proxy.trouble("answer", status=500, code="InternalError")
    proxy.trouble("answer", status=403, code="AccessDenied")
    with pytest.raises(StoreError, match="create a: permission denied"):
        store.create("a", b"x")


def test_an_absence_is_what_requests_met_not_the_time_in_which_nobody_asked():
    """Heartbeats are forgiven for an absence; else whoever is dead lives as long as the closer trains."""
    now = 100.0
    absence = Absence(lambda: now)
    fault, absent = Fault("network", "the connection broke", True), Fault("absent", "not there", False)
    absence.answered(began=now)
    now += 60
    absence.answered(began=now)  # it trained, and asked nothing
    assert absence.seconds_since_return == math.inf
    absence.failed(now, fault)
    now += 1
    absence.answered(began=now)  # one bad connection
    assert absence.seconds_since_return == math.inf
    now += 60
    absence.failed(now, fault)
    now += 3
    absence.failed(now, fault)
    absence.failed(now, absent)  # an answer all the same
    assert absence.seconds_since_return == 0
    now += 5
    assert absence.seconds_since_return == 5
    began, now = now, now + 9
    absence.answered(began)  # slow, as every request may be
    assert absence.seconds_since_return == 14
    began, now = now, now + 11
    absence.answered(began)  # hung, and so was everything else
    assert absence.seconds_since_return == 0
    began, now = now, now + 11
    absence.answered(now - 1)
    absence.answered(began)  # this one alone
    assert absence.seconds_since_return == 11


@one_server
def test_a_store_knows_when_it_came_back(bad_network: tuple[str, FaultProxy]):
    url, proxy = bad_network
    store = open_store(url)
    store.put("a", b"x")
    assert store.seconds_since_return == math.inf
    proxy.trouble("answer", method="GET", status=503, code="SlowDown", times=3)
    assert store.get("a", max_bytes=9) == b"x"
    assert store.seconds_since_return < 60


def test_one_request_gives_an_object_and_its_time(any_store_url: str):
    store = open_store(any_store_url)
    assert store.get_dated("a", max_bytes=9) is None
    store.put("a", b"x")
    before = store.requests
    data, info = store.get_dated("a", max_bytes=9)
    assert sum(store.requests.values()) == sum(before.values()) + 1
    assert (data, info.size) == (b"x", 1)
    assert abs(info.modified_unix_seconds - store.head("a").modified_unix_seconds) < 1
