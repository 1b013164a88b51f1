"""What every store promises, on a folder, moto and SeaweedFS."""

import subprocess
import sys
import threading
import time

import pytest

from isthmus.store import Store, StoreRefused, open_store
from isthmus.store.together import as_they_come, together


@pytest.fixture
def store(any_store_url: str) -> Store:
    return open_store(any_store_url)


def test_what_is_put_is_got_and_the_last_put_counts(store: Store):
    for data in (b"", b"one", bytes(range(256)) * 5000):
        store.put("payloads/rack/0/shard-1", data)
        assert store.get("payloads/rack/0/shard-1", max_bytes=len(data)) == data
        assert store.head("payloads/rack/0/shard-1").size == len(data)


def test_absent_is_none_and_no_error(store: Store):
    assert store.get("run.json", max_bytes=10) is None
    assert store.head("run.json") is None
    assert store.list() == store.list("manifests/") == []
    store.delete("run.json")


def test_a_listing_has_every_key_below_a_segment_in_order(store: Store):
    keys = [f"manifests/{number:03d}.json" for number in range(12)]
    for key in [*keys, "manifests-old/1", "run.json"]:
        store.put(key, b"x", durable=False)
    assert store.list("manifests") == store.list("manifests/") == keys
    assert store.list() == sorted([*keys, "manifests-old/1", "run.json"])
    store.delete(keys[0])
    assert store.list("manifests") == keys[1:]


def test_create_has_one_winner_and_tells_ones_own_bytes(store: Store):
    assert store.create("manifests/1.json", b"mine")
    assert not store.create("manifests/1.json", b"other")
    assert not store.create("manifests/1.json", b"a longer one than what is there")
    assert store.create("manifests/1.json", b"mine")  # a lost reply looks like this
    assert store.get("manifests/1.json", max_bytes=10) == b"mine"


def test_processes_race_for_a_key_and_one_wins(racing_store_url: str):
    script = (
        "import sys; from isthmus.store import open_store\n"
        "store = open_store(sys.argv[1]); sys.stdin.read()\n"
        "print([n for n in range(25) if store.create(f'manifests/{n}', sys.argv[2].encode())])"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}", racing_store_url]
    pipe = subprocess.PIPE
    runners = [subprocess.Popen([*command, str(n)], stdin=pipe, stdout=pipe, text=True) for n in range(4)]
    for runner in runners:
        runner.stdin.close()
    won = [number for runner in runners for number in eval(runner.stdout.read())]
    assert [runner.wait() for runner in runners] == [0] * 4
    assert sorted(won) == list(range(25))


def test_an_object_too_large_for_its_reader_is_refused_unread(store: Store):
    store.put("payloads/rack/0/huge", b"x" * 5_000_000)
    before = store.bytes_received
    with pytest.raises(StoreRefused, match="holds 5000000 bytes; at most 100 are accepted"):
        store.get("payloads/rack/0/huge", max_bytes=100)
    assert store.bytes_received == before


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/",
        ".hidden",
        "a b",
        "a\nb",
        "a#1",
        "a%2e",
        "ä",
        "x" * 999,
    ],
)
def test_odd_keys_are_refused(folder_url: str, key: str):
    store = open_store(folder_url)
    for call in (store.head, store.delete, lambda key: store.get(key, max_bytes=1)):
        with pytest.raises(StoreRefused):
            call(key)
    for call in (store.put, store.create):
        with pytest.raises(StoreRefused):
            call(key, b"x")


def test_a_good_store_passes_the_probe_and_is_left_clean(store: Store):
    store.probe()
    store.probe("members/rack/probe")
    assert store.list() == []


def test_the_clock_is_the_stores(store: Store):
    assert abs(store.now("members/rack/clock") - time.time()) < 10
    asked = store.requests
    first, second = store.now("members/rack/clock"), store.now("members/rack/clock")
    assert first <= second < first + 30
    assert store.requests == asked  # carried on by this machine's monotonic clock


def test_bytes_and_requests_are_counted(store: Store):
    before = store.requests
    store.put("a", b"x" * 1000)
    store.create("b", b"x" * 500)
    store.get("a", max_bytes=1000)
    store.get("absent", max_bytes=1000)
    assert (store.bytes_sent, store.bytes_received) == (1500, 1000)
    assert store.requests == {**before, "put": 1, "create": 1, "get": before["get"] + 2}


def test_no_secret_is_in_a_stores_name(store: Store, any_store_url: str):
    assert repr(store) == f"Store({any_store_url!r})"


def test_a_scan_has_the_size_and_the_time_of_every_object(store: Store):
    before = store.now("probe/clock")
    for number in range(3):
        store.put(f"members/{number}/live.json", b"x" * number, durable=False)
    found = store.scan("members/")
    assert {key: info.size for key, info in found.items()} == {
        f"members/{number}/live.json": number for number in range(3)
    }
    assert list(found) == store.list("members")
    assert all(abs(info.modified_unix_seconds - before) < 60 for info in found.values())
    assert store.scan("nothing") == {}


def test_calls_together_answer_in_order_and_the_first_fault_is_raised(store: Store):
    keys = [f"commits/{number}" for number in range(40)]
    together([lambda key=key: store.put(key, key.encode(), durable=False) for key in keys])
    got = together([lambda key=key: store.get(key, max_bytes=99) for key in keys], at_once=8)
    assert got == [key.encode() for key in keys]
    assert together([]) == []
    with pytest.raises(StoreRefused, match="commits/10 holds"):
        together([lambda key=key: store.get(key, max_bytes=9 if key == keys[10] else 99) for key in keys])


def test_no_more_calls_are_under_way_than_were_asked_for():
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(4, timeout=60)

    def call() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait()
        with lock:
            running -= 1
        return 1

    assert together([call] * 12, at_once=4) == [1] * 12
    assert most == 4
    taken = [name for name, _ in as_they_come(((number, call) for number in range(12)), at_once=4)]
    assert sorted(taken) == list(range(12))
    assert most == 4
