"""A finished run of 0.3, as its bucket was left: every later version reads it. v0.3/make.py made it once."""

import json
import tarfile
from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.protocol.access import open_ledger
from isthmus.protocol.audit import audit
from isthmus.protocol.documents import StageDocument, decode
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.norms import TOO_LARGE
from isthmus.protocol.recorded import bucket_rows
from isthmus.protocol.replay import Replay
from isthmus.protocol.trust import open_raw

HERE = Path(__file__).parent / "v0.3"
DIGESTS = json.loads((HERE / "digests.json").read_text())


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    with tarfile.open(HERE / "bucket.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return str(tmp_path / "bucket")


@pytest.fixture
def ledger(bucket: str) -> Ledger:
    return open_ledger(bucket)


def test_its_history_replays_to_the_same_bits(ledger: Ledger):
    replay = Replay(ledger)
    assert replay.digest() == DIGESTS[0]
    while replay.step():
        assert replay.digest() == DIGESTS[replay.round]
    assert replay.round == 4
    found = audit(ledger)
    assert (found.digest, found.updates, found.anchors_replayed) == (DIGESTS[4], 11, [2, 4])


def test_each_manifest_says_what_it_said(ledger: Ledger):
    rounds = [ledger.manifest(t) for t in range(1, 5)]
    assert ["".join(e.replica for e in each.entries) for each in rounds] == ["abc", "ab", "abd", "abd"]
    assert all(entry.incarnation for each in rounds for entry in each.entries)
    assert rounds[1].skips == {"c": "not_finite"}
    assert [(each.replica, each.code) for each in rounds[2].refusals] == [("c", TOO_LARGE)]
    assert [each.next_epoch for each in rounds] == [0, 1, 1, 1]
    assert [row.round for row in bucket_rows(ledger)] == [0, 1, 2, 3, 4]


def test_what_members_said_of_themselves_is_read(ledger: Ledger):
    for name in "abcd":
        heartbeat, _ = ledger.heartbeat(name)
        assert (heartbeat.state, heartbeat.holds) == ("finished", 4)
    data = ledger.store.get("members/c/stage-1.json", max_bytes=1 << 14)
    signer, body = open_raw(data, "stage", ledger.run.run_id, ledger.run.keys)
    stage = decode(body, StageDocument, "stage")
    assert (signer, stage.stage, stage.addresses) == ("c", 1, ("192.0.2.7:29500",))


@pytest.mark.parametrize("words", [["status"], ["ledger", "show"], ["ledger", "verify"]])
def test_commands_read_it(bucket: str, capsys, words: list[str]):
    assert main([*words, bucket]) == 0
    assert capsys.readouterr().out
