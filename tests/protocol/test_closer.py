"""When a round is closed, by whom, and whom the next one waits for; all by the store's clock."""

import time
from pathlib import Path

import pytest
from clocks import Clock
from little import RECIPE, Little, Replica, ago, apply, closes, give
from little import hasty as hasty

from isthmus.errors import Diverged
from isthmus.protocol import closer as closer_module
from isthmus.protocol import members as members_module
from isthmus.protocol.closer import Closer
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.shards import ShardReader
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture
def run(folder_url: str, tmp_path: Path) -> list[Replica]:
    """a, b and c after round 1, all of them alive; only a closes."""
    return started(folder_url, tmp_path)


def started(url: str, folder: Path, recipe: str = RECIPE, closers: tuple[str, ...] = ("a",)) -> list[Replica]:
    replicas = Little(url, folder, recipe, closers).replicas(Clock())
    for each in replicas:
        each.beat()
    settle(1, *replicas)
    return replicas


def settle(round_number: int, *replicas: Replica) -> None:
    """A round to which all of them give, closed by the first in line."""
    give(round_number, *replicas)
    able = [each for each in replicas if each.exchange.closer]
    assert closes(min(able, key=lambda each: each.exchange.closer._turn(round_number)), round_number)
    apply(round_number, *replicas)


def closes_after_listening(replica: Replica, round_number: int = 2) -> bool:
    """Silence is believed when the closer has watched it for two heartbeats, a second at a time."""
    for _ in range(int(2 * replica.recipe.bucket.heartbeat_seconds)):
        assert not closes(replica, round_number)
        replica.exchange.closer.clock.now += 1
    return closes(replica, round_number)


def contributors(replica: Replica, round_number: int = 2) -> str:
    return "".join(entry.replica for entry in replica.ledger.manifest(round_number).entries)


def test_a_round_is_closed_at_once_when_everybody_gave(run: list[Replica]):
    give(2, *run[1:])
    assert not closes(run[0], 2)
    give(2, run[0])
    assert closes(run[0], 2)
    assert contributors(run[0]) == "abc"
    assert run[0].ledger.manifest(2).members == ("a", "b", "c")


def test_a_silent_member_is_not_waited_for_and_is_no_member_of_the_next_round(run: list[Replica]):
    give(2, *run[:2])
    assert not closes(run[0], 2)
    ago(run[0], "members/c/live.json", 60)
    assert closes_after_listening(run[0])
    assert contributors(run[0]) == "ab"
    assert run[0].ledger.manifest(2).members == ("a", "b")


def test_a_launcher_that_waits_is_waited_for_no_longer_than_a_silent_replica(run: list[Replica]):
    give(2, *run[:2])
    ago(run[0], "members/c/live.json", 60)
    for _ in range(int(2 * run[0].recipe.bucket.heartbeat_seconds)):
        run[2].ledger.beat(Heartbeat(state="waiting", awaiting="stage 1: no answer"))
        assert not closes(run[0], 2)
        run[0].exchange.closer.clock.now += 1
    assert closes(run[0], 2)
    assert contributors(run[0]) == "ab"
    assert run[0].ledger.manifest(2).members == ("a", "b")


def test_who_comes_back_first_after_an_outage_does_not_take_the_others_for_dead(run: list[Replica]):
    give(2, run[0])
    for name in "bc":
        ago(run[0], f"members/{name}/live.json", 60)  # for a minute nobody's heartbeat got through
    assert not closes(run[0], 2)
    for each in run[1:]:
        each.beat()
    for _ in range(20):  # heartbeats, as before
        run[0].exchange.closer.clock.now += 1
        assert not closes(run[0], 2)
    give(2, *run[1:])
    assert closes(run[0], 2)
    assert contributors(run[0]) == "abc"


def test_who_said_that_it_leaves_is_not_waited_for(run: list[Replica]):
    give(2, *run[:2])
    run[2].beat("left")
    assert closes(run[0], 2)
    assert run[0].ledger.manifest(2).members == ("a", "b")


def test_who_gives_and_leaves_counts_and_is_not_waited_for_again(run: list[Replica]):
    give(2, *run)
    run[2].beat("leaving")
    assert closes(run[0], 2)
    assert contributors(run[0]) == "abc"
    apply(2, *run)
    give(3, *run[:2])
    assert closes(run[0], 3)
    assert run[0].ledger.manifest(3).members == ("a", "b")


def test_a_live_straggler_is_waited_for_until_the_deadline_of_the_stores_clock(run: list[Replica]):
    give(2, *run[:2])
    limit = run[0].ledger.manifest(1).deadline_seconds
    assert 20 < limit < 60
    ago(run[0], "manifests/000001.json", limit - 5)
    assert not closes(run[0], 2)
    ago(run[0], "manifests/000001.json", limit + 1)
    assert closes(run[0], 2)
    assert contributors(run[0]) == "ab"
    assert run[0].ledger.manifest(2).members == ("a", "b", "c")  # it lives: the next round waits again


def started_again(replica: Replica) -> Closer:
    """The closer of a new process of this replica."""
    ledger = Ledger(open_store(replica.ledger.store.url), replica.ledger.run, replica.ledger.signer)
    reader = ShardReader(ledger, range(len(ledger.shards)))
    return Closer(ledger, reader, replica.exchange.log, Clock())


def test_a_closer_that_comes_to_an_open_round_gives_it_a_whole_deadline(run: list[Replica]):
    """After a night without anybody, who is back first must not count the night."""
    a, _, c = run
    give(2, *run[:2])
    for key in ("manifests/000001.json", "members/a/clock"):
        ago(a, key, 10**5)
    back = started_again(a)
    assert not back.attempt(2, a.exchange.anchor)
    back.away -= a.ledger.manifest(1).deadline_seconds + 1
    assert back.attempt(2, a.exchange.anchor)
    assert contributors(a) == "ab"
    for each in run:
        each.apply(2, each.exchange.closed(2))
    c.beat()
    give(3, *run[:2])
    ago(a, "manifests/000002.json", 10**5)  # this one it has seen opening
    assert back.attempt(3, a.exchange.anchor)


def test_a_closer_that_starts_again_and_again_does_not_put_off_a_round_for_ever(run: list[Replica]):
    a, _, c = run
    give(2, *run[:2])
    step = 0.9 * a.ledger.manifest(1).deadline_seconds  # between starts: none lives for a whole deadline
    for starts in range(4):
        ago(a, "manifests/000001.json", starts * step)
        ago(a, "members/a/clock", step)
        c.beat()
        assert started_again(a).attempt(2, a.exchange.anchor) == (starts == 3)
    assert contributors(a) == "ab"


def test_this_machines_clock_has_no_say(run: list[Replica], monkeypatch: pytest.MonkeyPatch):
    give(2, *run[:2])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10**6)
    assert not closes(run[0], 2)
    run[0].ledger.store._clock.offset += 10**6  # the store's own, as it is remembered
    assert closes(run[0], 2)


def test_a_late_payload_does_not_count_and_its_giver_learns_so(run: list[Replica]):
    a, b, c = run
    give(2, a, b)
    ago(a, "members/c/live.json", 60)
    assert closes_after_listening(a)
    counted = c.exchange.close(2, [c.update()])
    assert [each.replica for each in counted] == ["a", "b"]
    for each in run:
        each.apply(2, each.exchange.closed(2))
    c.beat()
    give(3, *run)
    assert closes(a, 3)
    assert contributors(a, 3) == "abc"  # no member of this round, and welcome
    assert a.ledger.manifest(3).members == ("a", "b", "c")


def test_half_of_the_members_is_no_quorum_at_the_deadline(run: list[Replica]):
    give(2, run[0])
    ago(run[0], "manifests/000001.json", run[0].ledger.manifest(1).deadline_seconds + 1)
    assert not closes(run[0], 2)
    give(2, run[1])
    assert closes(run[0], 2)


@pytest.mark.parametrize(("quorum", "givers", "closed"), [(1, 1, True), (2, 1, False), (3, 2, False)])
def test_the_recipes_quorum_is_honoured_at_the_deadline(
    folder_url: str, tmp_path: Path, quorum: int, givers: int, closed: bool
):
    recipe = RECIPE.replace("[bucket]", f"[bucket]\nquorum = {quorum}")
    run = started(folder_url, tmp_path, recipe)
    give(2, *run[:givers])
    assert not closes(run[0], 2)
    ago(run[0], "manifests/000001.json", 1000)
    assert closes(run[0], 2) is closed


def test_a_stated_quorum_is_waited_for_even_when_the_others_are_gone(folder_url: str, tmp_path: Path):
    run = started(folder_url, tmp_path, RECIPE.replace("[bucket]", "[bucket]\nquorum = 2"))
    give(2, run[0])
    for name in "bc":
        ago(run[0], f"members/{name}/live.json", 60)
    ago(run[0], "manifests/000001.json", 1000)
    assert not closes_after_listening(run[0])
    give(2, run[2])
    assert closes(run[0], 2)


def test_the_recipes_deadline_goes_before_the_measured_one(folder_url: str, tmp_path: Path):
    run = started(folder_url, tmp_path, RECIPE.replace("[bucket]", "[bucket]\ndeadline_seconds = 70"))
    give(2, *run[:2])
    ago(run[0], "manifests/000001.json", 40)
    assert not closes(run[0], 2)
    ago(run[0], "manifests/000001.json", 71)
    assert closes(run[0], 2)


def test_the_first_round_waits_for_those_who_have_not_started_yet(folder_url: str, tmp_path: Path):
    a, b, _ = Little(folder_url, tmp_path, closers=["a"]).replicas(Clock())
    give(1, a, b)
    assert not closes(a, 1)
    ago(a, "run.json", 100)
    assert closes_after_listening(a, 1)
    assert a.ledger.manifest(1).members == ("a", "b")


def test_nobodys_update_closes_no_round(run: list[Replica]):
    for name in "bc":
        ago(run[0], f"members/{name}/live.json", 60)
    ago(run[0], "manifests/000001.json", 10_000)
    assert not closes(run[0], 2)


def test_a_round_in_which_boundaries_open_is_given_the_time_that_whole_streams_take(
    folder_url: str, tmp_path: Path
):
    """Else full replicas would close it by the deadline of rounds with an eighth of the bytes."""
    slow = 'compression = "1/8"\nlink = { mbps = 0.01 }\n'  # c, which is pipelined
    run = started(folder_url, tmp_path, f"{RECIPE}{slow}[finish]\nrounds = 3\n")  # of 6
    a = run[0]
    more_bytes = 4 * 16 * (32 - 4) * 2 * (1 + 2 / 2)  # batch, context, width less k, bf16; fill and drain
    more = more_bytes * 8 / 0.01e6
    assert members_module.opening_seconds(a.recipe) == pytest.approx(more)
    for t in range(2, 6):
        give(t, *run)
        assert closes(a, t)
        for each in run:
            each.apply(t, each.exchange.closed(t))
    limits = [a.ledger.manifest(t).deadline_seconds for t in range(1, 6)]
    assert limits[:2] == [25, 25]
    assert limits[2] == pytest.approx(4 * more + 10, rel=0.3)  # round 4 is the first to open
    assert limits[3] > limits[1]  # most of what was measured is still of rounds before


def test_closers_take_turns_and_full_replicas_come_first(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path).replicas()
    for t in range(1, 9):
        places = {each.name: each.exchange.closer._turn(t) for each in run}
        assert sorted(places.values()) == [0, 1, 2]
        assert places["c"] == 2  # pipelined: it would read more than it applies
        assert (places["a"] == 0) is (t % 2 == 0)


def test_the_next_in_line_steps_in_when_the_first_does_not_close(folder_url: str, tmp_path: Path):
    clock = Clock()
    a, b, c = Little(folder_url, tmp_path).replicas(clock)
    give(1, a, b, c)
    assert not closes(a, 1)
    clock.now += closer_module.STEP_IN_SECONDS - 0.1
    assert not closes(a, 1)
    clock.now += 0.2
    assert closes(a, 1)
    assert not b.exchange.closer.attempt(1, b.exchange.anchor)  # too late, and no harm done
    assert {each.ledger.manifest(1).closer for each in (a, b, c)} == {"a"}


def test_only_closers_have_a_say(folder_url: str, tmp_path: Path):
    a, b, c = Little(folder_url, tmp_path, closers=["b"]).replicas()
    assert (a.exchange.closer, c.exchange.closer) == (None, None)
    assert b.exchange.closer is not None


def test_a_closer_that_diverged_stands_aside_and_is_refused_by_the_others(folder_url: str, tmp_path: Path):
    a, b, c = started(folder_url, tmp_path, closers=("a", "b"))
    a.anchor["norm.weight"].add_(1e-6)
    a.hold(1)
    give(2, a, b, c)
    with pytest.raises(Diverged, match="replica a holds another anchor than 2 of those who gave to round 2"):
        closes(a, 2)
    assert a.ledger.manifest(2) is None
    closes(b, 2)
    b.exchange.closer.clock.now += closer_module.STEP_IN_SECONDS  # its turn, if it was not the first
    assert b.ledger.manifest(2) or closes(b, 2)
    manifest = b.ledger.manifest(2)
    assert contributors(b) == "bc"
    assert dict(manifest.refused) == {"a": "the update starts from another anchor than this round's"}
    with pytest.raises(Diverged, match="replica a holds another anchor than round 2 started from"):
        a.exchange.closed(2)


def test_a_commit_is_judged_once(run: list[Replica]):
    a, b, c = run
    give(2, a, b)
    closes(a, 2)
    asked, down = a.ledger.store.requests["get"], a.ledger.store.bytes_received
    closes(a, 2)
    assert a.ledger.store.bytes_received - down < 2000
    assert a.ledger.store.requests["get"] - asked <= 3  # the missing commit and its giver's heartbeat
    c.deliver_as(2, c.update(scale=100.0))
    assert closes(a, 2)
    assert contributors(a) == "ab"


def test_what_a_round_counted_follows_the_recipes_order_not_arrival(run: list[Replica]):
    for each in reversed(run):
        give(2, each)
    assert closes(run[0], 2)
    assert contributors(run[0]) == "abc"
