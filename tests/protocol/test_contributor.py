"""A contributor gone bad, with a valid key and its own prefixes: the others go on, and lose nothing."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import obstore
import pytest
from little import RECIPE, Little, Replica, at_once, closes, give
from little import hasty as hasty

from isthmus.errors import Diverged, RunError
from isthmus.outer.exchange import Contribution
from isthmus.protocol.judge import MOST_VERDICTS
from isthmus.protocol.ledger import Manifest
from isthmus.protocol.replay import digest_from_bucket
from isthmus.protocol.trust import sha256
from isthmus.store import Store

pytestmark = pytest.mark.usefixtures("hasty")
FOUR = RECIPE + '[[replicas]]\nname = "d"\n'
Change = Callable[[Store, str, bytes], None]


def overwrite(store: Store, key: str, data: bytes) -> None:
    store.put(key, bytes(len(data)))


def delete(store: Store, key: str, data: bytes) -> None:
    store.delete(key)


def grow(store: Store, key: str, data: bytes) -> None:
    store.put(key, data + bytes(1 << 20))


def settle(round_number: int, closer: Replica, *givers: Replica) -> None:
    give(round_number, *givers)
    assert closes(closer, round_number)
    for each in givers:
        each.apply(round_number, each.exchange.closed(round_number))


def shard_keys(replica: Replica, round_number: int = 1) -> list[str]:
    return replica.ledger.store.list(f"payloads/{replica.name}/{round_number:06d}")


def change_all(replica: Replica, change: Change, round_number: int = 1) -> None:
    store = replica.ledger.store
    for key in shard_keys(replica, round_number):
        change(store, key, store.get(key, max_bytes=1 << 20))


# Payloads are immutable


def test_nothing_below_payloads_is_replaced_by_us(any_store_url: str, tmp_path: Path, monkeypatch):
    a, b, c = Little(any_store_url, tmp_path, closers=["a"]).replicas()
    written: list[str] = []
    real = Store.put
    monkeypatch.setattr(
        Store, "put", lambda self, key, *r, **m: written.append(key) or real(self, key, *r, **m)
    )
    updates = {each: each.update() for each in (a, b, c)}
    for each in (a, b, c, b):  # b once more, after a kill
        each.exchange.deliver(1, updates[each])
    assert closes(a, 1)
    assert written == ["members/a/clock"]
    assert len(b.ledger.store.list("payloads/b")) == len(b.ledger.shards)
    assert b.ledger.committed(1) == {"a", "b", "c"}


def test_one_get_for_each_shard_of_another(folder_url: str, tmp_path: Path):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    give(1, a, b, c)
    before = a.ledger.store.requests
    assert closes(a, 1)
    for each in (a, b):
        each.exchange.closed(1)
    assert a.ledger.store.requests["put"] - before["put"] == 1  # the clock
    assert a.ledger.store.bytes_received < 2 * sum(a.ledger.sizes) + 20_000


# The first commit of a round stands


def counts(manifest: Manifest, mine: Contribution) -> bool:
    """Exactly these shards?"""
    entry = manifest.entry(mine.replica)
    digests = {index: sha256(data) for index, data in mine.shards.items()}
    return entry is not None and {shard.index: shard.digest for shard in entry.shards} == digests


def test_after_a_kill_our_own_earlier_commit_is_found_and_stands(any_store_url: str, tmp_path: Path):
    run = Little(any_store_url, tmp_path, closers=["a"])
    a, b, c = run.replicas()
    give(1, a, c)
    mine = b.update()
    b.exchange.deliver(1, mine)
    first = b.ledger.get_commit("b", 1)
    again = run.replica("b")  # another incarnation, the same update from its disk
    again.exchange.deliver(1, mine)
    assert b.ledger.get_commit("b", 1) == first
    assert again.said == []
    assert closes(a, 1)
    assert counts(a.ledger.manifest(1), mine)


def test_without_private_state_the_first_update_stands_and_the_second_returns_to_the_feedback(
    folder_url: str, tmp_path: Path
):
    run = Little(folder_url, tmp_path, closers=["a"])
    a, b, c = run.replicas()
    give(1, a, c)
    first = b.update()
    b.exchange.deliver(1, first)
    again = run.replica("b")
    second = again.update(scale=0.02)
    again.exchange.deliver(1, second)
    assert "another start of this replica has committed another update" in again.said[0]
    assert closes(a, 1)
    manifest = a.ledger.manifest(1)
    assert counts(manifest, first)
    assert not counts(manifest, second)


def test_a_commit_from_an_anchor_that_we_no_longer_hold_is_replaced_and_judged_again(
    folder_url: str, tmp_path: Path
):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    give(1, a)
    right, b.exchange.edge.anchor = b.exchange.anchor, "f" * 64
    give(1, b)
    assert not closes(a, 1)
    b.exchange.edge.anchor = right
    give(1, b, c)
    assert closes(a, 1)
    assert [entry.replica for entry in a.ledger.manifest(1).entries] == ["a", "b", "c"]


def test_commits_repeated_with_new_shards_are_judged_a_few_times_and_fill_no_memory(
    folder_url: str, tmp_path: Path
):
    a, b, c, d = Little(folder_url, tmp_path, FOUR, closers=["a"]).replicas()
    give(1, a, b)
    assert not closes(a, 1)
    one = sum(a.ledger.sizes)
    received = a.ledger.store.bytes_received
    for _ in range(20):  # each is whole but for its last shard
        mine = c.update()
        for index, data in list(mine.shards.items())[:-1]:
            c.ledger.put_shard(1, index, data)
        c.ledger.store.put(c.commit_key(), c.sealed(1, c.entry(mine)))
        assert not closes(a, 1)
        assert sum(map(len, a.exchange.reader.cache.values())) <= 2 * one
    documents = 20 * 2000
    assert a.ledger.store.bytes_received - received < MOST_VERDICTS * one + documents
    give(1, d)
    assert closes(a, 1)
    assert [entry.replica for entry in a.ledger.manifest(1).entries] == ["a", "b", "d"]


def test_a_good_commit_stands_though_its_author_replaces_or_removes_it(folder_url: str, tmp_path: Path):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    first = c.update()
    give(1, a)
    c.exchange.deliver(1, first)
    assert not closes(a, 1)
    held = sum(map(len, a.exchange.reader.cache.values()))
    for _ in range(30):
        other = c.update()
        for index, data in other.shards.items():
            c.ledger.put_shard(1, index, data)
        c.ledger.store.put(c.commit_key(), c.sealed(1, c.entry(other)))
        assert not closes(a, 1)
    assert sum(map(len, a.exchange.reader.cache.values())) == held
    c.ledger.store.delete(c.commit_key())
    give(1, b)
    assert closes(a, 1)
    assert counts(a.ledger.manifest(1), first)


# One object that cannot be read is its author's fault


def plant(folder: Path, kind: str, key: str) -> None:
    path = folder / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    {
        "a loop": lambda: path.symlink_to(path.name),
        "a pipe": lambda: os.mkfifo(path),
        "a link out": lambda: path.symlink_to("/dev/zero"),
        "a folder": path.mkdir,
    }[kind]()


def thaw_later(store: Store, key: str, data: bytes) -> None:
    client = store._client(0)
    obstore.put(client, key, data, attributes={"Storage-Class": "GLACIER"}, use_multipart=False)


KINDS = ["a loop", "a pipe", "a link out", "a folder"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["shard", "commit"])
def test_an_object_that_is_no_file_is_refused_by_name_and_stops_nobody(
    folder_url: str, tmp_path: Path, kind: str, what: str
):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    give(1, a, b, c)
    plant(Path(folder_url), kind, c.commit_key() if what == "commit" else shard_keys(c)[0])
    assert at_once(lambda: closes(a, 1), timeout_seconds=20) == [True]
    manifest = b.ledger.manifest(1)
    assert [entry.replica for entry in manifest.entries] == ["a", "b"]
    assert dict(manifest.refused)["c"].startswith("the commit: " if what == "commit" else "shard 0: ")
    assert b.exchange._missing(1)
    for each in (a, b):
        each.apply(1, each.exchange.closed(1))


@pytest.mark.parametrize("what", ["shard", "commit"])
def test_an_object_that_must_be_thawed_is_refused_by_name_and_stops_nobody(
    moto_url: str, tmp_path: Path, what: str
):
    a, b, c = Little(moto_url, tmp_path, closers=["a"]).replicas()
    give(1, a, b, c)
    store, key = c.ledger.store, c.commit_key() if what == "commit" else shard_keys(c)[0]
    thaw_later(store, key, store.get(key, max_bytes=1 << 20))
    assert closes(a, 1)
    manifest = b.ledger.manifest(1)
    assert [entry.replica for entry in manifest.entries] == ["a", "b"]
    assert "InvalidObjectState" in dict(manifest.refused)["c"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_heartbeat_or_a_note_that_is_no_file_is_none(folder_url: str, tmp_path: Path, kind: str):
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    for name in ("live", "waiting"):
        plant(Path(folder_url), kind, f"members/c/{name}.json")
    give(1, a, b, c)
    assert at_once(lambda: closes(a, 1), lambda: a.ledger.heartbeat("c"), timeout_seconds=20) == [True, None]
    assert a.ledger.heartbeat("c", "waiting") is None


def test_a_closer_that_may_read_no_commit_but_its_own_settles_nothing(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else it would refuse everybody, and the run would be its own."""
    a, b, c = Little(folder_url, tmp_path, closers=["a"]).replicas()
    give(1, a, b, c)
    real = os.open

    def locked(path: Path, *rest: object, **more: object) -> int:
        if "/commits/" in str(path) and not str(path).endswith("/a.json"):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", locked)
    with pytest.raises(RunError, match="no commit of another replica can be read"):
        closes(a, 1)
    assert a.ledger.manifest(1) is None


# Who has diverged


def with_anchor(replica: Replica, anchor: str, round_number: int = 1) -> None:
    """It commits from another anchor than it holds."""
    right, replica.exchange.edge.anchor = replica.exchange.anchor, anchor
    give(round_number, replica)
    replica.exchange.edge.anchor = right


def test_two_quick_false_anchors_of_four_do_not_make_an_honest_closer_stand_aside(
    folder_url: str, tmp_path: Path
):
    a, b, c, d = Little(folder_url, tmp_path, FOUR, closers=["a"]).replicas()
    for each in (c, d):
        with_anchor(each, "f" * 64)
    assert not closes(a, 1)
    give(1, a)
    assert not closes(a, 1)
    give(1, b)
    assert closes(a, 1)
    manifest = a.ledger.manifest(1)
    assert [entry.replica for entry in manifest.entries] == ["a", "b"]
    wrong = "the update starts from another anchor than this round's"
    assert dict(manifest.refused) == {"c": wrong, "d": wrong}


def test_the_bucket_decides_between_anchors_not_the_number_of_those_who_sign_them(
    folder_url: str, tmp_path: Path
):
    """Three of four are wrong: votes would make the honest closer stand aside."""
    a, b, c, d = Little(folder_url, tmp_path, FOUR, closers=["a"]).replicas()
    settle(1, a, a, b, c, d)
    asked: list[int] = []
    a.exchange.closer.replayed = lambda t: asked.append(t) or digest_from_bucket(a.ledger, t)
    for t in (2, 3):
        for each in (b, c, d):
            with_anchor(each, "f" * 64, t)
        give(t, a)
        assert closes(a, t)
        for each in (a, b, c, d):
            each.apply(t, each.exchange.closed(t))
        assert [entry.replica for entry in a.ledger.manifest(t).entries] == ["a"]
    assert asked == [1, 2]


def test_a_closer_whose_anchor_the_bucket_does_not_give_has_diverged_even_against_one(
    folder_url: str, tmp_path: Path
):
    two = RECIPE.replace('[[replicas]]\nname = "b"\n', "")
    a, c = Little(folder_url, tmp_path, two, closers=["a"]).replicas()
    settle(1, a, a, c)
    a.exchange.closer.replayed = partial(digest_from_bucket, a.ledger)
    a.anchor["norm.weight"].add_(1e-6)
    a.hold(1)
    give(2, a, c)
    with pytest.raises(Diverged, match="replica a holds another anchor than 1 of those"):
        closes(a, 2)
    assert a.ledger.manifest(2) is None


def test_a_closer_that_cannot_replay_joins_anew_and_closes_with_what_the_bucket_gives(
    folder_url: str, tmp_path: Path
):
    """A pipelined one has no room for the whole model; each of its stages rebuilds its own tensors."""
    run = Little(folder_url, tmp_path, closers=["c"])
    a, b, c = run.replicas()
    settle(1, c, a, b, c)
    for each in (a, b):
        with_anchor(each, "f" * 64, 2)
    give(2, c)
    with pytest.raises(Diverged, match="holds another anchor than 2 of those who gave to round 2"):
        closes(c, 2)
    anew = run.replica("c")
    anew.exchange.from_bucket = True
    anew.apply(1, anew.exchange.closed(1))
    give(2, anew)
    assert closes(anew, 2)
    assert [entry.replica for entry in anew.ledger.manifest(2).entries] == ["c"]
    for each in (a, b):
        with_anchor(each, "f" * 64, 3)
    anew.apply(2, anew.exchange.closed(2))
    give(3, anew)
    with pytest.raises(Diverged):  # it has trained since
        closes(anew, 3)
