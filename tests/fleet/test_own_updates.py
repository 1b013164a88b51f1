"""What a replica learns of its own updates from the manifests: how often they were refused for their norm."""

import pytest

from isthmus.protocol.documents import Refusal
from isthmus.protocol.norms import EMPTY, TOO_LARGE, compare_norms, is_refused_too_often


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
