"""An edge can be repeated: wherever a replica is killed, and however old its checkpoint is, nothing that it
trained is counted twice, and nothing undone."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from books import Books, run, undiscounted
from in_process import Fleet, Process, kill_at_commit, strike_once
from returning import small

from isthmus.runtime.trainer import Trainer
from isthmus.store.objects import open_store

STEPS = 3  # of a round
LATE = {"quorum": 1, "deadline_seconds": 10}


def fleet_of(folder: Path, rounds: int = 8, full: int = 2, **bucket: float) -> Fleet:
    return Fleet(undiscounted(small(rounds=rounds, full=full, anchor_every=20, **bucket)), folder)


def said(process: Process, words: str) -> list[str]:
    return [line for line in process.said if words in line]


@pytest.mark.parametrize("age", [1, 2, 5])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_around_its_commit_with_an_old_checkpoint(when: str, age: int, tmp_path: Path):
    """Each start trains to other bits. What it committed stands and is subtracted; what it did not commit,
    the others settle without."""
    fleet = fleet_of(tmp_path)
    books = Books(fleet["rack-0"], {(6 - age, STEPS)}, noise=1e-3)
    kill_at_commit(fleet["rack-0"], 6, when)
    run(fleet, books)
    assert fleet["rack-0"].num_starts == 2
    again = [t for t in range(6 - age, 7) if when == "after" or t < 6]
    assert books.trained[1] == [*again, *range(again[-1] + 1 + (when == "before"), 9)]
    counted = [t for t, names in fleet.counted().items() if "rack-0" in names]
    assert counted == [t for t in range(1, 9) if when == "after" or t != 6]
    assert not books.emptied


def test_killed_again_and_again_before_a_new_checkpoint(tmp_path: Path):
    fleet = fleet_of(tmp_path)
    victim = fleet["rack-0"]
    books = Books(victim, {(2, STEPS)}, noise=1e-3)
    for seconds in (13.0, 24.0):
        fleet.kill("rack-0", at=seconds)
    run(fleet, books)
    assert victim.num_starts == 3
    assert not books.emptied


def test_what_a_late_commit_brought_and_the_next_round_sent_is_trained_again(tmp_path: Path):
    """Round 3 is settled without it while its commit is on the way; rounds 4 and 5 send parts of that."""
    fleet = fleet_of(tmp_path, **LATE)
    victim = fleet["rack-0"]
    books = Books(victim, {(2, STEPS)}, noise=1e-3)
    key = "commits/000003/rack-0.json"

    def late() -> None:
        fleet.time.sleep(9.0)
        kill_at_commit(victim, 5, "after")
        victim.store.strikes.after = victim.strikes["after"]

    strike_once(victim, "before", "create", key, late)
    run(fleet, books)
    assert victim.num_starts == 2
    assert "rack-0" not in fleet.counted()[3]
    assert books.trained[1][:4] == [2, 3, 4, 5]
    assert not books.emptied


def test_inner_steps_of_a_round_that_was_settled_meanwhile_are_folded_once(tmp_path: Path):
    """Killed after two inner steps of round 4, with a checkpoint there; away until the others are at round 6.
    It is saved before its next commit: a kill after that restores nothing older."""
    fleet = fleet_of(tmp_path)
    victim = fleet["rack-0"]
    books = Books(victim, {(4, 2)}, noise=1e-3)
    victim.restart_seconds = 7.0

    def before(trainer: Trainer) -> None:
        if victim.num_starts == 2:
            kill_at_commit(victim, 8, "after")
            victim.store.strikes.after = victim.strikes["after"]

    books.before = before
    fleet.kill("rack-0", at=11.5)
    run(fleet, books)
    assert victim.num_starts == 3
    assert len(said(victim, "what we trained of it goes to the error feedback")) == 1
    assert books.trained[1][-1] == 8
    assert books.trained[2] == books.trained[1]
    assert {(4, 1), (4, 2)} <= books.steps
    assert (4, 3) not in books.steps


def test_an_update_that_is_refused_stays_in_the_feedback_after_a_kill(tmp_path: Path):
    """Refused for its norm in rounds 3 to 5, and emptied after that; killed in between."""
    fleet = fleet_of(tmp_path, full=3, norm_limit=3.0, deadline_seconds=600)
    victim = fleet["rack-0"]
    books = Books(victim, {(2, STEPS)})

    def before(trainer: Trainer) -> None:
        encode = trainer.outer.encode

        def wrong(params, again=False):
            name = next(iter(params))
            if trainer.session.round == 3:  # a bug
                params = {**params, name: params[name] + 1e6 * torch.ones_like(params[name])}
            return encode(params, again)

        trainer.outer.encode = wrong

    books.before = before
    kill_at_commit(victim, 4, "after")
    run(fleet, books)
    assert victim.num_starts == 2
    assert [t for t, names in fleet.counted().items() if "rack-0" in names] == [1, 2, 6, 7, 8]
    assert len(said(victim, "the error feedback is emptied, with what they held")) == 1


@pytest.fixture
def six(tmp_path: Path) -> Fleet:
    """Rounds of six inner steps."""
    recipe = undiscounted(small(rounds=6, full=2, anchor_every=20))
    return Fleet(replace(recipe, outer=replace(recipe.outer, inner_steps=6)), tmp_path)


def spoil(trainer: Trainer, round_number: int, step: int) -> None:
    """From this inner step of this round on nothing is finite."""
    plain, first = trainer.replica.inner_step, (round_number - 1) * 6

    def inner_step(number: int) -> torch.Tensor:
        loss = plain(number)
        if first + step <= number + 1 <= first + 6:
            for p in trainer.replica.named_parameters().values():
                p.fill_(torch.nan)
            return torch.full_like(loss, torch.nan)
        return loss

    trainer.replica.inner_step = inner_step


@pytest.mark.parametrize(("seconds", "at", "skipped"), [(2.0, 29.5, True), (1.0, 17.5, False)])
def test_a_round_that_is_not_finite_is_skipped_also_after_a_kill_inside_it(seconds, at, skipped, six: Fleet):
    """NaN at step 3, a checkpoint at step 5, a kill. If the others settle it meanwhile, nothing is folded."""
    victim, six["rack-1"].step_seconds = six["rack-0"], seconds
    books = Books(victim, {(2, 6), (3, 5)})
    books.before = lambda trainer: spoil(trainer, 3, 3)
    six.kill("rack-0", at=at)
    run(six, books)
    assert victim.num_starts == 2
    assert any("back in round 3, after 5 of its inner steps" in line for line in victim.said)
    skips = [(each.replica, each.code) for each in six.ledger.manifest(3).skipped]
    assert skips == ([("rack-0", "not_finite")] if skipped else [])
    without = [t for t, names in six.counted().items() if "rack-0" not in names]
    assert without == [3] if skipped else without[0] == 3 and 6 not in without
    assert all(bool(e.isfinite().all()) for e in books.trainer.feedback.values())
    assert all(bool(t.isfinite().all()) for t in books.trainer.replica.state().values())
    assert not books.emptied


def test_what_an_earlier_start_committed_to_a_round_that_is_not_finite_now_empties_the_feedback(six: Fleet):
    victim = six["rack-0"]
    books = Books(victim, {(2, 6), (3, 5)})

    def before(trainer: Trainer) -> None:
        if victim.num_starts > 1:
            spoil(trainer, 3, 3)
        if victim.num_starts == 2:
            six.at(six.time.now - six_began + 11.5, lambda: six.time.kill("rack-0"))

    six_began = six.time.now
    books.before = before
    kill_at_commit(victim, 3, "after")
    six.go()
    six.check_one_history()
    assert victim.num_starts >= 2
    assert "rack-0" in six.counted()[3]
    assert said(victim, "was not trained to its end this time; the error feedback is emptied where")
    assert books.emptied


def test_an_update_of_a_start_that_the_checkpoint_does_not_know_is_not_subtracted(tmp_path: Path):
    """A friend has started the file a second time, on another machine."""
    fleet = fleet_of(tmp_path)
    other = Process(fleet, "rack-0")
    other.machine, other.num_starts, other.step_seconds = "elsewhere", 100, 0.9
    books = Books(fleet["rack-0"], {(t, STEPS) for t in range(1, 9)})
    fleet.at(8.0, other.launch)
    run(fleet, books)
    theirs = [
        t
        for t in range(1, 9)
        if (entry := fleet.ledger.manifest(t).entry("rack-0")) and entry.incarnation == f"{101:016x}"
    ]
    assert theirs
    lines = said(fleet["rack-0"], "another machine uses its key; the error feedback is emptied where")
    assert len(lines) == len(theirs)
    assert books.emptied


def test_an_older_copy_of_the_state_is_not_subtracted_from(tmp_path: Path):
    """The folder is put back as it was after round 2, with the list of its starts."""
    fleet = fleet_of(tmp_path, rounds=12)
    victim = fleet["rack-0"]
    victim.restart_seconds = 3.0
    work = tmp_path / "work" / "rack-0"
    fleet.at(7.5, lambda: shutil.copytree(work, tmp_path / "kept"))
    fleet.kill("rack-0", at=9.5)  # its second start commits in rounds 6 and 7
    fleet.kill("rack-0", at=22.5)

    def put_back() -> None:
        shutil.rmtree(work)
        shutil.copytree(tmp_path / "kept", work)

    fleet.at(23.5, put_back)
    fleet.go()
    fleet.check_one_history()
    assert victim.num_starts == 3
    assert said(victim, "is of a start that this private state does not know")


def test_what_is_swept_cannot_be_trained_again_and_empties_the_feedback(tmp_path: Path):
    fleet = Fleet(undiscounted(small(rounds=14, full=2, anchor_every=2)), tmp_path)
    victim = fleet["rack-0"]
    books = Books(victim, {(2, STEPS)})
    victim.restart_seconds = 15.0
    kill_at_commit(victim, 4, "after")

    fleet.at(25.0, lambda: sweep(tmp_path, "rack-1", 4))
    fleet.go()
    assert victim.num_starts == 2
    assert said(victim, "payloads are gone: the error feedback is emptied")
    assert books.emptied
    assert all("rack-0" in names for t, names in fleet.counted().items() if t >= 13)


@pytest.mark.parametrize("swept", [False, True])
def test_far_behind_with_nothing_counted_since_the_checkpoint_the_feedback_stays(swept: bool, tmp_path: Path):
    """It reads its own update of round 3, and then a later anchor, not the rounds between."""
    fleet = Fleet(undiscounted(small(rounds=14, full=2, anchor_every=2)), tmp_path)
    victim = fleet["rack-0"]
    books = Books(victim, {(3, STEPS)})
    victim.restart_seconds = 20.0
    fleet.kill("rack-0", at=10.5)
    if swept:
        fleet.at(20.0, lambda: sweep(tmp_path, "rack-1", 4))
    fleet.go()
    books.check()
    assert said(victim, "going on from a later anchor than that of round")
    assert not books.emptied


def sweep(folder: Path, replica: str, last: int) -> None:
    """What `bucket.keep_rounds` does: each replica deletes its own."""
    store = open_store(str(folder / "bucket"))
    for key in store.list(f"payloads/{replica}"):
        if int(key.split("/")[2]) <= last:
            store.delete(key)
