"""The owner changes who belongs to a run, at the edge of a round: admitted, revoked; and longer runs."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from little import RECIPE, Replica, apply, at_once, closes, give
from little import hasty as hasty
from msgspec import to_builtins
from owned import MORE, Owned, settled

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, RunStopped
from isthmus.layout.learning_rate import learning_rate
from isthmus.protocol.closer import Closer
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.manifests import manifest_key
from isthmus.protocol.membership import MOST_BYTES, Changes, advance, document, extended, membership_key
from isthmus.protocol.replay import Replay
from isthmus.protocol.trust import Refused, Signer, new_secret

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture
def owned(folder_url: str, tmp_path: Path) -> Owned:
    return Owned(folder_url, tmp_path, closers=["a"])


# Admission


def test_who_is_invited_comes_in_at_the_edge_of_a_round_and_counts_in_the_next(any_store_url, tmp_path):
    owned = Owned(any_store_url, tmp_path, closers=["a"])
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.invite("d")
    settled(2, a, a, b, c)
    manifest = owned.ledger().manifest(2)
    assert (manifest.epoch, manifest.next_epoch) == (0, 1)
    assert (owned.members(2), owned.members(3)) == (["a", "b", "c"], ["a", "b", "c", "d"])
    d = owned.comes("d", 2)
    settled(3, a, a, b, c, d)
    assert [entry.replica for entry in owned.ledger().manifest(3).entries] == ["a", "b", "c", "d"]
    assert len({each.exchange.anchor for each in (a, b, c, d)}) == 1
    assert a.ledger.run.keys["d"] == owned.own["d"].public_key


def test_before_it_has_a_share_a_newcomer_does_not_count_and_is_not_awaited(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.invite("d", comes=False)
    settled(2, a, a, b, c)
    manifest = owned.ledger().manifest(2)
    assert manifest.next_epoch == 1
    assert "d" not in {*manifest.members, *manifest.dealt_in}
    give(3, a, b, c)
    d = owned.comes("d", 2)
    give(3, d)
    assert closes(a, 3)
    manifest = owned.ledger().manifest(3)
    assert dict(manifest.refused) == {"d": "it had no share of this round's data"}
    assert "d" in manifest.dealt_in


def test_a_reader_that_begins_in_the_middle_knows_who_belonged_to_it(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.invite("d")
    settled(2, a, a, b, c)
    d = owned.comes("d", 2)
    for t in (3, 4):
        settled(t, a, a, b, c, d)
    late = owned.ledger()
    assert late.manifest(4).entry("d")
    assert late.run.keys.keys() == {"a", "b", "c", "d"}
    replay = Replay(owned.ledger())
    while replay.step():
        pass
    assert (replay.round, replay.digest()) == (4, a.exchange.anchor)


def test_a_newcomer_may_be_of_a_kind_that_the_recipe_lacks(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    table = {"kind": "pipelined", "stages": 2, "compression": "1/4", "wire": "int8", "link": {"mbps": 40.0}}
    owned.invite("attic", table=table)
    settled(2, a, a, b, c)
    config = owned.epoch.run.recipe.fleet()[-1].config
    assert (config.name, config.stages, config.compression, config.wire) == ("attic", 2, "1/4", "int8")
    assert config.link.mbps == 40


def test_a_fleet_of_full_replicas_has_room_for_stages_where_init_made_it(tmp_path):
    full = MORE.split("[[replicas]]")[0] + '[[replicas]]\nname = "a"\n'
    stages = {"kind": "pipelined", "stages": 2}
    tight = Owned(str(tmp_path / "tight"), tmp_path / "1", full)
    (a,) = tight.replicas()
    with pytest.raises(ConfigError, match="the updates of this run are not cut for that"):
        tight.invite("d", table=stages)
    assert tight.epoch.number == 0
    wide = Owned(str(tmp_path / "wide"), tmp_path / "2", full, room=[2])
    (a,) = wide.replicas()
    assert len(a.ledger.shards) == 3
    wide.invite("d", table=stages)
    settled(1, a, a)
    d = wide.comes("d", 1)
    settled(2, a, a, d)
    assert [entry.replica for entry in wide.ledger().manifest(2).entries] == ["a", "d"]


def test_a_newcomer_may_close_if_the_owner_says_so(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.invite("d", closes=True)
    settled(2, a, a, b, c)
    d = owned.comes("d", 2)
    d.exchange.closer = Closer(d.ledger, d.exchange.reader, d.said.append)
    assert d.exchange.closer.may_close(3)
    assert not d.exchange.closer.may_close(2)


def test_a_round_asks_one_thing_more_of_the_store_if_nothing_changes(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    before = dict(a.ledger.store.requests)
    a.ledger.membership.look()
    after = a.ledger.store.requests
    assert {verb: n - before[verb] for verb, n in after.items() if n != before[verb]} == {"get": 1}


# Revocation


def test_who_is_revoked_counts_no_more_from_the_next_round_on(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.order(revoked=["b"])
    settled(2, a, a, b, c)  # it had begun
    manifest = owned.ledger().manifest(2)
    assert manifest.entry("b")
    assert "b" not in manifest.members
    give(3, a, b, c)
    assert closes(a, 3)
    manifest = owned.ledger().manifest(3)
    assert [entry.replica for entry in manifest.entries] == ["a", "c"]
    assert not manifest.refused  # nobody looks at what it sends
    assert owned.members(3) == ["a", "c"]


def test_a_revoked_closer_cannot_close(folder_url, tmp_path):
    owned = Owned(folder_url, tmp_path, closers=["a", "b"])
    a, b, c = owned.replicas()
    settled(1, b, a, b, c)
    owned.order(revoked=["b"])
    settled(2, a, a, b, c)
    give(3, a, c)
    assert not closes(b, 3)
    forged = b.ledger.signer.seal("manifest", owned.run.run_id, {"round": 3, "epoch": 1, "next_epoch": 1})
    owned.store.put(manifest_key(3), forged)
    with pytest.raises(RunStopped, match=r"manifest 3 .* signed by a stranger"):
        owned.ledger().manifest(3)


def test_the_last_closer_and_the_last_replica_stay(owned):
    with pytest.raises(ConfigError, match="closers are not replicas of the run"):
        owned.order(revoked=["a"])
    owned.order(closers=["b"])
    owned.order(revoked=["a", "c"])
    with pytest.raises(ConfigError, match="b is the last replica"):
        owned.order(revoked=["b"])
    assert list(owned.epoch.run.keys) == ["b"]


def test_a_revoked_name_can_be_invited_again_with_another_key(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    old = owned.signer("b")
    with pytest.raises(ConfigError, match="there is a replica b already"):
        owned.invite("b")
    owned.order(revoked=["b"])
    owned.invite("b")
    settled(2, a, a, b, c)  # it had begun
    assert owned.ledger().manifest(2).next_epoch == 2
    assert owned.members(3) == ["a", "c", "b"]
    b.ledger.sign_as(old)
    give(3, a, b, c)
    assert closes(a, 3)
    assert "does not carry b's signature" in dict(owned.ledger().manifest(3).refused)["b"]


# From which round on


def test_an_epoch_that_is_written_while_a_round_closes_holds_one_round_later(owned, monkeypatch):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    create = a.ledger.create_manifest

    def late(manifest: Manifest) -> bool:
        owned.order(revoked=["b"])
        return create(manifest)

    with monkeypatch.context() as patch:
        patch.setattr(a.ledger, "create_manifest", late)
        settled(2, a, a, b, c)
    assert owned.ledger().manifest(2).next_epoch == 0
    settled(3, a, a, b, c)
    assert owned.ledger().manifest(3).entry("b")
    assert owned.members(4) == ["a", "c"]


def test_no_manifest_names_an_older_epoch_than_the_one_before_while_two_close_and_the_owner_writes(
    racing_store_url, tmp_path
):
    owned = Owned(racing_store_url, tmp_path, closers=["a", "b"])
    a, b, c = owned.replicas()
    settled(1, b, a, b, c)
    for t in range(2, 10):
        give(t, a, b, c)
        for each in (a, b, c):
            each.beat()
            if each.exchange.closer:  # both find it closable at once
                each.exchange.closer._turn = lambda round_number: 0
        order = (lambda: owned.invite("d")) if t % 2 == 0 else (lambda: owned.order(revoked=["d"]))
        won = at_once(partial(closes, a, t), partial(closes, b, t), order)
        assert won[0] != won[1]
        apply(t, a, b, c)
    manifests = list(owned.ledger().between(1, 9))
    epochs = [manifest.next_epoch for manifest in manifests]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 7  # the owner has given eight orders; the last may come too late
    assert [manifest.epoch for manifest in manifests] == [0, *epochs[:-1]]


def resealed(owned: Owned, round_number: int, **changed: Any) -> None:
    """Another manifest in the place of one, by its closer."""
    body = json.loads(owned.store.get(manifest_key(round_number), max_bytes=1 << 22))["body"] | changed
    owned.store.put(manifest_key(round_number), owned.signer("a").seal("manifest", owned.run.run_id, body))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"epoch": 0}, "closed under epoch 0, and its round is in 1"),
        ({"epoch": 2, "next_epoch": 2}, "membership document 2 is gone"),
        ({"next_epoch": 0}, "goes back from epoch 1 to 0"),
        ({"membership": "0" * 64}, "another membership document 1"),
        ({"dealt": 8}, "says that 8 batches were dealt"),
        ({"epoch": -1}, "malformed"),
        ({"next_epoch": True}, "malformed"),
    ],
)
def test_a_manifest_of_another_epoch_stops_the_run(owned, changed, says):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.order(revoked=["b"])
    settled(2, a, a, b, c)
    settled(3, a, a, c)
    assert owned.ledger().manifest(3).dealt == 8  # 3 + 3 + 2
    resealed(owned, 3, **({"dealt": 9} if changed == {"dealt": 8} else changed))
    with pytest.raises(RunStopped, match=says.replace("8 b", "9 b")):
        list(owned.ledger().between(1, 3))


def test_a_chain_that_was_replaced_is_found_by_the_manifests(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.order(revoked=["b"])
    settled(2, a, a, b, c)
    first = Ledger(owned.store, owned.run).membership.newest
    sealed = document(first, owned.owner, Changes(revoked=["c"]))
    owned.store.put(membership_key(1), sealed)
    with pytest.raises(RunStopped, match="another membership document 1 than the bucket's"):
        owned.ledger().manifest(2)


# Hostile documents


def sealed_by(owned: Owned, writer: Signer, changes: Changes = Changes(), **body: Any) -> bytes:  # noqa: B008
    """A document that nobody has checked."""
    epoch = owned.epoch
    plain = {
        "number": epoch.number + 1,
        "previous": epoch.digest,
        "admitted": [to_builtins(each) for each in changes.admitted],
        "revoked": list(changes.revoked),
        "closers": list(changes.closers),
        "rounds": changes.rounds,
    }
    return writer.seal("membership", owned.run.run_id, plain | body)


def admitting(owned: Owned, name: str = "d", **changed: Any) -> bytes:
    return sealed_by(owned, owned.owner, Changes(admitted=[owned.admitted(name, **changed)]))


def by_owner(**changes: Any) -> Callable[[Owned], bytes]:
    return lambda owned: sealed_by(owned, owned.owner, Changes(**changes))


def revoking_b(writer: str = "", **body: Any) -> Callable[[Owned], bytes]:
    """The order to revoke b, by the owner or by a replica, with some fields changed."""
    changes = Changes(revoked=["b"])
    return lambda owned: sealed_by(owned, owned.signer(writer) if writer else owned.owner, changes, **body)


HOSTILE: dict[str, tuple[Callable[[Owned], bytes], str]] = {
    "by nobody": (
        lambda owned: sealed_by(owned, Signer("@owner", new_secret()), Changes(revoked=["b"])),
        "does not carry @owner's signature",
    ),
    "by a contributor": (revoking_b("c"), "signed by a stranger"),
    "by a closer": (revoking_b("a"), "signed by a stranger"),
    "of another chain": (revoking_b(previous="0" * 64), "does not follow membership document 0"),
    "out of turn": (revoking_b(number=2), "does not follow membership document 0"),
    "of nothing": (by_owner(), "changes nothing"),
    "too long": (revoking_b(more="x" * MOST_BYTES), "at most 262144"),
    "not JSON": (lambda owned: b"\xff" * 100, "not signed"),
    "a name that is taken": (lambda owned: admitting(owned, "b"), "there is a replica b already"),
    "a key that was used": (
        lambda owned: admitting(owned, key=owned.run.keys["b"]),
        "the key of d was used before",
    ),
    "two for one name": (
        lambda owned: by_owner(admitted=[owned.admitted("d"), owned.admitted("d")])(owned),
        "there is a replica d already",
    ),
    "a kind that does not fit": (
        lambda owned: admitting(owned, table={"kind": "pipelined", "stages": 99}),
        "updates of this run are not cut for that|stages for 2 layers",
    ),
    "an odd kind": (lambda owned: admitting(owned, table={"kind": 7}), "replica.kind is"),
    "a closer who is neither": (lambda owned: admitting(owned, closes=1), "malformed: Expected .bool."),
    "one who is not there": (by_owner(revoked=["z"]), "there is no replica z"),
    "a shorter run": (by_owner(rounds=3), "not later"),
    "closers who are strangers": (by_owner(closers=["z"]), "closers are not replicas of the run"),
}


@pytest.mark.parametrize(("made", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_document_that_breaks_a_rule_is_none_and_the_owners_next_one_replaces_it(owned, made, says):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    sealed = made(owned)
    with pytest.raises(Refused, match=says):
        advance(owned.epoch, sealed)
    owned.store.put(membership_key(1), sealed)
    settled(2, a, a, b, c)
    assert owned.ledger().manifest(2).next_epoch == 0
    assert any("membership document 1" in words for words in a.said)
    owned.order(revoked=["c"])
    settled(3, a, a, b, c)
    assert owned.members(4) == ["a", "b"]


def test_a_key_is_used_once_also_after_its_replica_was_revoked(owned):
    new = owned.admitted("d")
    owned.order(admitted=[new])
    owned.order(revoked=["d"])
    with pytest.raises(ConfigError, match="the key of d was used before"):
        owned.order(admitted=[new])


# The order of the data


def places(ledger: Ledger, round_number: int) -> list[int]:
    """Every sequence of the run's order that somebody takes in a round."""
    found = []
    for member in ledger.at(round_number).recipe.fleet():
        deal = ledger.deal(round_number, member.name)
        assert deal
        assert deal.first_step == (round_number - 1) * deal.num_steps
        for h in range(deal.num_steps):
            place = deal.place(deal.first_step + h)
            found += range(place, place + deal.batch)
    return found


def test_no_batch_comes_twice_and_none_is_skipped_over_joins_and_revocations(folder_url, tmp_path):
    owned = Owned(folder_url, tmp_path, MORE.replace("inner_steps = 1", "inner_steps = 4"), closers=["a"])
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.invite("d")
    settled(2, a, a, b, c)
    d = owned.comes("d", 2)
    owned.order(revoked=["b"])
    settled(3, a, a, b, c, d)
    owned.invite("e", table={"kind": "full", "batch": 3})
    settled(4, a, a, c, d)
    settled(5, a, a, c, d)  # e is absent: its share stays unread
    e = owned.comes("e", 5)
    settled(6, a, a, c, d, e)
    ledger = owned.ledger()
    assert [len(owned.members(t)) for t in range(1, 8)] == [3, 3, 4, 3, 4, 4, 4]
    dealt = [place for t in range(1, 7) for place in places(ledger, t)]
    assert sorted(dealt) == list(range(4 * (4 * (3 + 3 + 4 + 3 + 3 + 3) + 3 + 3)))
    last = ledger.manifest(6)
    assert 4 * last.dealt + last.dealt_rest == len(dealt)
    assert [ledger.manifest(t).dealt_rest for t in (4, 5, 6)] == [0, 0, 0]  # 4 steps of 3 are 3 batches of 4


def test_a_fleet_that_does_not_change_reads_in_the_order_that_runs_always_had(owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    settled(2, a, a, b, c)
    for t in (1, 2, 3):
        for i, name in enumerate("abc"):
            deal = a.ledger.deal(t, name)
            assert deal.place(t - 1) == ((t - 1) * 3 + i) * deal.batch


# Longer runs


def test_a_finished_run_goes_on_after_it_was_extended(folder_url, tmp_path):
    owned = Owned(folder_url, tmp_path, RECIPE.replace("rounds = 6", "rounds = 2"), closers=["a"])
    a, b, c = owned.replicas()
    for t in (1, 2):
        settled(t, a, a, b, c)
    assert owned.ledger().manifest(3) is None
    owned.order(revoked=["c"])
    owned.order(rounds=4)
    for each in (a, b):
        each.ledger.membership.look()
    settled(3, a, a, b)
    settled(4, a, a, b)
    reader = owned.ledger()
    reader.membership.look()
    assert [reader.manifest(t).epoch for t in (2, 3, 4)] == [0, 2, 2]
    assert reader.last_round() == 4
    assert reader.manifest(5) is None


def test_a_longer_run_keeps_the_schedule_and_ends_at_the_final_learning_rate():
    recipe = parse_recipe(MORE, ["inner.warmup_steps=5"])
    longer = extended(recipe, 60)
    for step in range(longer.num_inner_steps):
        was = learning_rate(min(step, recipe.num_inner_steps), recipe.inner, recipe.num_inner_steps)
        assert learning_rate(step, longer.inner, longer.num_inner_steps) == was
    again = extended(longer, 90)
    assert again.inner == longer.inner


# Kills: whatever dies where, the run has one history and the change comes


class Killed(BaseException):
    """Stands for SIGKILL."""


def struck(replica: Replica, prefix: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write below `prefix` kills its writer, before it or after it."""
    store, create = replica.ledger.store, replica.ledger.store.create

    def deadly(key: str, data: bytes, **more: Any) -> bool:
        if key.startswith(prefix) and not after:
            raise Killed
        made = create(key, data, **more)
        if key.startswith(prefix):
            raise Killed
        return made

    monkeypatch.setattr(store, "create", deadly)


def admission(owned: Owned) -> None:
    owned.invite("d")


def revocation(owned: Owned) -> None:
    owned.order(revoked=["c"])


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", [admission, revocation])
def test_a_closer_killed_at_the_manifest_of_a_change_costs_nothing(
    folder_url, tmp_path, change, after, monkeypatch
):
    owned = Owned(folder_url, tmp_path, closers=["a", "b"])
    a, b, c = owned.replicas()
    settled(1, b, a, b, c)
    change(owned)
    give(2, a, b, c)
    for each in (a, b, c):
        each.beat()
    with monkeypatch.context() as patch:
        struck(a, "manifests/", after, patch)
        with pytest.raises(Killed):
            closes(a, 2)
    again = owned.comes("a", 1)  # its next start, and the other closer meanwhile
    again.beat()
    if owned.ledger().manifest(2) is None:
        patience = b.exchange.closer
        patience.next_look = patience.closable_since = -1e9
        assert closes(again, 2)
    apply(2, again, b, c)
    manifest, epoch = owned.ledger().manifest(2), owned.epoch
    assert (manifest.epoch, manifest.next_epoch, epoch.number) == (0, 1, 1)
    givers = {
        admission: lambda: [again, b, c, owned.comes("d", 2)],
        revocation: lambda: [again, b],
    }[change]()
    settled(3, b, *givers)
    assert [entry.replica for entry in owned.ledger().manifest(3).entries] == [each.name for each in givers]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_owner_killed_at_an_order_gives_it_again(owned, after, monkeypatch):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    ledger = owned.ledger()
    create = type(ledger.store).create

    def deadly(store: Any, key: str, data: bytes, **more: Any) -> bool:
        if not after:
            raise Killed
        create(store, key, data, **more)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(type(ledger.store), "create", deadly)
        with pytest.raises(Killed):
            owned.order(revoked=["c"])
    with pytest.raises(ConfigError, match="there is no replica c") if after else nullcontext():
        owned.order(revoked=["c"])
    settled(2, a, a, b, c)
    assert owned.members(3) == ["a", "b"]


def test_two_orders_at_once_are_both_heard(racing_store_url, tmp_path):
    owned = Owned(racing_store_url, tmp_path, closers=["a"])
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    at_once(lambda: owned.invite("d"), lambda: owned.order(revoked=["c"]))
    settled(2, a, a, b, c)
    assert owned.members(3) == ["a", "b", "d"]
