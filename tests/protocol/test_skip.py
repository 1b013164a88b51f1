"""A replica that gives nothing to a round says so, and nobody waits for it; each entry names its start."""

from pathlib import Path

import pytest
from clocks import Clock
from little import Little, Replica, apply, closes, give
from little import hasty as hasty

from isthmus.protocol.audit import audit
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import Refused

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture
def run(folder_url: str, tmp_path: Path) -> list[Replica]:
    """a, b and c, all of them alive; only a closes."""
    replicas = Little(folder_url, tmp_path, closers=["a"]).replicas(Clock())
    for each in replicas:
        each.beat()
    return replicas


def counted(reader: Ledger, round_number: int) -> str:
    return "".join(entry.replica for entry in reader.manifest(round_number).entries)


def test_a_round_does_not_wait_for_who_lives_and_skips_it(run: list[Replica]):
    a, b, c = run
    give(1, a, b)
    assert not closes(a, 1)
    assert c.exchange.skip(1, "not_finite")
    assert closes(a, 1)
    manifest = a.ledger.manifest(1)
    assert counted(a.ledger, 1) == "ab"
    assert manifest.skips == {"c": "not_finite"}
    assert manifest.refusals == ()
    assert manifest.members == ("a", "b", "c")
    apply(1, *run)
    assert not a.exchange.closer.members.missed("c", 1)


def test_a_round_that_everybody_skips_leaves_the_anchor_as_it_was(run: list[Replica]):
    before = run[0].exchange.anchor
    for each in run:
        each.exchange.skip(1, "not_finite")
    assert closes(run[0], 1)
    for each in run:
        assert each.exchange.closed(1) == []
        each.hold(1)
        assert each.exchange.anchor == before
    give(2, *run)
    assert closes(run[0], 2)
    apply(2, *run)
    checked = audit(run[0].ledger)
    assert checked.digest == run[0].exchange.anchor
    assert checked.updates == 3


def test_of_an_update_and_a_skip_the_first_stands(run: list[Replica]):
    a, b, c = run
    give(1, a, b)
    assert not b.exchange.skip(1, "not_finite")
    assert c.exchange.skip(1, "not_finite")
    assert c.exchange.skip(1, "not_finite")  # said again after a kill
    give(1, c)
    assert closes(a, 1)
    assert counted(a.ledger, 1) == "ab"
    assert a.ledger.manifest(1).skips == {"c": "not_finite"}


def test_an_entry_names_the_start_that_committed_it(run: list[Replica]):
    give(1, *run)
    assert closes(run[0], 1)
    entries = run[1].ledger.manifest(1).entries
    assert [entry.incarnation for entry in entries] == [each.exchange.incarnation for each in run]


def test_a_skip_that_lists_shards_is_refused(run: list[Replica]):
    a, b, _ = run
    mine = b.update()
    sealed = b.sealed(1, b.entry(mine, skip="not_finite"))
    with pytest.raises(Refused, match="lists shards"):
        a.ledger.check_commit(sealed, "b", 1, a.exchange.anchor)
    with pytest.raises(Refused, match="every shard"):
        a.ledger.check_commit(b.sealed(1, b.entry(mine, shards=())), "b", 1, a.exchange.anchor)
