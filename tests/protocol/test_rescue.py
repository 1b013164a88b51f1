"""A payload that a round counts and nobody finds: readers wait in place and help each other to a copy."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from clocks import Clock
from little import RECIPE, Little, Replica, close, equal, settle
from little import hasty as hasty

from isthmus.protocol import rescue as rescue_module
from isthmus.protocol import shards as shards_module
from isthmus.protocol.documents import Shard
from isthmus.protocol.heartbeat import LOST
from isthmus.protocol.patience import LeftWaiting
from isthmus.protocol.presence import Presence
from isthmus.protocol.rescue import LedPast
from isthmus.store import Store

pytestmark = pytest.mark.usefixtures("hasty")
NO_ANCHORS = RECIPE.replace("anchor_every = 2", "anchor_every = 100")


def lose(store: Store, round_number: int, shard: Shard) -> None:
    """Every copy of a shard is deleted, whoever has put it."""
    lost = [
        key for key in store.list("payloads") if f"/{round_number:06d}/" in key and key.endswith(shard.digest)
    ]
    assert lost
    for key in lost:
        store.delete(key)


def lose_of(replica: Replica, name: str, round_number: int, index: int = 2) -> Shard:
    shard = replica.ledger.manifest(round_number).entry(name).shards[index]
    lose(replica.ledger.store, round_number, shard)
    return shard


def meanwhile(replica: Replica, *events: Callable[[], object]) -> list[float]:
    """While the replica waits, these happen, one in each pause; a pause more would be for ever."""
    pauses, waiting = list[float](), iter(events)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        next(waiting)()

    replica.exchange.rescue._pause = pause  # type: ignore[method-assign]
    return pauses


def test_a_lost_payload_is_had_again_from_whoever_applied_the_round(any_store_url: str, tmp_path: Path):
    run = Little(any_store_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    settle(1, a, [a, b, c], [a, b])
    a.exchange.closed(2)  # another round begins, as in the loop
    lose_of(a, "b", 1)
    awaited = list[str]()

    def a_goes_on() -> None:
        awaited.append(c.exchange.awaiting)
        assert c.exchange.rescue.waited_seconds is not None
        assert a.ledger.store.list("wanted") == ["wanted/c/0.json"]
        a.exchange.deliver(2, a.update())

    meanwhile(c, a_goes_on)
    c.apply(1, c.exchange.closed(1))
    assert c.exchange.anchor == a.exchange.anchor
    assert equal(c.anchor, a.anchor)
    assert awaited[0].startswith(LOST)
    assert "ledger repair" in awaited[0]
    assert c.exchange.awaiting == ""
    assert c.exchange.rescue.waited_seconds is None
    assert a.ledger.store.list("wanted") == []
    asked = [line for line in c.said if "round 1 counts b, but shard 2 is missing" in line]
    assert len(asked) == 1
    assert "isthmus ledger repair" in asked[0]
    assert any("shard 2 of b is lost; here is a copy of ours" in line for line in a.said)


def test_who_lost_the_payload_of_its_own_puts_it_again_from_its_disk(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    mine = b.update()
    for each, update in ((a, a.update()), (b, mine), (c, c.update())):
        each.exchange.deliver(1, update)
    close(1, a, [a, b, c])
    lose_of(a, "b", 1)
    again = run.replica("b")  # after a power cut, with what is on its disk
    again.exchange.rescue.saved = {1: mine.shards}.__getitem__
    c_waits, late = meanwhile(c, lambda: again.exchange.closed(1)), run.replica("a")
    c.apply(1, c.exchange.closed(1))
    assert len(c_waits) == 1
    late.apply(1, late.exchange.closed(1))
    assert late.exchange.anchor == c.exchange.anchor


def test_those_who_wait_help_each_other(folder_url: str, tmp_path: Path):
    """b has on its disk what c misses, and misses itself what c has: both have it after one look."""
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    theirs = {"b": b.update(), "c": c.update()}
    for each, update in ((a, a.update()), (b, theirs["b"]), (c, theirs["c"])):
        each.exchange.deliver(1, update)
    close(1, a, [a, b, c])
    lose_of(a, "b", 1)
    lose_of(a, "c", 1)
    b, c = run.replica("b"), run.replica("c")
    for each in (b, c):
        each.exchange.rescue.saved = {1: theirs[each.name].shards}.__getitem__
    meanwhile(b, lambda: c.apply(1, c.exchange.closed(1)))
    b.apply(1, b.exchange.closed(1))
    assert b.exchange.anchor == c.exchange.anchor


def test_where_nobody_has_the_bytes_any_more_a_closer_writes_an_anchor_that_leads_past(
    any_store_url: str, tmp_path: Path
):
    run = Little(any_store_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    behind = run.replica("c")
    for t in (1, 2, 3):
        settle(t, a, [a, b, c], [a, b, c])
    lose_of(a, "b", 1)

    def anchors_after(t: int) -> None:
        settle(t, a, [a, b, c], [a, b, c])
        if a.exchange.rescue.wants_anchor(t):
            a.write_anchor(t)

    meanwhile(behind, lambda: anchors_after(4), lambda: anchors_after(5))
    with pytest.raises(LedPast) as past:
        behind.exchange.closed(1)
    assert (past.value.round, past.value.anchor) == (1, 4)
    assert behind.ledger.anchor_rounds() == [4]  # one, though the request stood for two rounds
    meanwhile(behind)
    with pytest.raises(StopIteration):  # an anchor that did not help is not tried again
        behind.exchange.closed(1)


def test_who_waits_looks_less_and_less_often_and_can_be_asked_to_leave(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    settle(1, a, [a, b, c], [a, b])
    lose_of(a, "b", 1)

    class Leave:
        looks = 0

        def pending(self) -> bool:
            Leave.looks += 1
            return Leave.looks > 9

        def here(self) -> bool:
            return False

    slept = list[float]()
    c.exchange.rescue.sleep, c.exchange.rescue.leave = slept.append, Leave()
    with pytest.raises(LeftWaiting):
        c.exchange.closed(1)
    assert sum(slept) == 1 + 2 + 4 + 8 + 16 + 30 + 30 + 30 + 30 + 30
    assert max(slept) == 1.0  # so soon it hears that it should leave
    said = [line for line in c.said if "asking the others" in line]
    assert 2 <= len(said) <= 5


def test_a_round_costs_one_listing_more_where_nobody_asks(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, *_ = run.replicas()
    before = a.ledger.store.requests
    a.exchange.rescue.help()
    after = a.ledger.store.requests
    assert {verb: after[verb] - before[verb] for verb in after if after[verb] != before[verb]} == {"list": 1}


def test_odd_requests_are_none_and_help_never_fails(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    settle(1, a, [a, b, c], [a, b, c])
    store, run_id = a.ledger.store, a.ledger.run.run_id
    shard = a.ledger.manifest(1).entry("b").shards[2]

    def sealed(signer: Replica, body: Mapping[str, object]) -> bytes:
        return signer.ledger.signer.seal("wanted", run_id, body)

    good = {"round": 1, "shards": [shard.digest]}
    store.put("wanted/c/0.json", b"{}")
    store.put("wanted/c/1.json", sealed(b, good))  # another's signature
    store.put("wanted/b/0.json", sealed(b, good | {"round": 10**9}))
    store.put("wanted/b/1.json", sealed(b, {"round": 1, "shards": ["f" * 64] * 300}))
    store.put("wanted/b/2.json", bytes(1 << 17))
    store.put("wanted/x/0.json", sealed(b, good))
    Path(folder_url, "wanted", "b", "3.json").mkdir()
    kept = set(store.list("payloads"))
    a.exchange.rescue.help()
    assert set(store.list("payloads")) == kept
    assert not a.exchange.rescue.wants_anchor(1)
    store.put("wanted/c/0.json", sealed(c, {"round": 3, "shards": ["f" * 64]}))  # a round that is not settled
    a.exchange.rescue.help()
    assert not a.exchange.rescue.wants_anchor(1)
    store.put("wanted/c/0.json", sealed(c, good))
    a.exchange.rescue.help()
    assert a.ledger.kept_key("", 1, shard) in store.list("payloads")


def test_what_is_held_for_others_is_of_two_rounds_bounded_and_ours_comes_first(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    whole = 3 * sum(a.ledger.sizes)
    monkeypatch.setattr(shards_module, "HELD_BYTES", whole + max(a.ledger.sizes))
    settle(1, a, [a, b, c])
    settle(2, a, [a, b, c])
    reader = a.exchange.reader
    reader.forget()
    reader.forget()  # a second time in the same round, as the loop does
    digests = [{shard.digest for e in a.ledger.manifest(t).entries for shard in e.shards} for t in (1, 2)]
    newer, older = map(set, reader.held)
    assert newer == digests[1]
    assert len(older) == 1
    assert older < digests[0]
    assert sum(len(data) for held in reader.held for data in held.values()) <= whole + max(a.ledger.sizes)
    monkeypatch.setattr(shards_module, "HELD_BYTES", sum(a.ledger.sizes))
    settle(3, a, [a, b, c])
    reader.forget()
    assert set(reader.held[0]) == {shard.digest for shard in a.ledger.manifest(3).entry("a").shards}
    assert reader.held[1] == {}


def test_a_store_that_is_away_meanwhile_is_waited_for(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    settle(1, a, [a, b, c], [a, b])
    shard = lose_of(a, "b", 1)
    bytes_of_b = b.exchange.reader.cache["b", shard.digest]
    real = rescue_module.Rescue._missing
    faults = iter([True, True])

    def away(self: rescue_module.Rescue, manifest: object) -> object:
        if next(faults, False):
            raise rescue_module.StoreError("get: cannot reach the store", "network")
        return real(self, manifest)  # type: ignore[arg-type]

    monkeypatch.setattr(rescue_module.Rescue, "_missing", away)
    meanwhile(c, lambda: None, lambda: b.ledger.keep_shard(1, shard, bytes_of_b))
    c.apply(1, c.exchange.closed(1))
    assert c.exchange.anchor == a.exchange.anchor


def test_nobody_waits_for_who_waits_for_what_is_lost(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, _, c = run.replicas()
    for awaiting, awaited in (("", True), (f"{LOST}payloads of round 1", False), ("", True)):
        c.beat(awaiting=awaiting)
        presence = Presence(a.ledger, Clock())
        assert presence.alive("c", 2) is awaited
        assert presence.in_step_of(["c"]) == ["c"] * awaited
