"""A payload that a round counts and a reader does not find: retried, led past by an anchor, or the end."""

from collections.abc import Callable
from pathlib import Path

import pytest
from clocks import Clock
from little import RECIPE, Little, Replica, equal, settle
from little import hasty as hasty

from isthmus.errors import RunStopped
from isthmus.protocol.missing import RETRY_SECONDS, LedPast
from isthmus.protocol.patience import LeftWaiting
from isthmus.protocol.payloads import shard_key

pytestmark = pytest.mark.usefixtures("hasty")
NO_ANCHORS = RECIPE.replace("anchor_every = 2", "anchor_every = 100")


def lose(replica: Replica, name: str, round_number: int) -> Callable[[], object]:
    """Delete a shard that a round counts; a call that puts it again."""
    shard = replica.ledger.manifest(round_number).entry(name).shards[2]
    store, key = replica.ledger.store, shard_key(name, round_number, shard)
    data = store.get(key, max_bytes=shard.size)
    store.delete(key)
    return lambda: store.put(key, data)


def meanwhile(replica: Replica, at: dict[float, Callable[[], object]]) -> Clock:
    """The replica's clock, which moves while it sleeps; each event happens after so many seconds."""
    clock, due = Clock(0.0), dict(at)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        for when in [when for when in due if when <= clock.now]:
            due.pop(when)()

    replica.exchange.missing.clock, replica.exchange.missing.sleep = clock, sleep
    return clock


@pytest.fixture
def fleet(folder_url: str, tmp_path: Path) -> list[Replica]:
    """Three rounds are settled; c has applied none, and misses a payload of round 1."""
    a, b, c = Little(folder_url, tmp_path, NO_ANCHORS).replicas()
    for t in (1, 2, 3):
        settle(t, a, [a, b], [a, b])
    return [a, b, c]


def catches_up(replica: Replica, last: int) -> None:
    for t in range(1, last + 1):
        replica.apply(t, replica.exchange.closed(t))


def test_a_payload_that_is_found_late_is_read_and_nothing_is_skipped(fleet: list[Replica]):
    a, _, c = fleet
    clock = meanwhile(c, {RETRY_SECONDS - 40: lose(a, "b", 1)})
    catches_up(c, 3)
    assert equal(c.anchor, a.anchor)
    assert 0 < clock.now < RETRY_SECONDS + 40
    assert [line for line in c.said if "shard 2 is missing" in line and "trying again" in line]
    assert c.exchange.missing.waited_seconds is None


def test_a_later_anchor_leads_past_it_after_two_minutes(fleet: list[Replica]):
    a, _, c = fleet
    lose(a, "b", 2)
    a.write_anchor(3)
    settle(4, a, [a], [a])
    clock = meanwhile(c, {})
    with pytest.raises(LedPast, match=r"round 2 counts .* gone; the anchor of round 3 leads past"):
        catches_up(c, 3)
    assert clock.now > RETRY_SECONDS


def test_it_waits_for_an_anchor_while_a_live_member_holds_a_later_model(fleet: list[Replica]):
    a, b, c = fleet
    lose(a, "b", 2)
    b.beat(holds=1)
    a.beat(holds=3)
    heard = list[bool]()

    def anchor() -> None:
        heard.append(c.exchange.missing.waited_seconds is not None)
        assert c.exchange.missing.awaiting == "a payload of round 2"
        a.write_anchor(3)

    def confirm() -> None:
        settle(4, a, [a], [a])

    clock = meanwhile(c, {3600.0: anchor, 4000.0: confirm})
    with pytest.raises(LedPast, match="the anchor of round 3 leads past"):
        catches_up(c, 3)
    assert clock.now >= 4000.0
    assert heard == [True]
    assert c.exchange.missing.awaiting == ""


@pytest.mark.parametrize("last", ["none", "behind", "gone", "silent"])
def test_where_nobody_can_help_it_stops_with_one_line_that_names_what_can_be_had(
    fleet: list[Replica], monkeypatch: pytest.MonkeyPatch, last: str
):
    a, _, c = fleet
    lose(a, "b", 2)
    if last != "none":
        a.beat("left" if last == "gone" else "training", holds=1 if last == "behind" else 3)
    if last == "silent":
        now = a.ledger.store.now("members/a/clock")
        monkeypatch.setattr(type(c.ledger.store), "now", lambda store, key="": now + 3600)
    clock = meanwhile(c, {})
    with pytest.raises(RunStopped) as stop:
        catches_up(c, 3)
    assert "isthmus ledger rebuild URL --round 1 --to FOLDER`, and a new run whose model.start" in str(
        stop.value
    )
    assert RETRY_SECONDS < clock.now < RETRY_SECONDS + 60


def test_who_waits_can_be_asked_to_leave(fleet: list[Replica]):
    class Leave:
        wanted = False

        def asked(self) -> int:
            return int(self.wanted)

        def here(self) -> bool:
            return self.wanted

    a, _, c = fleet
    lose(a, "b", 1)
    c.exchange.patience.leave = leave = Leave()
    meanwhile(c, {5.0: lambda: setattr(leave, "wanted", True)})
    with pytest.raises(LeftWaiting):
        catches_up(c, 1)
