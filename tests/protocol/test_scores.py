"""Who is refused for a score, who is on probation, and who is drawn: rules without a run around them."""

from collections.abc import Mapping

import pytest
import torch

from isthmus.config import BucketConfig, ScoreConfig
from isthmus.protocol.compare import compare
from isthmus.protocol.scores import Judged, RoundScores, drawn, harmful, has_passed, is_spent

NAMES = ("a", "b", "c", "d", "e")
DRAW = b"\3" * 32


def scores_of(
    given: Mapping[str, float | None],
    new: Mapping[str, int] | None = None,
    sample: int = 5,
    **settings: float,
) -> RoundScores:
    config = ScoreConfig(sample=sample, **settings)  # pyright: ignore[reportArgumentType]
    return RoundScores(config, given, new or {}, DRAW, given.__getitem__)


def judged(scores: RoundScores, norms: Mapping[str, float] | None = None) -> Judged:
    names = scores.score.__self__  # pyright: ignore[reportFunctionMemberAccess]
    signs = {name: torch.zeros(0, dtype=torch.int64) for name in names}
    return compare(signs, norms or dict.fromkeys(names, 1.0), {}, scores, BucketConfig())


def test_who_does_harm_is_refused_and_the_reason_says_how_much():
    refused = judged(scores_of({"a": -0.1, "b": 0.3, "c": -0.2})).refused
    assert refused == {"b": "it makes the held-out loss worse by 0.3, over 0.03"}


def test_harm_within_the_bound_counts():
    given = {"a": 0.03, "b": -0.1, "c": 0.0}
    assert judged(scores_of(given)).refused == {}
    assert judged(scores_of(given, bound=0.01)).refused.keys() == {"a"}


def test_a_loss_that_is_not_finite_is_harm():
    scores = scores_of({"a": float("nan"), "b": -0.1, "c": float("-inf"), "d": 0.0, "e": 0.0})
    assert judged(scores).refused.keys() == {"a", "c"}
    assert all(abs(score) <= 1e6 for _, score in scores.listed(NAMES))


@pytest.mark.parametrize("given", [{"a": 1.0, "b": 1.0, "c": -1.0}, {"a": 1.0, "b": -1.0}, {"a": 1.0}])
def test_half_or_more_are_not_refused_and_the_note_names_them(given: dict[str, float]):
    found = judged(scores_of(given))
    assert found.refused == {}
    assert "a" in found.note
    assert "nobody is refused" in found.note


def test_one_of_the_sample_over_the_bound_has_all_scored_and_a_clean_sample_only_itself():
    for bad in NAMES:
        given = {name: 1.0 if name == bad else -1.0 for name in NAMES}
        scores = scores_of(given, sample=2)
        refused = judged(scores).refused
        caught = bad in scores.sample
        assert len(scores.sample) == 2
        assert refused.keys() == ({bad} if caught else set())
        assert scores.found.keys() == (set(NAMES) if caught else scores.sample)


def test_the_draw_reaches_everybody_and_differs_from_round_to_round():
    draws = [drawn(NAMES, bytes([n]) * 32, 2) for n in range(60)]
    assert {len(each) for each in draws} == {2}
    assert all(10 <= sum(name in each for each in draws) <= 40 for name in NAMES)  # 24 in the mean
    assert drawn(NAMES[::-1], bytes([0]) * 32, 2) == draws[0], "whatever their order"


def test_a_newcomer_counts_only_after_so_many_rounds_in_which_it_passed():
    probation = {"e": 0}
    for passed in (1, 2, 3):
        scores = scores_of(dict.fromkeys(NAMES, -0.1), probation, probation=3)
        refused = judged(scores).refused
        assert refused == {"e": f"on probation: passed {passed} of 3 rounds"}
        assert has_passed(refused["e"])
        assert is_spent(refused["e"])
        probation = scores.next_probation(refused)
    assert probation == {}


@pytest.mark.parametrize(
    ("score", "norm", "reason"),
    [(0.5, 1.0, "worse"), (-0.1, 50.0, "norm"), (None, 1.0, "cannot score"), (-0.1, 1e-9, "empty")],
)
def test_a_newcomer_that_does_not_pass_begins_anew_unless_nobody_could_score_it(
    score: float | None, norm: float, reason: str
):
    given: dict[str, float | None] = {**dict.fromkeys(NAMES, -0.1), "e": score}
    scores = scores_of(given, {"e": 1}, probation=3)
    refused = judged(scores, {**dict.fromkeys(NAMES, 1.0), "e": norm}).refused
    assert refused.keys() == {"e"}
    assert reason in refused["e"]
    assert scores.next_probation(refused) == {"e": 1 if score is None else 0}


def test_where_the_others_do_harm_too_a_newcomer_passes():
    """A run that overfits must not keep newcomers out for ever."""
    scores = scores_of(dict.fromkeys(NAMES, 0.1), {"e": 0})
    assert judged(scores).refused == {"e": "on probation: passed 1 of 1 rounds"}


def test_newcomers_get_nobody_refused():
    """Three of five on probation send norms of a hundred: the two others are no minority."""
    scores = scores_of(dict.fromkeys(NAMES, -0.1), dict.fromkeys("cde", 0))
    norms = {"a": 1.0, "b": 1.0, "c": 100.0, "d": 100.0, "e": 100.0}
    assert judged(scores, norms).refused.keys() == set("cde")


def test_where_only_newcomers_deliver_they_count():
    assert judged(scores_of(dict.fromkeys("cde", -0.1), dict.fromkeys("cde", 0))).refused == {}


def test_who_did_harm_is_on_probation_afterwards():
    scores = scores_of({"a": -0.1, "b": 0.3, "c": -0.2})
    assert scores.next_probation(judged(scores).refused) == {"b": 0}


def test_nothing_is_scored_where_the_recipe_has_no_batches():
    scores = scores_of({"a": -0.1, "b": 9.9, "c": -0.2}, batches=0)
    assert judged(scores).refused == {}
    assert scores.listed("abc") == ()


def test_what_was_refused_for_another_reason_returns_to_its_author():
    assert is_spent(harmful(0.3, 0.02))
    assert not is_spent("its norm 9 is over 3 times the median 1")
