"""Payloads that are lost for good: the run goes on by a signed decision, and only by one."""

import json
import re
from pathlib import Path

import pytest
from little import RECIPE, Little, Replica, equal, settle
from little import hasty as hasty
from test_rescue import lose_of, meanwhile

from isthmus.cli.main import main
from isthmus.errors import ConfigError, Diverged, RunError
from isthmus.protocol.audit import audit
from isthmus.protocol.damage import find_damage
from isthmus.protocol.heartbeat import LOST
from isthmus.protocol.repairs import Decision, repair_key
from isthmus.protocol.replay import MissingPayloads, Replay
from isthmus.protocol.trust import sha256

pytestmark = pytest.mark.usefixtures("hasty")
NO_ANCHORS = RECIPE.replace("anchor_every = 2", "anchor_every = 100")


def later() -> float:
    """Long after the last heartbeat."""
    return 1e11


class Lost:
    """A run of three settled rounds, of which the second counts a payload that nobody has any more."""

    def __init__(self, url: str, folder: Path, recipe: str = NO_ANCHORS, closers: str = "abc") -> None:
        self.run = Little(url, folder, recipe, closers=list(closers))
        self.before = self.run.replicas()
        a, b, c = self.before
        settle(1, a, [a, b, c])
        self.whole = {name: tensor.clone() for name, tensor in a.anchor.items()}  # theta^(1)
        settle(2, a, [a, b, c])
        settle(3, b, [a, b, c])
        shard = a.ledger.manifest(2).entry("b").shards[2]
        self.payload = a.ledger.get_shard("b", 2, shard)
        lose_of(a, "b", 2)

    def decide(self) -> Decision:
        ledger = self.run.ledger("a")
        decision = find_damage(ledger, clock=later).decision
        assert ledger.repairs.decide(decision)
        return decision

    def restarted(self, name: str) -> Replica:
        """It lost its private state, and comes from theta^(0)."""
        found = self.run.replica(name)
        found.apply(1, found.exchange.closed(1))
        return found


def catch_up(replica: Replica, first: int, last: int) -> None:
    for t in range(first, last + 1):
        counted = replica.exchange.closed(t)
        assert counted is not None
        if counted:
            replica.apply(t, counted)
        else:
            replica.hold(t)


def test_a_run_goes_on_from_the_last_whole_model_by_a_signed_decision(any_store_url: str, tmp_path: Path):
    lost = Lost(any_store_url, tmp_path)
    with pytest.raises(MissingPayloads, match="isthmus ledger repair"):
        audit(lost.run.ledger())
    decision = lost.decide()
    assert (decision.first, decision.last) == (2, 3)
    fresh = [lost.restarted(name) for name in lost.run.names]
    for each in fresh:
        catch_up(each, 2, 3)
        assert equal(each.anchor, lost.whole)
    settle(4, fresh[0], fresh)
    settle(5, fresh[0], fresh)
    assert len({each.exchange.anchor for each in fresh}) == 1

    replay = Replay(lost.run.ledger())
    while replay.step():
        pass
    assert replay.round == 5
    assert equal(replay.anchor, fresh[0].anchor)
    joined = lost.restarted("c")
    catch_up(joined, 2, 5)
    assert equal(joined.anchor, fresh[0].anchor)


def test_who_waits_for_what_is_lost_hears_of_the_decision_and_goes_on(folder_url: str, tmp_path: Path):
    lost = Lost(folder_url, tmp_path)
    waiting = lost.restarted("c")
    waiting.feedback = {name: tensor * 0 for name, tensor in waiting.feedback.items()}
    meanwhile(waiting, lost.decide)
    catch_up(waiting, 2, 3)
    assert equal(waiting.anchor, lost.whole)
    assert any(
        "rounds 2 to 3 are void by the decision of a (of b in round 2, shard 2 is missing)" in line
        for line in waiting.said
    )
    assert waiting.ledger.store.list("wanted") == []


def test_an_update_to_a_round_that_is_void_does_not_count(folder_url: str, tmp_path: Path):
    """So that it returns to the error feedback of its author."""
    lost = Lost(folder_url, tmp_path)
    c = lost.run.replica("c")
    mine = c.update()
    manifest = c.ledger.manifest(1)
    assert c.exchange.counts_in(manifest, mine)
    lost.decide()
    c.ledger.repairs.refresh()
    for t, counts in ((1, True), (2, False)):
        manifest = c.ledger.manifest(t)
        shards = {shard.index: shard for shard in manifest.entry("c").shards}
        data = {i: c.ledger.get_shard("c", t, shard) for i, shard in shards.items()}
        assert {i: sha256(each) for i, each in data.items()} == {i: each.digest for i, each in shards.items()}
        sent = type(mine)("c", data)
        assert c.exchange.counts_in(manifest, sent) is counts


def test_who_holds_the_model_of_void_rounds_diverges_and_joins_anew(folder_url: str, tmp_path: Path):
    lost = Lost(folder_url, tmp_path)
    b = lost.before[1]
    b.hold(3)
    lost.decide()
    b.hold(3)  # it runs on: only a look at the bucket tells
    b.ledger.repairs.refresh()
    with pytest.raises(Diverged, match="rounds 2 to 3 are void by the decision of a"):
        b.hold(3)


def test_a_reader_that_has_applied_what_is_void_since_begins_again(folder_url: str, tmp_path: Path):
    """The recorder of `train` follows a run: it may have read the payloads before they went."""
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    settle(1, a, [a, b, c])
    settle(2, a, [a, b, c])
    follows, said = run.ledger(), list[str]()
    replay = Replay(follows, log=said.append)
    while replay.step():
        pass
    assert replay.round == 2
    lose_of(a, "b", 2)
    ledger = run.ledger("b")
    assert ledger.repairs.decide(find_damage(ledger, clock=later).decision)
    fresh = run.replicas()
    for each in fresh:
        catch_up(each, 1, 2)
    settle(3, fresh[1], fresh)
    while replay.step():
        pass
    assert (replay.round, replay.digest()) == (3, fresh[0].exchange.anchor)
    assert any("round 2 is void by the decision of b" in line for line in said)


# Whether a decision holds


def forged(lost: Lost, signer: str = "a", **changed: object) -> None:
    """A decision that `find_damage` would not have made, put where readers look."""
    ledger = lost.run.ledger(signer)
    first, last = int(str(changed.get("first", 2))), int(str(changed.get("last", 3)))
    begun, ended = ledger.manifest(first), ledger.manifest(last)
    body = {
        "first": first,
        "last": last,
        "digest": begun.anchor,
        "manifest": ended.digest,
        "reason": "why not",
    }
    sealed = ledger.signer.seal("repair", ledger.run.run_id, body | changed)
    ledger.store.put(repair_key(last), sealed)


@pytest.mark.parametrize(
    ("signer", "changed", "why"),
    [
        ("a", {"first": 1}, "every payload of round 1 can be read"),
        ("a", {"first": 3}, "every payload of round 3 can be read"),
        ("a", {"digest": "f" * 64}, "does not name the anchor that round 2 began from"),
        ("a", {"manifest": "f" * 64}, "another history"),
        ("a", {"first": 2, "last": 2}, "too late: round 3 began from another anchor"),
        ("a", {"reason": "x" * 301}, "reason"),
        ("c", {}, "c may not decide it"),
    ],
)
def test_a_decision_that_is_not_so_is_none(
    folder_url: str, tmp_path: Path, signer: str, changed: dict[str, object], why: str
):
    lost = Lost(folder_url, tmp_path, closers="ab")
    forged(lost, signer, **changed)
    ledger = lost.run.ledger()
    assert ledger.repairs.decisions() == []
    assert any(why in reason for reason in ledger.repairs.ignored.values()), ledger.repairs.ignored
    assert not any(map(ledger.repairs.is_void, range(1, 4)))


def test_a_decision_comes_too_late_where_somebody_still_had_the_model(folder_url: str, tmp_path: Path):
    lost = Lost(folder_url, tmp_path)
    believer = lost.restarted("c")
    lost.decide()
    catch_up(believer, 2, 3)
    a, b, _ = lost.before
    settle(4, a, [a, b])  # from theta^(3), which they hold
    assert lost.run.ledger().repairs.decisions() == []
    believer.exchange.from_bucket = True
    with pytest.raises(Diverged):
        believer.exchange.closed(4)
    with pytest.raises(MissingPayloads):
        audit(lost.run.ledger())


def test_a_payload_that_comes_back_undoes_a_decision_until_most_have_gone_on_from_it(
    folder_url: str, tmp_path: Path
):
    lost = Lost(folder_url, tmp_path)
    b = lost.run.ledger("b")
    lost.decide()
    assert lost.run.ledger().repairs.is_void(2)
    shard = b.put_shard(2, 2, lost.payload)
    assert not lost.run.ledger().repairs.is_void(2)
    assert audit(lost.run.ledger()).digest == lost.before[0].exchange.anchor
    b.store.delete(b.shard_key("b", 2, shard))
    fresh = [lost.restarted(name) for name in lost.run.names]
    for each in fresh:
        catch_up(each, 2, 3)
    settle(4, fresh[0], fresh)
    b.put_shard(2, 2, lost.payload)
    assert lost.run.ledger().repairs.is_void(2)
    assert audit(lost.run.ledger()).digest == fresh[0].exchange.anchor


def test_where_few_went_on_from_it_each_reader_looks_for_itself(folder_url: str, tmp_path: Path):
    """A closer alone cannot have rounds voided whose payloads are there, by closing the next round alone."""
    run = Little(folder_url, tmp_path, NO_ANCHORS)
    a, b, c = run.replicas()
    for t in (1, 2):
        settle(t, a, [a, b, c])
    bad = run.replica("a")
    catch_up(bad, 1, 1)
    ledger = run.ledger("a")
    begun, ended = ledger.manifest(2), ledger.manifest(2)
    ledger.repairs.decide(
        Decision(first=2, last=2, digest=begun.anchor, manifest=ended.digest, reason="because", closer="a")
    )
    settle(3, bad, [bad], [])  # alone, from theta^(1)
    reader = run.ledger()
    assert not reader.repairs.is_void(2)
    with pytest.raises(RunError, match="manifest 3 of this run, by closer a, is not to be trusted"):
        audit(reader)


def test_void_anchors_are_not_taken(folder_url: str, tmp_path: Path):
    lost = Lost(folder_url, tmp_path)
    b = lost.before[1]
    files = [
        b.ledger.put_anchor_shard(3, i, {n: b.anchor[n] for n in names})
        for i, names in enumerate(b.ledger.shards)
    ]
    b.ledger.complete_anchor(3, b.exchange.anchor, files)  # nobody but its writer speaks for it
    lost.decide()
    with pytest.raises(RunError, match="void by the decision of a"):
        lost.run.ledger().read_anchor(3, [0])
    found = audit(lost.run.ledger())
    assert (found.anchors, found.updates) == ([], 3)  # of round 1
    assert found.void == ["rounds 2 to 3 are void by the decision of a (of b in round 2, shard 2 is missing)"]


# The command


def command(lost: Lost, *more: str, replica: str = "a") -> list[str]:
    key = str(lost.run.keys / f"{replica}.key")
    return ["ledger", "repair", lost.run.url, "--replica", replica, "--key", key, *more]


def test_repair_says_what_is_lost_and_writes_only_with_yes(
    any_store_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lost = Lost(any_store_url, tmp_path)
    store = lost.run.ledger().store
    before = store.list()
    assert main(command(lost)) == 0
    said = capsys.readouterr().out
    assert "round 2 counts b, but shard 2 is missing" in said
    assert "rounds 2 to 3 void, and round 4 starts from theta^(1)" in said
    assert "nothing is written" in said
    assert store.list() == before
    assert main(command(lost, "--yes", "--json", "--reason", "a disk died")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["first"], facts["last"], facts["reason"], facts["written"]) == (2, 3, "a disk died", True)
    assert store.list("repairs") == ["repairs/000003.json"]
    assert main(command(lost, "--yes")) == 2  # it is done
    assert "nothing to decide" in capsys.readouterr().err
    for words in (["ledger", "verify", lost.run.url], ["ledger", "show", lost.run.url]):
        assert main(words) == 0
        assert re.search(
            r"rounds 2 to 3 are void by the decision of a \(a disk died\)", capsys.readouterr().out
        )


def test_repair_refuses_where_nothing_is_to_be_decided(
    folder_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def refused(lost: Lost, match: str, replica: str = "a") -> None:
        assert main(command(lost, "--yes", replica=replica)) == 2
        assert re.search(match, capsys.readouterr().err)
        assert lost.run.ledger().store.list("repairs") == []

    lost = Lost(folder_url, tmp_path)
    _, b, c = lost.before
    b.beat(round=4)
    refused(lost, r"b is alive \(training, round 4\) and may hold what is lost of round 2, or a later model")
    b.beat(state="catching up", round=1, awaiting=f"{LOST}payloads of round 2; see")
    c.beat(state="left", round=4)
    find_damage(lost.run.ledger("a"))  # nobody is in the way
    b.ledger.put_shard(2, 2, lost.payload)
    refused(lost, r"theta\^\(3\) follows from the bucket")
    led_past = Lost(f"{folder_url}-2", tmp_path / "2", RECIPE)
    assert led_past.run.ledger().believed_anchors(1) == [2]
    refused(led_past, r"there is nothing to decide")


def test_repair_refuses_where_a_later_anchor_leads_past(folder_url: str, tmp_path: Path):
    lost = Lost(folder_url, tmp_path)
    replicas = lost.before
    settle(4, replicas[0], replicas)
    replicas[0].write_anchor(4)
    settle(5, replicas[0], replicas)
    with pytest.raises(ConfigError, match=r"theta\^\(5\) follows from the bucket, by its anchors"):
        find_damage(lost.run.ledger("a"), clock=later)
    forged(lost, last=5)
    assert lost.run.ledger().repairs.decisions() == []


def test_only_a_closer_decides(folder_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lost = Lost(folder_url, tmp_path, closers="ab")
    assert main(command(lost, replica="c")) == 2
    assert "c may not decide this: it is no closer of the run; a, b may" in capsys.readouterr().err
