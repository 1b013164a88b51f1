"""What a round asks of the store, who works for it, and whom it does not wait for."""

import time
from collections import Counter
from pathlib import Path

import pytest
from clocks import Clock
from little import LONG, RECIPE, Little, Replica, ago, apply, at_once, closes, give
from little import hasty as hasty

from isthmus.layout.requests import num_looks, pause_seconds, round_requests
from isthmus.protocol.heartbeat import Heartbeat, silent_after
from isthmus.protocol.looks import RoundClock
from isthmus.protocol.presence import Presence
from isthmus.store import Store

pytestmark = pytest.mark.usefixtures("hasty")
FULL = RECIPE.split("[[replicas]]")[0]


def fleet(num_replicas: int) -> str:
    return FULL + "".join(f'[[replicas]]\nname = "r{i:02d}"\n' for i in range(num_replicas))


def in_line(replicas: list[Replica], round_number: int) -> list[Replica]:
    return sorted(replicas, key=lambda each: each.exchange.closer._turn(round_number))


def asked(*replicas: Replica) -> Counter[str]:
    return sum((Counter(each.ledger.store.requests) for each in replicas), Counter[str]())


def started(url: str, folder: Path, recipe: str = LONG, closers: tuple[str, ...] = ("a",)) -> list[Replica]:
    replicas = Little(url, folder, recipe, closers).replicas(Clock())
    for each in replicas:
        each.beat()
    give(1, *replicas)
    first = in_line([each for each in replicas if each.exchange.closer], 1)[0]
    assert closes(first, 1)
    apply(1, *replicas)
    return replicas


# Requests


def all_close(folder: Path, num_replicas: int) -> Counter[str]:
    """What closing a round costs where all are closers and all try, the first in line last."""
    run = Little(str(folder / f"bucket-{num_replicas}"), folder / str(num_replicas), fleet(num_replicas))
    replicas = run.replicas(Clock())
    give(1, *replicas)
    before = asked(*replicas)
    line = in_line(replicas, 1)
    assert [closes(each, 1) for each in reversed(line)] == [False] * (num_replicas - 1) + [True]
    return asked(*replicas) - before


def test_requests_of_a_round_grow_with_m_and_not_with_its_square(tmp_path: Path):
    few, some, many = (sum(all_close(tmp_path, m).values()) for m in (4, 8, 16))
    assert many - some <= 2.2 * (some - few)  # twice as many more replicas, twice as many more requests


def test_a_closer_in_line_reads_no_commit(folder_url: str, tmp_path: Path):
    replicas = Little(folder_url, tmp_path, fleet(5)).replicas(Clock())
    first, *rest = in_line(replicas, 1)
    give(1, *replicas)
    for each in rest:
        before, received = each.ledger.store.requests, each.ledger.store.bytes_received
        assert not closes(each, 1)
        after = each.ledger.store.requests
        assert after["list"] - before["list"] <= 2  # commits; those close to the first, whether it lives
        assert each.ledger.store.bytes_received == received
        assert not closes(each, 1)  # nor does it look again before its time
        assert each.ledger.store.requests["list"] == after["list"]
    assert closes(first, 1)


def test_what_a_run_asked_is_what_the_arithmetic_says(folder_url: str, tmp_path: Path):
    rounds, members = 4, 6
    recipe = fleet(members).replace("anchor_every = 2", "anchor_every = 50")
    replicas = Little(folder_url, tmp_path, recipe, ["r00", "r01"]).replicas()

    def work(each: Replica) -> None:
        for t in range(1, rounds + 1):
            each.round(t)

    for each in replicas:
        each.beat()
    before, began = asked(*replicas), time.monotonic()
    at_once(*(lambda each=each: work(each) for each in replicas))
    seconds = (time.monotonic() - began) / rounds
    found = asked(*replicas) - before
    waited = sum(each.exchange.wait_seconds for each in replicas) / rounds / members
    shards = len(replicas[0].ledger.shards)
    said = round_requests(members, shards, round_seconds=seconds, wait_seconds=waited, heartbeat_seconds=1e9)
    assert found["create"] == rounds * said["create"]
    # Here nobody asks who should leave, nor for its own heartbeat; but at first each looks as a round begins.
    fixed = rounds * (members + said["payload get"])
    looks = found["get"] - fixed
    assert rounds * members <= looks <= 2 * rounds * members * (num_looks(waited, seconds) + 2)
    assert rounds <= found["list"] <= 2 * rounds * said["list"] + rounds * members
    assert found["head"] <= rounds * said["head"] + 8


def test_looks_are_few_before_a_round_is_due_and_close_when_it_is():
    assert pause_seconds(60, 100) == 10  # a tenth of a round
    assert pause_seconds(5.1, 100) == pytest.approx(0.2)
    assert pause_seconds(-20, 100) == 1  # late: at least every second
    assert num_looks(0.1, 3) == 1
    assert num_looks(50, 100) < 20 < 50
    assert pause_seconds(-1000, 3600) == 10


def test_a_round_is_expected_when_the_last_ones_took_so_long():
    clock = Clock()
    rounds = RoundClock(clock)
    assert rounds.to_due(1) == 0  # nobody knows
    for t, seconds in enumerate((7, 10, 12, 10), 1):
        clock.now += seconds
        rounds.ended(t, watched=True)
    assert rounds.seconds == 10
    assert rounds.to_due(5) == 10
    assert rounds.is_young(5)
    clock.now += 6
    assert rounds.to_due(5) == 4
    assert not rounds.is_young(5)
    rounds.ended(5, watched=False)  # we came late: it may have ended long ago
    assert not rounds.is_young(6)


# Listings may lag


def test_nobody_is_left_out_because_a_listing_lags(folder_url: str, tmp_path: Path, monkeypatch):
    a, b, c = started(folder_url, tmp_path)
    real = a.ledger.scan_commits
    monkeypatch.setattr(a.ledger, "scan_commits", lambda t: {n: i for n, i in real(t).items() if n != "c"})
    give(2, a, b, c)
    c.beat("left")
    assert closes(a, 2)
    assert [entry.replica for entry in a.ledger.manifest(2).entries] == ["a", "b", "c"]


def test_nobody_is_held_for_silent_because_a_listing_lags(folder_url: str, tmp_path: Path, monkeypatch):
    a, _, c = started(folder_url, tmp_path)
    presence: Presence = a.exchange.closer.presence
    ago(a, "members/c/live.json", 60)
    assert presence.alive("c", 2)  # it has heard of that one, and watches
    old = a.ledger.scan_heartbeats()
    monkeypatch.setattr(a.ledger, "scan_heartbeats", lambda: old)
    c.beat()
    presence.clock.now += 2 * a.recipe.bucket.heartbeat_seconds
    assert presence.alive("c", 2)


# Who is gone


def silent(a: Replica, round_number: int) -> int:
    """Seconds until the closer closes the round without whoever is silent."""
    for seconds in range(60):
        if closes(a, round_number):
            return seconds
        a.exchange.closer.clock.now += 1
    raise AssertionError("it waits for ever")


def test_a_dead_replica_is_waited_for_in_one_round_only_though_the_closer_trains(
    folder_url: str, tmp_path: Path
):
    a, b, _ = started(folder_url, tmp_path)
    ago(a, "members/c/live.json", 60)
    waited = []
    for t in range(2, 9):
        a.exchange.closer.clock.now += 45  # it trains, and asks the store for nothing
        give(t, a, b)
        waited.append(silent(a, t))
        assert a.ledger.manifest(t).members == ("a", "b")
        apply(t, a, b)
    assert waited == [2 * a.recipe.bucket.heartbeat_seconds] + [0] * 6


def test_silence_is_forgiven_where_the_store_was_away(folder_url: str, tmp_path: Path, monkeypatch):
    a, b, _ = started(folder_url, tmp_path)
    ago(a, "members/c/live.json", 60)
    give(2, a, b)
    monkeypatch.setattr(Store, "seconds_since_return", 3.0)
    for _ in range(20):
        assert not closes(a, 2)
        a.exchange.closer.clock.now += 1
    monkeypatch.setattr(Store, "seconds_since_return", 7.0)
    assert closes(a, 2)


def waits(replica: Replica, incarnation: str) -> None:
    """Its launcher says that this worker has ended."""
    replica.ledger.beat(Heartbeat(state="waiting", incarnation=incarnation, awaiting="a new start"))


def test_whose_worker_has_ended_is_not_waited_for_in_this_round(folder_url: str, tmp_path: Path):
    a, b, c = started(folder_url, tmp_path)
    give(2, a, b)
    waits(c, "0")
    ago(a, "members/c/waiting.json", 1000)  # of an earlier start, and of an earlier round
    c.beat()
    assert not closes(a, 2)
    waits(c, "1")
    assert closes(a, 2)
    assert a.ledger.manifest(2).members == ("a", "b")


def test_who_was_down_in_a_round_is_not_waited_for_in_it_though_it_is_back(folder_url: str, tmp_path: Path):
    quorum = LONG.replace("[bucket]", "[bucket]\nquorum = 2")
    a, b, c = started(folder_url, tmp_path, quorum)
    give(2, a)
    c.beat()
    waits(c, "1")
    assert not closes(a, 2)  # it has seen that c is down; and b is there
    c.beat("training", incarnation="2")
    give(2, b)
    assert closes(a, 2)
    assert [entry.replica for entry in a.ledger.manifest(2).entries] == ["a", "b"]
    assert a.ledger.manifest(2).members == ("a", "b", "c")  # it trains: the next round waits for it


def test_who_gave_and_ended_is_no_member_of_the_next_round(folder_url: str, tmp_path: Path):
    a, b, c = started(folder_url, tmp_path)
    give(2, a, b, c)
    c.beat()
    a.exchange.closer.presence.hear("c")
    waits(c, "1")
    assert closes(a, 2)
    assert a.ledger.manifest(2).members == ("a", "b")


def test_who_came_back_and_gave_within_the_same_second_is_a_member_of_the_next_round(
    folder_url: str, tmp_path: Path
):
    """The closer may have listed the heartbeats just before: it looks again before it leaves a giver out."""
    quorum = LONG.replace("[bucket]", "[bucket]\nquorum = 3")
    a, b, c = started(folder_url, tmp_path, quorum)
    give(2, a, b)
    c.beat()
    waits(c, "1")
    assert not closes(a, 2)  # it has seen that c is down
    c.beat("training", incarnation="2")
    give(2, c)
    assert a.exchange.closer.attempt(2, a.exchange.anchor)
    assert a.ledger.manifest(2).members == ("a", "b", "c")


@pytest.mark.parametrize(
    ("state", "member"), [("starting", False), ("catching up", False), ("training", True)]
)
def test_who_starts_or_catches_up_may_give_and_is_not_awaited(
    folder_url: str, tmp_path: Path, state: str, member: bool
):
    a, b, c = started(folder_url, tmp_path)
    ago(a, "members/c/live.json", 60)
    give(2, a, b)
    silent(a, 2)
    apply(2, a, b, c)
    c.beat(state, incarnation="2")
    give(3, a, b)
    assert closes(a, 3)
    assert ("c" in a.ledger.manifest(3).members) is member
    apply(3, a, b, c)
    give(4, c, a, b)
    assert closes(a, 4)
    assert a.ledger.manifest(4).entry("c")


def test_a_closer_that_has_gone_costs_its_turn_once(folder_url: str, tmp_path: Path):
    replicas = started(folder_url, tmp_path, LONG, ("a", "b"))
    a, b, c = replicas
    ago(a, "members/a/live.json", 60)  # a has gone; it would be the first in even rounds
    assert b.exchange.closer._turn(2) == 1
    give(2, b, c)
    silent(b, 2)
    apply(2, b, c)
    assert "a" not in b.ledger.manifest(2).members
    for t in (3, 4, 5):
        assert b.exchange.closer._turn(t) == 0
        give(t, b, c)
        assert closes(b, t)
        apply(t, b, c)


def test_the_next_in_line_counts_from_when_the_round_could_be_closed(folder_url: str, tmp_path: Path):
    replicas = Little(folder_url, tmp_path, fleet(3)).replicas(Clock())
    first, second, third = in_line(replicas, 1)
    clock = second.exchange.closer.clock
    give(1, first, third)
    assert not closes(second, 1)  # it looks, and waits three seconds for its next look
    give(1, second)
    for name in (first.name, second.name, third.name):
        ago(first, f"commits/000001/{name}.json", 10)
    clock.now += 2.9
    assert not closes(second, 1)
    clock.now += 0.2
    assert closes(second, 1)  # it could have been closed since its last look


def test_with_a_slow_store_the_first_in_line_is_not_late(folder_url: str, tmp_path: Path, monkeypatch):
    replicas = Little(folder_url, tmp_path, fleet(3)).replicas(Clock())
    _, second, _ = in_line(replicas, 1)
    monkeypatch.setattr(Store, "answer_seconds", 2.0)
    give(1, *replicas)
    clock = second.exchange.closer.clock
    assert not closes(second, 1)
    clock.now += 17.0
    assert not closes(second, 1)  # nine answers one after another
    clock.now += 2.0
    assert closes(second, 1)


# Heartbeats


def test_a_heartbeat_says_after_what_silence_its_author_is_silent(folder_url: str, tmp_path: Path):
    a, _, c = started(folder_url, tmp_path)
    recipe, presence = a.recipe, a.exchange.closer.presence
    assert silent_after(recipe) == silent_after(recipe, Heartbeat()) == 25
    assert silent_after(recipe, Heartbeat(every_seconds=40.0)) == 60
    assert silent_after(recipe, Heartbeat(every_seconds=1e9)) == 80  # believed up to a minute
    c.beat(every_seconds=40.0)
    ago(a, "members/c/live.json", 45)
    for _ in range(20):
        presence.look_again()
        assert presence.alive("c", 2)
        presence.clock.now += 1
