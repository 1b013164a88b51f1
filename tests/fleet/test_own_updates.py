"""What a replica learns of its own updates from the manifests: refused for their norm, or counted and
unknown."""

import re
import shutil
from collections.abc import Callable

import pytest
from returning import LATE, Seat, seat, small

from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer, history
from isthmus.protocol.norms import compare_norms, is_too_large
from isthmus.runtime.own_record import OwnRecord
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.trainer import Trainer
from isthmus.store.objects import open_store


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


# Refused for its norm


def test_the_reason_of_a_norm_that_is_too_large_is_known_again_and_no_other():
    norms = {"a": 1.0, "b": 1.0, "c": 3.6e25, "d": 0.0}
    refused = compare_norms(norms, {}, 3.0).refused
    assert {name: is_too_large(reason) for name, reason in refused.items()} == {"c": True, "d": False}
    alone = compare_norms({"a": 90.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, 3.0).refused
    assert is_too_large(alone["a"])
    assert not is_too_large("its signs are against those of more than half of the replicas")


class Settled:
    """A ledger whose manifests say this of one replica: "" counted, None nothing, else why it was refused."""

    def __init__(self, *verdicts: str | None) -> None:
        self.verdicts = verdicts

    def manifest(self, t: int):
        verdict = self.verdicts[t - 1]

        class Said:
            round = t
            refused = [("a", verdict)] if verdict else []

            def entry(self, name: str) -> str | None:
                return name if verdict == "" else None

        return Said()


LARGE = compare_norms({"a": 9.0, "b": 1.0, "c": 1.0}, {}, 3.0).refused["a"]


@pytest.mark.parametrize(
    ("verdicts", "dropped"),
    [
        ([LARGE, LARGE], False),
        ([LARGE, LARGE, LARGE], True),
        ([LARGE, "", LARGE, LARGE], False),
        ([LARGE, None, LARGE, None, None, LARGE], True),  # it is slow, and does not deliver in each round
        ([LARGE, LARGE, "shard 0 is missing"], False),
        ([LARGE, "shard 0 is missing", LARGE, LARGE], False),
        ([LARGE, *[None] * 12, LARGE, LARGE], False),
    ],
)
def test_three_refusals_in_a_row_for_the_norm_are_counted_from_the_manifests(verdicts, dropped):
    record = OwnRecord(Settled(*verdicts), "a", print)
    assert record.refused_too_often(len(verdicts)) is dropped


def test_after_it_has_dropped_its_feedback_a_replica_counts_anew():
    record = OwnRecord(Settled(*[LARGE] * 7), "a", print)
    assert [t for t in range(1, 8) if record.refused_too_often(t)] == [3, 6]


def settle_together(fleets: list[Trainer], t: int) -> None:
    for fleet in fleets:
        for own in fleet.train_round(t - 1, lambda h: None):
            fleet.exchange.deliver(t, own)
    for fleet in fleets:
        fleet.apply(t, fleet.exchange.close(t, []))


def test_feedback_that_is_wrong_in_memory_is_dropped_after_three_refusals_and_the_replica_counts_again(
    tmp_path,
):
    recipe = small(rounds=9, full=3, norm_limit=3.0, deadline_seconds=600)
    seats = [seat(recipe, tmp_path, f"rack-{i}") for i in range(3)]
    fleets = [one.come() for one in seats]
    for fleet in fleets:
        assert Recovery(fleet).resume() == 0
    settle_together(fleets, 1)
    bad, said = fleets[0], seats[0].said
    next(iter(bad.feedback.values())).view(-1)[0] = 3.6e25  # an exponent's bit, in memory
    for t in (2, 3):
        settle_together(fleets, t)
    bad = fleets[0] = seats[0].come()  # its count survives a restart
    assert Recovery(bad).resume() == 3
    assert not any("feedback is dropped" in line for line in said)
    settle_together(fleets, 4)
    (line,) = [line for line in said if "feedback is dropped" in line]
    assert line.startswith("round 4: 3 updates in a row were refused for their norm")
    assert not any(bool(feedback.any()) for feedback in bad.feedback.values())
    settle_together(fleets, 5)
    refused = [dict(bad.ledger.manifest(t).refused).keys() for t in range(1, 6)]
    assert refused == [set(), {"rack-0"}, {"rack-0"}, {"rack-0"}, set()]
    assert bad.ledger.manifest(5).entry("rack-0")


# An old copy of the private state


def backup(one: Seat) -> Callable[[], None]:
    """Its private state as it is now; call it to put that back."""
    work = one.folder / "work" / one.name
    kept = one.folder / "kept"
    shutil.copytree(work, kept)

    def put_back() -> None:
        shutil.rmtree(work)
        shutil.copytree(kept, work)

    return put_back


def old_copies(one: Seat) -> list[str]:
    return [line for line in one.said if "is an old copy" in line]


@pytest.mark.parametrize("later", [3, 6])
def test_who_comes_back_with_an_old_copy_of_its_state_is_told_once_what_it_lost(later, tmp_path):
    alone = seat(small(rounds=12, full=1, anchor_every=20), tmp_path)
    alone.run(2)
    put_back = backup(alone)
    alone.run(later)
    put_back()
    fleet = alone.run(later + 2)
    (line,) = old_copies(alone)
    rounds = "round 3 counts an update" if later == 3 else "rounds 3 to 6 count updates"
    assert line == (
        f"the private state here is an old copy: it knows rounds up to 2, and {rounds} of this replica. Lost "
        f"are the optimiser's moments and the error feedback of round {later}; it goes on with those of "
        "round 2"
    )
    assert fleet.step_count == 3 * 4  # those of rounds 1 and 2, and of the two after it came back
    assert all(len(digests) == 1 for digests in alone.anchors().values())
    alone.run(later + 3)
    assert len(old_copies(alone)) == 1


def test_an_old_copy_is_told_of_also_where_the_rounds_after_it_were_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "WITNESS_ROUNDS", 3)
    alone = seat(small(rounds=12, full=1), tmp_path)
    alone.run(1)
    put_back = backup(alone)
    alone.run(7)
    store = open_store(str(tmp_path / "bucket"))
    for key in store.list("payloads"):
        if int(key.split("/")[2]) <= 4:
            store.delete(key)
    put_back()
    alone.run(8)
    (line,) = old_copies(alone)
    assert re.search(r"it knows rounds up to 1, and rounds 2 to \d count updates", line)


def test_an_ordinary_restart_and_an_honest_absence_are_not_told_of(tmp_path):
    recipe = small(rounds=9, **LATE, anchor_every=9)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    away.run(1)
    away.run(2)  # a restart
    there.run(5)
    back = away.come()
    done = Recovery(back).resume()
    assert run_rounds(back, back.exchange, range(done + 1, 7), lambda h: None, lambda t, seconds: None)
    assert old_copies(away) == old_copies(there) == []


def test_a_kill_between_states_is_no_old_copy(tmp_path, monkeypatch):
    """Updates are saved at once, states later: the rounds between are known."""
    alone = seat(small(rounds=9, full=1), tmp_path)
    alone.run(2)
    with monkeypatch.context() as patch:
        patch.setattr("isthmus.model.checkpoint.save", lambda *args, **how: None)
        alone.run(4)
    alone.run(5)
    assert old_copies(alone) == []
