"""A member with a valid key, or whoever may only write to the bucket, does not stop the others."""

from pathlib import Path
from typing import Any

import obstore
import pytest
from little import RECIPE, Little, Replica, closes, give
from little import hasty as hasty
from msgspec import to_builtins
from owned import Owned, settled

from isthmus.protocol.membership import membership_key
from isthmus.protocol.trust import Signer

pytestmark = pytest.mark.usefixtures("hasty")
FOUR = RECIPE + '[[replicas]]\nname = "d"\n'
ODD_DOCUMENTS = {
    "NaN": b'{"x": NaN}',
    "infinity": b'{"replica": "@owner", "x": -Infinity}',
    "a number that is too large": b'{"replica": "@owner", "x": 1e400}',
    "deep": b'{"x": ' + b"[" * 980 + b"]" * 980 + b"}",
    "deeper": b"[" * 8000,
    "an integer of thousands of digits": b'{"x": ' + b"9" * 5000 + b"}",
    "a text": b'"membership"',
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


@pytest.mark.parametrize("data", ODD_DOCUMENTS.values(), ids=ODD_DOCUMENTS)
def test_an_odd_document_of_membership_ends_no_closer_and_the_owner_replaces_it(owned: Owned, data: bytes):
    a, b, c = owned.replicas()
    owned.store.put(membership_key(1), data)
    settled(1, a, a, b, c)
    assert [words for words in a.said if "membership document 1: " in words]
    owned.invite("d")
    settled(2, a, a, b, c)
    assert "d" in owned.members(3)
    assert not [words for words in a.said if not words.isprintable()]


def say_more(replica: Replica, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Its commits have fields that no schema knows."""
    seal = Signer.seal

    def sealed(self: Signer, kind: str, run_id: str, body: dict[str, Any]) -> bytes:
        odd = kind == "commit" and self.replica == replica.name
        return seal(self, kind, run_id, to_builtins(body) | more if odd else body)

    monkeypatch.setattr(Signer, "seal", sealed)


def test_a_commit_with_fields_that_we_do_not_know_counts(owned: Owned, monkeypatch: pytest.MonkeyPatch):
    a, b, c = owned.replicas()
    with monkeypatch.context() as patch:
        say_more(b, patch, x=nested(30), y="\u00e4")
        settled(1, a, a, b, c)
    assert [entry.replica for entry in owned.ledger().manifest(1).entries] == ["a", "b", "c"]


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
