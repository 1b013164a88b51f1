"""Scores in a run: what a closer finds out stands in the manifest, and newcomers pass before they count."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from little import RECIPE, Replica, closes, give
from little import hasty as hasty
from owned import MORE, Owned, settled

from isthmus.cli.main import main
from isthmus.cli.members import gather, table
from isthmus.protocol.chain import manifest_key
from isthmus.protocol.ledger import Manifest, parse_run
from isthmus.protocol.replay import Replay

pytestmark = pytest.mark.usefixtures("hasty")
SCORED = MORE.replace("batches = 0", "batches = 1\nsample = 9\nprobation = 2")


class Judge:
    """A closer's scores: -0.1 unless the test says otherwise; it notes whom it was asked about."""

    def __init__(self, closer: Replica, **given: float | Exception) -> None:
        self.given, self.asked, self.draws = given, list[str](), set[bytes]()
        closer.exchange.closer.verdicts.score = self

    def __call__(self, name: str, round_number: int, draw: bytes, shards: Mapping[int, bytes]) -> float:
        self.asked.append(name)
        self.draws.add(draw)
        assert shards
        found = self.given.get(name, -0.1)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def owned(folder_url: str, tmp_path: Path) -> Owned:
    return Owned(folder_url, tmp_path, SCORED, closers=["a"])


def listed(manifest: Manifest) -> list[str]:
    return [entry.replica for entry in manifest.entries]


def admitted(owned: Owned, a: Replica, *others: Replica) -> Replica:
    """d, with the rounds 1 and 2 settled without it."""
    settled(1, a, a, *others)
    owned.ask("d", owned.invite("d"))
    settled(2, a, a, *others)
    return owned.comes("d", 2)


def test_who_does_harm_is_refused_and_the_manifest_says_all_scores(any_store_url: str, tmp_path: Path):
    owned = Owned(any_store_url, tmp_path, SCORED, closers=["a"])
    a, b, c = owned.replicas()
    judge = Judge(a, b=0.5)
    settled(1, a, a, b, c)
    manifest = owned.ledger().manifest(1)
    assert listed(manifest) == ["a", "c"]
    assert manifest.refused == (("b", "it makes the held-out loss worse by 0.5, over 0.03"),)
    assert manifest.scores == (("a", -0.1), ("b", 0.5), ("c", -0.1))
    assert sorted(judge.asked) == ["a", "b", "c"], "each once"
    assert manifest.probation == {"b": 0}


def test_who_did_harm_counts_again_after_it_has_passed(owned: Owned):
    a, b, c = owned.replicas()
    judge = Judge(a, b=0.5)
    settled(1, a, a, b, c)
    judge.given.clear()
    for t in (2, 3, 4):
        settled(t, a, a, b, c)
    found = [owned.ledger().manifest(t) for t in (2, 3, 4)]
    assert [listed(manifest) for manifest in found] == [["a", "c"], ["a", "c"], ["a", "b", "c"]]
    assert [manifest.probation for manifest in found] == [{"b": 1}, {}, {}]
    assert dict(found[0].refused) == {"b": "on probation: passed 1 of 2 rounds"}


def test_a_newcomer_is_judged_in_each_round_and_counts_after_it_has_passed(owned: Owned):
    a, b, c = owned.replicas()
    judge = Judge(a)
    d = admitted(owned, a, b, c)
    assert owned.ledger().manifest(2).probation == {"d": 0}
    judge.asked.clear()
    for t in (3, 4, 5):
        settled(t, a, a, b, c, d)
    found = [owned.ledger().manifest(t) for t in (3, 4, 5)]
    assert [listed(m) for m in found] == [["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    assert [m.probation for m in found] == [{"d": 1}, {}, {}]
    assert judge.asked.count("d") == 3, "and sampled afterwards, as everybody"
    assert all("d" in manifest.members for manifest in found), "it is awaited all the while"
    replay = Replay(owned.ledger())
    while replay.step():
        pass
    assert (replay.round, replay.digest()) == (5, d.exchange.anchor)


def test_who_has_passed_is_told_as_on_probation_and_not_as_refused(owned: Owned, capsys):
    a, b, c = owned.replicas()
    Judge(a, b=0.5)
    d = admitted(owned, a, b, c)
    settled(3, a, a, b, c, d)
    passed = "d is on probation: passed 1 of 2 rounds"
    harm = "refused b: it makes the held-out loss worse by 0.5"
    assert {f"round 3: {passed}", f"round 3: {harm}, over 0.03"} <= set(a.said)
    for words, before in ((["status"], "round 3: "), (["ledger", "show"], "       ")):
        assert main([*words, owned.url]) == 0
        said = capsys.readouterr().out
        assert before + passed + "\n" in said
        assert before + harm in said
        assert "refused d" not in said


def test_a_newcomer_that_does_harm_never_counts(owned: Owned):
    a, b, c = owned.replicas()
    Judge(a, d=0.5)
    d = admitted(owned, a, b, c)
    for t in (3, 4, 5, 6):
        settled(t, a, a, b, c, d)
        assert listed(owned.ledger().manifest(t)) == ["a", "b", "c"]
        assert owned.ledger().manifest(t).probation == {"d": 0}


def test_a_closer_that_cannot_score_lets_no_newcomer_pass_and_holds_up_nobody_else(owned: Owned):
    a, b, c = owned.replicas()
    d = admitted(owned, a, b, c)
    settled(3, a, a, b, c, d)
    manifest = owned.ledger().manifest(3)
    assert listed(manifest) == ["a", "b", "c"]
    assert dict(manifest.refused) == {"d": "on probation: the closer of this round cannot score it"}
    assert (manifest.scores, manifest.probation) == ((), {"d": 0})


def test_where_no_closer_has_the_whole_model_there_is_no_probation(folder_url: str, tmp_path: Path):
    owned = Owned(folder_url, tmp_path, SCORED, closers=["c"])  # of two stages
    a, b, c = owned.replicas()
    settled(1, c, a, b, c)
    owned.ask("d", owned.invite("d"))
    settled(2, c, a, b, c)
    d = owned.comes("d", 2)
    settled(3, c, a, b, c, d)
    assert listed(owned.ledger().manifest(3)) == ["a", "b", "c", "d"]


def test_a_fault_of_the_device_is_one_line_and_the_round_closes_without_scores(owned: Owned):
    a, b, c = owned.replicas()
    fault = RuntimeError("CUDA out of memory\x1b[2J")
    judge = Judge(a, a=fault, b=fault, c=fault)
    settled(1, a, a, b, c)
    settled(2, a, a, b, c)
    assert listed(owned.ledger().manifest(2)) == ["a", "b", "c"]
    words = [said for said in a.said if "not scored here" in said]
    assert len(words) == 1
    assert "\x1b" not in words[0]
    assert len(judge.asked) == 1


def test_a_closer_that_starts_again_draws_the_same_and_another_closer_does_not(
    folder_url: str, tmp_path: Path
):
    owned = Owned(folder_url, tmp_path, SCORED.replace("sample = 9", "sample = 1"), closers=["a", "b"])
    draws: list[set[bytes]] = []
    for name in ("a", "a", "b"):
        replica = owned.replica(name)
        judge = Judge(replica)
        verdicts = replica.exchange.closer.verdicts
        verdicts.begin(1)
        draws.append({verdicts.scores.score.args[0]})  # pyright: ignore[reportFunctionMemberAccess]
        assert len(verdicts.scores.sample) == 1
        assert judge.asked == []
    assert draws[0] == draws[1] != draws[2]


def test_a_run_that_was_made_before_goes_on_without_scores(owned: Owned):
    data = json.loads(owned.store.get("run.json", max_bytes=1 << 20))
    assert parse_run(json.dumps(data).encode()).scores
    del data["scores"]
    owned.store.put("run.json", json.dumps(data).encode())
    for name in ("a", "b", "c"):  # their keys were made for it
        path = owned.keys / f"{name}.key"
        path.write_text(path.read_text().splitlines()[0] + "\n")
    a, b, c = owned.replicas()
    judge = Judge(a, b=0.5)
    settled(1, a, a, b, c)
    assert listed(owned.ledger().manifest(1)) == ["a", "b", "c"]
    assert judge.asked == []


def test_a_manifest_of_a_version_before_has_nobody_on_probation(owned: Owned):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    manifest = json.loads(owned.store.get(manifest_key(1), max_bytes=1 << 20))["body"]
    del manifest["scores"], manifest["probation"]
    found = Manifest.from_dict(manifest, "a", "")
    assert (found.scores, found.probation) == ((), {})


def test_where_half_do_harm_the_round_closes_and_the_log_says_so(owned: Owned):
    a, b, c = owned.replicas()
    Judge(a, b=0.5, c=0.5)
    settled(1, a, a, b, c)
    assert listed(owned.ledger().manifest(1)) == ["a", "b", "c"]
    assert any("2 of 3: nobody is refused" in said for said in a.said)


def test_only_the_sample_is_scored(folder_url: str, tmp_path: Path):
    owned = Owned(folder_url, tmp_path, SCORED.replace("sample = 9", "sample = 1"), closers=["a"])
    a, b, c = owned.replicas()
    judge = Judge(a)
    for t in range(1, 7):
        settled(t, a, a, b, c)
    assert len(judge.asked) == 6
    assert len(set(judge.asked)) > 1
    assert len(judge.draws) == 6


def test_nothing_is_scored_where_the_recipe_says_so(folder_url: str, tmp_path: Path):
    owned = Owned(folder_url, tmp_path, RECIPE, closers=["a"])
    a, b, c = owned.replicas()
    judge = Judge(a, b=0.5)
    give(1, a, b, c)
    assert closes(a, 1)
    assert judge.asked == []


def test_members_status_and_ledger_show_tell_what_each_replica_is_worth(
    owned: Owned, capsys: pytest.CaptureFixture[str]
):
    a, b, c = owned.replicas()
    judge = Judge(a, b=-0.3)
    settled(1, a, a, b, c)
    judge.given["b"] = 0.5
    settled(2, a, a, b, c)
    lines = {line.replica: line for line in gather(owned.ledger()).members}
    assert (lines["b"].scored, lines["b"].score) == (2, pytest.approx(0.1))
    assert (lines["b"].refused, lines["b"].probation, lines["a"].probation) == (1, True, False)
    assert "+0.1000  on probation" in table(gather(owned.ledger()))
    assert main(["ledger", "show", owned.url]) == 0
    assert "scores  a -0.1000  b +0.5000  c -0.1000" in capsys.readouterr().out
    assert main(["status", owned.url]) == 0
    assert "round 2 scored a -0.1000, b +0.5000, c -0.1000 (nats" in capsys.readouterr().out
