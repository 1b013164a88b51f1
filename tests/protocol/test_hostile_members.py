"""A member with a valid key, or who may only put a request into the bucket, does not stop the others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from little import RECIPE, Little, Replica, closes, give
from little import hasty as hasty
from owned import Owned, settled

from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import MOST_DEPTH, Refused, Signer, open_sealed, parse_document

pytestmark = pytest.mark.usefixtures("hasty")
FOUR = RECIPE + '[[replicas]]\nname = "d"\n'
ODD_REQUESTS = {
    "NaN": b'{"x": NaN}',
    "infinity": b'{"replica": "@invited", "x": -Infinity}',
    "a number that is too large": b'{"replica": "@invited", "x": 1e400}',
    "deep": b'{"x": ' + b"[" * 980 + b"]" * 980 + b"}",
    "deeper": b"[" * 8000,
    "an integer of thousands of digits": b'{"x": ' + b"9" * 5000 + b"}",
    "a text": b'"request"',
    "a number": b"0.5",
    "null": b"null",
    "half a character": b'{"replica": "\\ud800", "body": {}, "signature": "\\udfff"}',
    "nothing": b"",
}


@pytest.fixture
def owned(folder_url: str, tmp_path: Path) -> Owned:
    return Owned(folder_url, tmp_path, closers=["a"])


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    return at_depth(frames - 1, call) if frames else call()


@pytest.mark.parametrize("data", ODD_REQUESTS.values(), ids=ODD_REQUESTS)
def test_an_odd_request_ends_no_closer_and_others_are_admitted_beside_it(owned: Owned, data: bytes):
    a, b, c = owned.replicas()
    owned.store.put(f"requests/{'0' * 64}.json", data)
    owned.ask("d", owned.invite("d"))
    settled(1, a, a, b, c)
    assert "d" in owned.members(2)
    assert [words for words in a.said if "does not count" in words]
    assert not [words for words in a.said if not words.isprintable()]


def say_more(replica: Replica, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Its commits have fields that no schema knows."""
    seal = Signer.seal

    def sealed(self: Signer, kind: str, run_id: str, body: dict[str, Any]) -> bytes:
        odd = kind == "commit" and self.replica == replica.name
        return seal(self, kind, run_id, body | more if odd else body)

    monkeypatch.setattr(Signer, "seal", sealed)


@pytest.mark.parametrize("levels", [MOST_DEPTH, 500, 800])
def test_a_commit_is_refused_that_another_reader_of_its_manifest_could_not_read(
    owned: Owned, monkeypatch: pytest.MonkeyPatch, levels: int
):
    """How deep Python's parser goes depends on how deep its caller is."""
    a, b, c = owned.replicas()
    with monkeypatch.context() as patch:
        say_more(b, patch, x=nested(levels))
        give(1, a, b, c)
    assert closes(a, 1)
    for frames in (0, 100, 400):
        manifest = at_depth(frames, lambda: owned.ledger().manifest(1))
        assert [entry.replica for entry in manifest.entries] == ["a", "c"]
        assert dict(manifest.refused)["b"].startswith("the commit is not signed")


def test_a_commit_with_fields_that_we_do_not_know_counts(owned: Owned, monkeypatch: pytest.MonkeyPatch):
    a, b, c = owned.replicas()
    with monkeypatch.context() as patch:
        say_more(b, patch, x=nested(MOST_DEPTH - 2), y="\ud800")
        settled(1, a, a, b, c)
    assert [entry.replica for entry in owned.ledger().manifest(1).entries] == ["a", "b", "c"]


def test_a_commit_that_grows_in_the_manifest_is_refused_by_its_size_there(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
):
    a, b, c = owned.replicas()
    give(1, a, b, c)
    key = f"commits/{1:06d}/b.json"
    document = json.loads(owned.store.get(key, max_bytes=1 << 20))
    body = document["body"] | {"x": [1e15] * 1000}
    sealed = b.ledger.signer.seal("commit", owned.run.run_id, body)
    short = sealed.replace(b"1000000000000000.0", b"1e15")
    ledger: Ledger = a.ledger
    assert len(short) < ledger.commit_limit < len(sealed)
    with pytest.raises(Refused, match=f"the commit has {len(sealed)} bytes"):
        ledger.check_commit(short, "b", 1, a.exchange.anchor)


def test_a_document_is_the_same_for_every_reader_or_it_is_none():
    signer = Signer("a", bytes(32))
    keys = {"a": signer.public_key}
    good = signer.seal("heartbeat", "1", {"x": nested(MOST_DEPTH - 2)})
    deep = signer.seal("heartbeat", "1", {"x": nested(MOST_DEPTH - 1)})
    for frames in (0, 500):
        assert at_depth(frames, lambda: open_sealed(good, "heartbeat", "1", keys))[0] == "a"
        with pytest.raises(Refused, match="not a document of ours"):
            at_depth(frames, lambda: open_sealed(deep, "heartbeat", "1", keys))
    assert parse_document(b'{"x": -0.0, "y": 1e-400, "x": 1}') == {"x": 1, "y": 0.0}


def test_two_who_are_quick_and_freeze_their_commits_end_no_closer(moto_url: str, tmp_path: Path):
    """Where no commit of another can be read at all, it is asked whether our own rights are at fault: but not
    before the honest ones had their time."""
    a, b, c, d = Little(moto_url, tmp_path, FOUR, closers=["a"]).replicas()
    for each in (a, b, c, d):
        each.beat()
    give(1, a, c, d)
    client = c.ledger.store._client(0)
    for each in (c, d):
        data = each.ledger.store.get(each.commit_key(), max_bytes=1 << 20)
        obstore.put(
            client, each.commit_key(), data, attributes={"Storage-Class": "GLACIER"}, use_multipart=False
        )
    assert not closes(a, 1)
    give(1, b)
    assert closes(a, 1)
    manifest = b.ledger.manifest(1)
    assert [entry.replica for entry in manifest.entries] == ["a", "b"]
    assert {name for name, _ in manifest.refused} == {"c", "d"}
