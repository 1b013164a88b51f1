"""Whole fleets in one process, in virtual time: a replica that is killed, late, slow or cut off costs little.

Trainers, closers and the bucket are the real ones; processes, sockets and waiting are not.
"""

import errno
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from in_process import WRITES, Fleet, kill_at_write, storm
from returning import small

from isthmus.cli.main import main
from isthmus.errors import RunStopped

JOINED = re.compile(r"no private state here: joining at round (\d+) from the bucket")
EVERYBODY = ["rack-0", "rack-1", "rack-2"]


def test_where_nothing_happens_all_count_in_every_round_and_nobody_waits_longer_than_training_takes(
    tmp_path: Path,
):
    fleet = Fleet(small(rounds=6, full=3), tmp_path, step_seconds=10.0)
    fleet.go()
    fleet.check_one_history()
    assert fleet.counted() == {t: EVERYBODY for t in range(1, 7)}
    assert fleet.seconds < 6 * 30 * 1.05 + 10  # three inner steps a round


def test_a_fleet_is_the_same_each_time_it_is_run(tmp_path: Path):
    said = []
    for name in ("one", "two"):
        fleet = Fleet(small(rounds=4, full=3), tmp_path / name)
        storm(fleet, 0, 3, 12.0)
        fleet.go()
        said.append(([process.said for process in fleet.processes.values()], fleet.counted(), fleet.time.now))
    assert said[0] == said[1]


def some(few: Sequence[int], many: int) -> list:
    """A few of the cases, and up to `many` of them in `make soak`."""
    rest = [number for number in range(1, many + 1) if number not in few]
    return [*few, *(pytest.param(number, marks=pytest.mark.soak) for number in rest)]


@pytest.mark.parametrize("seed", some([1, 2, 3], 30))
def test_kills_at_random_times_leave_one_history_that_verifies(seed: int, tmp_path: Path, capsys):
    fleet = Fleet(small(rounds=10, full=3), tmp_path)
    storm(fleet, seed, num_kills=8, seconds=35.0)
    fleet.go()
    fleet.check_one_history()
    assert sum(process.num_starts for process in fleet.processes.values()) > 5
    assert main(["ledger", "verify", fleet.url]) == 0
    for t, names in fleet.counted().items():
        assert len(set(names)) == len(names) > 0, f"round {t}"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", some([1, 5, 6, 9, 14], 28))
def test_a_closer_killed_at_any_of_its_writes_holds_nobody_up(number: int, when: str, tmp_path: Path):
    """Heartbeats, payloads, commits, manifests and anchors: of the first in line, in a fleet of two."""
    fleet = Fleet(small(rounds=4, full=2), tmp_path)
    kill_at_write(fleet["rack-0"], number, when)
    fleet.go()
    fleet.check_one_history()
    assert fleet["rack-0"].num_starts == 2
    assert fleet.seconds < 4 * 3 + 20  # twelve inner steps, one start, and silence that is waited out


def test_rounds_are_settled_without_a_killed_worker_long_before_it_would_be_found_silent(tmp_path: Path):
    """Its launcher says that it has ended; a heartbeat is ten minutes old before anybody wonders."""
    fleet = Fleet(small(rounds=8, full=3, heartbeat_seconds=600), tmp_path)
    fleet["rack-1"].restart_seconds = 12.0
    fleet.kill("rack-1", at=7.0)
    fleet.go()
    fleet.check_one_history()
    assert fleet.seconds < 60
    without = [t for t, names in fleet.counted().items() if names == ["rack-0", "rack-2"]]
    assert len(without) >= 2
    assert "rack-1" in fleet.counted()[8]


@pytest.mark.parametrize("gone", EVERYBODY)
def test_who_is_gone_for_good_without_a_word_is_waited_for_in_one_round_only(gone: str, tmp_path: Path):
    fleet = Fleet(small(rounds=6, full=3), tmp_path)
    fleet[gone].restart_seconds = None
    fleet[gone].say_ended = lambda: None  # the machine is gone, with its launcher
    fleet.kill(gone, at=4.0)
    fleet.go()
    fleet.check_one_history()
    left = [name for name in EVERYBODY if name != gone]
    assert [names for t, names in fleet.counted().items() if t > 2] == [left] * 4
    assert fleet.seconds < 6 * 3 + 30


def test_who_comes_late_joins_from_the_bucket_and_counts_from_the_round_after_on(tmp_path: Path):
    fleet = Fleet(small(rounds=8, full=3, quorum=1, deadline_seconds=5), tmp_path)
    fleet.go(late={"rack-2": 14.0})
    fleet.check_one_history()
    joined = next(int(found[1]) for line in fleet["rack-2"].said if (found := JOINED.match(line)))
    assert 1 <= joined <= 5
    assert [t for t, names in fleet.counted().items() if "rack-2" in names] == list(range(joined + 2, 9))


def test_a_replica_three_times_slower_than_the_others_counts_in_every_round(tmp_path: Path):
    fleet = Fleet(small(rounds=5, full=3), tmp_path)
    fleet["rack-1"].step_seconds = 3.0
    fleet.go()
    fleet.check_one_history()
    assert fleet.counted() == {t: EVERYBODY for t in range(1, 6)}


@pytest.mark.parametrize("wrong_by", [-3600.0, 3600.0])
def test_a_closer_whose_clock_is_an_hour_wrong_closes_as_the_others_do(wrong_by: float, tmp_path: Path):
    fleet = Fleet(small(rounds=4, full=3), tmp_path)
    fleet["rack-0"].wrong_by = wrong_by
    fleet.go()
    fleet.check_one_history()
    assert fleet.counted() == {t: EVERYBODY for t in range(1, 5)}
    assert fleet.seconds < 4 * 3 + 10


@pytest.mark.parametrize(
    ("refused", "number"),
    [
        (WRITES, errno.EROFS),  # read-only for a while
        (WRITES, errno.ENOSPC),
        (("get", "head", "list", "put", "create", "copy"), errno.ESTALE),  # a server that is away
    ],
)
def test_a_store_that_refuses_for_a_while_restarts_nobody(refused, number: int, tmp_path: Path):
    fleet = Fleet(small(rounds=60, full=3), tmp_path)
    begin, over = fleet.time.now + 4.0, fleet.time.now + 300.0

    def away(verb: str, key: str) -> None:
        if verb in refused and begin <= fleet.time.now < over:
            raise OSError(number, "as the test wants it")

    for name in EVERYBODY:
        fleet[name].strikes["before"] = away
    fleet.go()
    fleet.check_one_history()
    assert [fleet[name].num_starts for name in EVERYBODY] == [1, 1, 1]
    said = [line for name in EVERYBODY for line in fleet[name].said]
    assert sum("waiting for that to pass" in line for line in said) > 0
    # They try again after pauses of up to 30 s; whoever is first goes on, and the others join it.
    after = [names for t, names in fleet.counted().items() if t > 4]
    assert {name for names in after for name in names} == set(EVERYBODY)


def test_who_is_revoked_ends_at_the_edge_of_a_round_and_the_others_go_on(tmp_path: Path):
    fleet = Fleet(small(rounds=6, full=3), tmp_path)
    fleet.at(7.5, lambda: fleet.order(revoked=["rack-1"]))
    with pytest.raises(RunStopped, match=r"rack-1: you were revoked by the owner in round [2-5]$"):
        fleet.go()
    fleet.check_one_history()
    counts = [t for t, names in fleet.counted().items() if "rack-1" in names]
    assert counts == list(range(1, counts[-1] + 1))
    assert 2 <= counts[-1] < 6


def test_a_run_that_is_extended_before_its_end_goes_on_to_the_new_one(tmp_path: Path):
    fleet = Fleet(small(rounds=4, full=2), tmp_path)
    fleet.at(5.0, lambda: fleet.order(rounds=6))
    fleet.go()
    assert fleet.ledger.membership.look().run.recipe.outer.rounds == 6
    assert sorted(fleet.counted()) == [1, 2, 3, 4]  # a start ends where its run did when it began
    for process in fleet.processes.values():
        process.recipe = fleet.recipe = fleet.ledger.membership.look().run.recipe
    fleet.go()
    fleet.check_one_history()
    assert fleet.counted()[6] == ["rack-0", "rack-1"]
