"""Who has a share of the data, in whole fleets in one process, in virtual time."""

from itertools import pairwise
from pathlib import Path

import pytest
from in_process import Fleet
from returning import small

from isthmus.errors import RunStopped

EVERYBODY = ("rack-0", "rack-1", "rack-2")


def dealt_in(fleet: Fleet) -> dict[int, tuple[str, ...]]:
    """Round -> who has a share of the round after it."""
    return {m.round: m.dealt_in for m in fleet.ledger.between(1, fleet.ledger.last_round())}


def test_where_nothing_happens_all_have_a_share_of_every_round(tmp_path: Path):
    fleet = Fleet(small(rounds=5, full=3), tmp_path)
    fleet.go()
    assert set(dealt_in(fleet).values()) == {EVERYBODY}
    fleet.check_no_batch_is_dealt_twice()
    assert [len(process.shares) for process in fleet.processes.values()] == [5, 5, 5]


def test_five_who_are_invited_for_next_week_cost_no_text_until_they_come(tmp_path: Path):
    fleet = Fleet(small(rounds=16, full=3), tmp_path)
    guests = [f"guest-{i}" for i in range(5)]
    fleet.at(5.0, lambda: fleet.invite(*guests))
    fleet.at(25.0, lambda: fleet["guest-3"].launch())
    fleet.go()
    fleet.check_one_history()
    fleet.check_no_batch_is_dealt_twice()
    shares, manifests = dealt_in(fleet), list(fleet.ledger.between(1, 16))
    seen = next(t for t, names in shares.items() if "guest-3" in names)
    assert 4 < seen < 12
    assert {shares[t] for t in range(1, seen)} == {EVERYBODY}
    assert {shares[t] for t in range(seen, 16)} == {(*EVERYBODY, "guest-3")}
    assert manifests[3].next_epoch == 1  # they are members all the while
    taken = [after.dealt - before.dealt for before, after in pairwise(manifests)]
    assert taken == [3 * 3] * (seen - 1) + [3 * 4] * (16 - seen)  # three inner steps a round
    counted = fleet.counted()
    first = next(t for t, names in counted.items() if "guest-3" in names)
    assert first in (seen + 1, seen + 2)
    assert all(set(EVERYBODY) <= set(names) for names in counted.values())
    assert fleet.seconds < 16 * 3 * 1.1 + 10  # nobody waited for the five


def test_who_is_away_for_long_loses_its_share_and_has_one_again_when_it_is_back(tmp_path: Path):
    fleet = Fleet(small(rounds=24, full=3), tmp_path)
    fleet["rack-2"].restart_seconds = None
    fleet.kill("rack-2", at=10.0)
    fleet.at(45.0, lambda: fleet["rack-2"].launch())
    fleet.go()
    fleet.check_one_history()
    fleet.check_no_batch_is_dealt_twice()
    shares, counted = dealt_in(fleet), fleet.counted()
    gone = next(t for t, names in counted.items() if "rack-2" not in names)
    lost = next(t for t, names in shares.items() if "rack-2" not in names)
    assert lost == gone + fleet.recipe.bucket.missed_rounds
    back = next(t for t in range(lost, 24) if "rack-2" in shares[t])
    assert all("rack-2" not in shares[t] for t in range(lost, back))
    assert any("rack-2" in counted[t] for t in (back + 1, back + 2))
    assert set(counted[24]) == set(EVERYBODY)


def test_a_short_absence_moves_nobodys_batches(tmp_path: Path):
    fleet = Fleet(small(rounds=10, full=3), tmp_path)
    fleet["rack-2"].restart_seconds = 5.0
    fleet.kill("rack-2", at=10.0)
    fleet.go()
    assert any("rack-2" not in names for names in fleet.counted().values())
    assert set(dealt_in(fleet).values()) == {EVERYBODY}
    fleet.check_no_batch_is_dealt_twice()


def test_where_all_who_have_a_share_have_gone_the_one_without_goes_on(tmp_path: Path):
    fleet = Fleet(small(rounds=24, full=2), tmp_path)
    fleet["rack-0"].restart_seconds = None
    fleet.kill("rack-0", at=100.0)
    fleet.go(late={"rack-1": 101.0})
    fleet.check_one_history()
    fleet.check_no_batch_is_dealt_twice()
    shares, counted = dealt_in(fleet), fleet.counted()
    (empty,) = [t for t, names in counted.items() if not names]
    assert shares[empty - 1] == ("rack-0",)
    assert [(each.replica, each.code) for each in fleet.ledger.manifest(empty).skipped] == [
        ("rack-1", "no_share")
    ]
    assert all(counted[t] == ["rack-1"] for t in range(empty + 1, 25))


def test_a_run_is_handed_over_to_one_who_has_not_come_yet(tmp_path: Path):
    fleet = Fleet(small(rounds=12, full=1), tmp_path)
    fleet.at(4.0, lambda: fleet.invite("heir", closes=True))
    fleet.at(8.0, lambda: fleet.order(revoked=["rack"]))
    fleet.at(30.0, lambda: fleet["heir"].launch())
    with pytest.raises(RunStopped, match="rack: you were revoked by the owner"):
        fleet.go()
    fleet.check_one_history()
    fleet.check_no_batch_is_dealt_twice()
    counted, shares = fleet.counted(), dealt_in(fleet)
    (empty,) = [t for t, names in counted.items() if not names]
    assert shares[empty - 1] == ()
    assert all(counted[t] == ["rack"] for t in range(1, empty))
    assert all(counted[t] == ["heir"] for t in range(empty + 1, 13))
