"""`bucket.keep_rounds`: a bucket that does not grow with the rounds, and what it still can do."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from little import RECIPE, Little, Replica, equal, settle
from little import hasty as hasty

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.protocol.audit import audit
from isthmus.protocol.replay import Replay
from isthmus.protocol.retention import Retention
from isthmus.store import Store, StoreError

pytestmark = pytest.mark.usefixtures("hasty")
ROUNDS = 30
KEEP = RECIPE.replace("rounds = 6", "rounds = 40").replace(
    "anchor_every = 2", "anchor_every = 3\nkeep_rounds = 10"
)
ONE_SHARD = KEEP.replace('kind = "pipelined"\nstages = 2\n', "")


def sweepers(replicas: list[Replica], background: bool = False) -> list[Retention]:
    return [Retention(each.ledger, each.said.append, background) for each in replicas]


def objects(store: Store, *below: str) -> int:
    return sum(len(store.list(prefix)) for prefix in below)


def test_the_number_of_objects_is_bounded_and_whoever_comes_late_joins(any_store_url: str, tmp_path: Path):
    run = Little(any_store_url, tmp_path, ONE_SHARD)
    replicas = run.replicas()
    sweeps, store, counts = sweepers(replicas), replicas[0].ledger.store, dict[int, int]()
    for t in range(1, ROUNDS + 1):
        settle(t, replicas[t % 2], replicas)
        for each in sweeps:
            each.after(t)
        counts[t] = objects(store, "payloads", "commits", "anchors")
    one_round = 3 + 3 + 2 + 1  # shards, commits, copies of the closer, and of its own by another
    assert counts[ROUNDS] <= counts[ROUNDS - 12] <= 16 * one_round
    assert len(store.list("manifests")) == ROUNDS
    anchors = replicas[0].ledger.anchor_rounds()
    assert anchors[-1] == 30

    replay = Replay(run.ledger(), ROUNDS)  # as a joiner, from an anchor
    assert replay.round == 27
    while replay.step():
        pass
    assert equal(replay.anchor, replicas[0].anchor)
    found = audit(run.ledger())
    assert found.rounds == ROUNDS
    assert found.digest == replicas[0].exchange.anchor
    assert any(
        line.startswith(f"not checked: the updates of rounds 1 to {found.begins_with}")
        for line in found.to_lines()
    )
    assert found.begins_with == anchors[0] == 18


def test_what_the_next_start_needs_stays(folder_url: str, tmp_path: Path):
    """Nothing after the second-newest anchor goes, however few rounds are to be kept."""
    run = Little(folder_url, tmp_path, ONE_SHARD.replace("anchor_every = 3", "anchor_every = 12"))
    replicas = run.replicas()
    for t in range(1, 27):
        settle(t, replicas[0], replicas)
    assert [each.sweep(26) for each in sweepers(replicas)] == [12, 12, 12]
    ledger = run.ledger()
    assert [ledger.has_payloads(t) for t in (12, 13)] == [False, True]
    assert sorted(Path(folder_url, "payloads", "b").iterdir())[0].name == "000013"  # no empty folders stay
    assert ledger.committed(12) == set()
    assert ledger.committed(13) == {"a", "b", "c"}


def test_nothing_goes_before_two_anchors_are_believed_and_whole(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, ONE_SHARD.replace("anchor_every = 3", "anchor_every = 6"))
    replicas = run.replicas()
    for t in range(1, 19):
        settle(t, replicas[0], replicas)
    sweep = sweepers(replicas)[0]
    store = replicas[0].ledger.store
    store.delete("anchors/000012/0.safetensors")  # 18 is not believed yet, and this one is not whole
    before = store.list()
    assert sweep.sweep(18) == 0
    assert store.list() == before


def test_a_bucket_that_denies_deletes_is_said_once_and_asked_no_more(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Little(folder_url, tmp_path, ONE_SHARD)
    replicas = run.replicas()
    for t in range(1, 22):
        settle(t, replicas[0], replicas)
    asked = list[str]()

    def denied(self: Store, key: str, **how: object) -> None:
        asked.append(key)
        raise StoreError(f"delete {key}: permission denied", "denied")

    monkeypatch.setattr(Store, "delete", denied)
    b = replicas[1]
    (sweep,) = sweepers([b])
    sweep.after(21)
    assert asked
    asked.clear()
    for t in range(22, 30):
        sweep.after(t)
    assert asked == []
    assert len([line for line in b.said if "old rounds stay, though bucket.keep_rounds is set" in line]) == 1


def test_no_round_waits_for_it_and_only_one_sweeps_at_a_time(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, ONE_SHARD)
    a = run.replica("a")
    sweep = Retention(a.ledger, a.said.append)
    entered, release, calls = threading.Event(), threading.Event(), list[int]()

    def slow(round_number: int) -> int:
        calls.append(round_number)
        entered.set()
        assert release.wait(60)
        return 0

    sweep.sweep = slow  # type: ignore[method-assign]
    sweep.after(3)
    assert entered.wait(60)
    for t in range(4, 20):
        sweep.after(t)
    assert calls == [3]
    release.set()
    assert sweep.worker is not None
    sweep.worker.join(60)


def test_a_round_costs_nothing_between_two_sweeps(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path, ONE_SHARD)
    replicas = run.replicas()
    for t in range(1, 13):
        settle(t, replicas[0], replicas)
    (sweep,) = sweepers(replicas[:1])
    sweep.after(10)
    before = replicas[0].ledger.store.requests
    sweep.after(11)
    assert replicas[0].ledger.store.requests == before
    off = Retention(Little(f"{folder_url}-0", tmp_path / "0").replica("a").ledger, pytest.fail, False)
    before = off.ledger.store.requests
    off.after(6)
    assert off.ledger.store.requests == before


@pytest.mark.parametrize(
    ("value", "fine"), [("0", True), ("10", True), ("9", False), ("-1", False), ("1.5", False)]
)
def test_keep_rounds_is_none_or_enough(value: str, fine: bool):
    text = KEEP.replace("keep_rounds = 10", f"keep_rounds = {value}")
    parse: Callable[[], object] = lambda: parse_recipe(text)  # noqa: E731
    if fine:
        parse()
    else:
        with pytest.raises(ConfigError, match=r"bucket\.keep_rounds"):
            parse()
