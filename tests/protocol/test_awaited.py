"""Who is waited for: whoever beats must also deliver, and only a new heartbeat is a sign of life."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from clocks import Clock
from little import LONG, Little, Replica, ago, apply, closes, give
from little import hasty as hasty

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import Refused
from isthmus.runtime.leaving import LeaveRequest, Orders
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")


def past_deadline(replica: Replica, round_number: int, times: float = 1.0) -> None:
    """The open round has been open for so many of its deadlines."""
    limit = replica.ledger.manifest(round_number - 1).deadline_seconds
    ago(replica, f"manifests/{round_number - 1:06d}.json", times * limit + 1)


def started(url: str, folder: Path, recipe: str = LONG) -> list[Replica]:
    replicas = Little(url, folder, recipe, ["a"]).replicas(Clock())
    for each in replicas:
        each.beat()
    give(1, *replicas)
    assert closes(replicas[0], 1)
    apply(1, *replicas)
    return replicas


def waits_for(replica: Replica, round_number: int) -> str:
    return "".join(replica.ledger.manifest(round_number - 1).members)


def without(c: Replica, round_number: int, a: Replica, b: Replica, late: bool = False) -> bool:
    """A round in which c beats and does not deliver in time; whether it was waited for."""
    c.beat()
    give(round_number, a, b)
    awaited = "c" in waits_for(a, round_number)
    if awaited:
        assert not closes(a, round_number)
        past_deadline(a, round_number)
    assert closes(a, round_number)
    if late:
        give(round_number, c)
        c.apply(round_number, c.exchange.closed(round_number))
    apply(round_number, a, b)
    return awaited


# Who beats and does not deliver


def test_after_three_missed_rounds_who_only_beats_is_waited_for_no_longer(folder_url: str, tmp_path: Path):
    a, b, c = started(folder_url, tmp_path)
    awaited = [without(c, t, a, b) for t in range(2, 12)]
    assert awaited == [True] * 3 + [False] * 7
    assert [line for line in a.said if "lives and does not deliver" in line] == [
        "round 4: c lives and does not deliver; it is no longer awaited"
    ]
    for t in range(2, 12):  # it missed them all, and is back
        c.apply(t, c.exchange.closed(t))
    give(12, a, b, c)
    assert closes(a, 12)
    assert waits_for(a, 13) == "abc"


def test_the_recipe_says_how_many_rounds_may_be_missed(folder_url: str, tmp_path: Path):
    a, b, c = started(folder_url, tmp_path, LONG.replace("[bucket]", "[bucket]\nmissed_rounds = 1"))
    assert [without(c, t, a, b) for t in range(2, 5)] == [True, False, False]
    with pytest.raises(ConfigError, match=r"bucket\.missed_rounds"):
        parse_recipe(LONG.replace("[bucket]", "[bucket]\nmissed_rounds = 0"))


def test_who_is_always_late_gets_fewer_and_fewer_chances(folder_url: str, tmp_path: Path):
    """A slow replica delivers late to a round that did not wait for it: it must be able to come back. One
    that does so on purpose must not cost a deadline in every round."""
    a, b, c = started(folder_url, tmp_path)
    awaited = [t for t in range(2, 30) if without(c, t, a, b, late=True)]
    assert awaited == [2, 3, 4, 7, 10, 15, 24]  # its late commit to round 5 is seen when 6 is closed


def test_one_chance_taken_makes_a_slow_replica_a_member_again(folder_url: str, tmp_path: Path):
    a, b, c = started(folder_url, tmp_path)
    assert [without(c, t, a, b, late=True) for t in range(2, 7)] == [True, True, True, False, False]
    for t in (7, 8, 9):
        assert "c" in waits_for(a, t)
        give(t, a, b, c)
        assert closes(a, t)
        apply(t, a, b, c)


def test_of_two_replicas_one_that_only_beats_does_not_stop_the_other_for_ever(
    folder_url: str, tmp_path: Path
):
    a, c = started(folder_url, tmp_path, LONG.replace('[[replicas]]\nname = "b"\n', ""))
    give(2, a)
    for times in (1, 2, 2.9):
        past_deadline(a, 2, times)
        c.beat()
        assert not closes(a, 2)  # half is no quorum
    past_deadline(a, 2, 3.1)
    assert closes(a, 2)
    assert [entry.replica for entry in a.ledger.manifest(2).entries] == ["a"]


# Heartbeats


def silent(a: Replica, between: Callable[[], None] | None = None) -> bool:
    """Does the closer come to hold c for silent? `between` looks, c's heartbeat is written anew."""
    presence, path = a.exchange.closer.presence, Path(a.ledger.store.url, "members/c/live.json")
    for _ in range(40):
        presence.look_again()
        if not presence.alive("c", 2):
            return True
        presence.clock.now += 1
        a.ledger.store._clock.offset += 1  # the store's clock goes on too
        if between:
            between()
            os.utime(path, (a.ledger.store.now(),) * 2)
    return False


def test_one_that_goes_on_beating_is_alive(folder_url: str, tmp_path: Path):
    a, _, c = started(folder_url, tmp_path)
    assert not silent(a, c.beat)


def test_a_heartbeat_from_the_future_keeps_nobody_alive(folder_url: str, tmp_path: Path):
    a, _, c = started(folder_url, tmp_path)
    presence = a.exchange.closer.presence
    presence.last.clear()  # its last real one was long ago
    c.beat()
    ago(a, "members/c/live.json", -(10**6))
    assert silent(a)


def test_a_closer_whose_machine_slept_does_not_take_the_others_for_dead(folder_url: str, tmp_path: Path):
    a, _, c = started(folder_url, tmp_path)
    c.beat()
    a.ledger.store._clock.offset -= 1000  # carried on by a clock that stood still
    assert not silent(a, c.beat)


# Requests to leave


def test_only_a_request_signed_with_the_replicas_key_makes_it_leave(any_store_url: str, tmp_path: Path):
    run = Little(any_store_url, tmp_path)
    c, said = run.replica("c"), []
    request = LeaveRequest(Orders(), c.ledger, "start1", said.append, leader=True)
    assert not request.asked()
    stranger = open_store(any_store_url)
    for forged in (
        b"leave",
        run.ledger("b").signer.seal("leave", run.run.run_id, {"incarnation": "start1"}),
        run.ledger("c").signer.seal("leave", run.run.run_id, {"incarnation": "start0"}),
        run.ledger("c").signer.seal("heartbeat", run.run.run_id, {"incarnation": "start1"}),
        bytes(1 << 20),
    ):
        stranger.put("members/c/leave-start1", forged)
        assert not request.asked()
        with pytest.raises(Refused):
            c.ledger.asked_to_leave("start1")
    assert len(said) == 1
    assert "somebody asks this replica to leave, but" in said[0]
    run.ledger("c").ask_to_leave("start1")
    assert request.asked()


def test_a_request_to_leave_that_is_no_file_stops_nobody(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path)
    c, said = run.replica("c"), []
    os.makedirs(Path(folder_url, "members/c"), exist_ok=True)
    os.mkfifo(Path(folder_url, "members/c/leave-start1"))
    assert not LeaveRequest(Orders(), c.ledger, "start1", said.append, leader=True).asked()
    assert len(said) == 1


def test_a_request_is_found_by_the_start_after_it(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path)
    ledger: Ledger = run.ledger("c")
    ledger.ask_to_leave("start1")
    assert LeaveRequest(Orders(), ledger, "start2", print, leader=True, previous="start1").asked()
