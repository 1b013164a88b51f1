"""What a replica learns of its own updates from the manifests: how often they were refused for their norm."""

import pytest
from returning import seat, small

from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer
from isthmus.protocol.documents import Refusal
from isthmus.protocol.norms import EMPTY, TOO_LARGE, compare_norms
from isthmus.runtime.session import is_refused_too_often
from isthmus.runtime.trainer import Trainer


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


# Refused for its norm


def test_a_norm_that_is_too_large_has_a_code_of_its_own():
    norms = {"a": 1.0, "b": 1.0, "c": 3.6e25, "d": 0.0}
    refused = compare_norms(norms, {}, 3.0).refused
    assert {name: why.code for name, why in refused.items()} == {"c": TOO_LARGE, "d": EMPTY}
    alone = compare_norms({"a": 90.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, 3.0).refused
    assert alone["a"].code == TOO_LARGE


class Settled:
    """A ledger whose manifests say this of one replica: "" counted, None nothing, else why it was refused."""

    def __init__(self, *verdicts: str | None) -> None:
        self.verdicts = verdicts

    def manifest(self, t: int):
        verdict = self.verdicts[t - 1]

        class Said:
            round = t

            def entry(self, name: str) -> str | None:
                return name if verdict == "" else None

            def refusal(self, name: str) -> Refusal | None:
                return Refusal("a", verdict, "") if verdict else None

        return Said()


LARGE = TOO_LARGE


@pytest.mark.parametrize(
    ("verdicts", "dropped"),
    [
        ([LARGE, LARGE], False),
        ([LARGE, LARGE, LARGE], True),
        ([LARGE, "", LARGE, LARGE], False),
        ([LARGE, None, LARGE, None, None, LARGE], True),  # it is slow, and does not deliver in each round
        ([LARGE, LARGE, "missing"], False),
        ([LARGE, "missing", LARGE, LARGE], False),
        ([LARGE, *[None] * 12, LARGE, LARGE], False),
    ],
)
def test_three_refusals_in_a_row_for_the_norm_are_counted_from_the_manifests(verdicts, dropped):
    assert is_refused_too_often(Settled(*verdicts), "a", len(verdicts)) is dropped


def test_after_it_has_dropped_its_feedback_a_replica_counts_anew():
    ledger, emptied_in = Settled(*[LARGE] * 7), [0]
    for t in range(1, 8):
        if is_refused_too_often(ledger, "a", t, emptied_in[-1]):
            emptied_in.append(t)
    assert emptied_in == [0, 3, 6]


def settle_together(fleets: list[Trainer], t: int) -> None:
    for fleet in fleets:
        assert fleet.begin(t)
        fleet.train_round(t, lambda h: None)
    for fleet in fleets:
        fleet.settle(t)


def test_feedback_that_is_wrong_in_memory_is_dropped_after_three_refusals_and_the_replica_counts_again(
    tmp_path,
):
    recipe = small(rounds=9, full=3, norm_limit=3.0, deadline_seconds=600)
    seats = [seat(recipe, tmp_path, f"rack-{i}") for i in range(3)]
    fleets = [one.come() for one in seats]
    for fleet in fleets:
        assert fleet.resume() == 0
    settle_together(fleets, 1)
    bad, said = fleets[0], seats[0].said
    next(iter(bad.feedback.values())).view(-1)[0] = 3.6e25  # an exponent's bit, in memory
    for t in (2, 3):
        settle_together(fleets, t)
    bad = fleets[0] = seats[0].come()  # its count survives a restart
    assert bad.resume() == 2
    assert run_rounds(bad, range(3, 4), lambda h: None, lambda t, seconds: None)
    assert not any("feedback is emptied" in line for line in said)
    settle_together(fleets, 4)
    (line,) = [line for line in said if "feedback is emptied" in line]
    assert line.startswith("round 4: 3 updates in a row were refused for their norm")
    assert not any(bool(feedback.any()) for feedback in bad.feedback.values())
    settle_together(fleets, 5)
    refused = [dict(bad.ledger.manifest(t).refused).keys() for t in range(1, 6)]
    assert refused == [set(), {"rack-0"}, {"rack-0"}, {"rack-0"}, set()]
    assert bad.ledger.manifest(5).entry("rack-0")
