"""A worker that has ended, as its launcher says: nobody waits for it in that round, also when it is back."""

from pathlib import Path

import pytest
from clocks import Clock
from little import LONG, Little, Replica, apply, closes, give
from little import hasty as hasty

from isthmus.protocol.closer import STEP_IN_SECONDS
from isthmus.protocol.heartbeat import WAITING, Heartbeat

pytestmark = pytest.mark.usefixtures("hasty")


def ended(replica: Replica, incarnation: str = "1") -> None:
    replica.ledger.beat(Heartbeat(state=WAITING, incarnation=incarnation, awaiting="the next start"))


def started(url: str, folder: Path, closers: list[str], clock: Clock) -> list[Replica]:
    """Three members, a round settled, all heard of by who closes."""
    replicas = Little(url, folder, LONG, closers).replicas(clock)
    for each in replicas:
        each.beat()
    give(1, *replicas)
    clock.now += STEP_IN_SECONDS * len(closers)
    assert any(closes(each, 1) for each in replicas if each.name in closers)
    apply(1, *replicas)
    return replicas


def test_who_comes_back_in_the_middle_of_a_round_is_awaited_in_the_next_and_not_in_this_one(
    folder_url: str, tmp_path: Path
):
    a, b, c = started(folder_url, tmp_path, ["a"], Clock())
    ended(c)
    c.beat(incarnation="2")  # it trains the round when the others are done with it
    give(2, a, b)
    assert closes(a, 2)
    manifest = a.ledger.manifest(2)
    assert [entry.replica for entry in manifest.entries] == ["a", "b"]
    assert manifest.members == ("a", "b", "c")
    apply(2, a, b, c)
    give(3, a, b)
    c.beat(incarnation="2")
    assert not closes(a, 3)  # what its launcher said was of the round before
    give(3, c)
    assert closes(a, 3)


def test_what_it_gives_in_time_counts_all_the_same(folder_url: str, tmp_path: Path):
    a, b, c = started(folder_url, tmp_path, ["a"], Clock())
    ended(c)
    c.beat(incarnation="2")
    give(2, a, b, c)
    assert closes(a, 2)
    assert len(a.ledger.manifest(2).entries) == 3


@pytest.mark.parametrize("down", [False, True])
def test_the_next_closer_in_line_steps_in_at_once_where_the_first_is_down(
    down: bool, folder_url: str, tmp_path: Path
):
    clock = Clock()
    replicas = started(folder_url, tmp_path, ["a", "b"], clock)
    first = next(r for r in replicas if r.exchange.closer and not r.exchange.closer._turn(2))
    other = next(r for r in replicas if r.exchange.closer and r is not first)
    give(2, *(r for r in replicas if r is not first or not down))
    if down:
        ended(first)
    assert closes(other, 2) == down
    clock.now += STEP_IN_SECONDS
    assert down or closes(other, 2)
