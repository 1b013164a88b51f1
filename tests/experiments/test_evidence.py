"""Corrected verdicts against slow references: the definitions, and numbers that are printed in tables."""

import math
import random

import pytest
from result_lines import line

from experiments.estimates import Book
from experiments.evidence import benjamini_hochberg, holm, two_sided
from experiments.render import render
from experiments.tables import pick_scale

SCALE = pick_scale("12m")
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom


def integrated(t, freedom, steps=200_000):
    """The two tails of Student's density, x = t + u / (1 - u), by the middles of many strips."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi * freedom)
    total = 0.0
    for i in range(steps):
        u = (i + 0.5) / steps
        x = abs(t) + u / (1 - u)
        total += scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) / (1 - u) ** 2 / steps
    return 2 * total


@pytest.mark.parametrize("freedom", [1, 2, 4, 9])
@pytest.mark.parametrize("t", [0.3, 2.0, 8.0])
def test_a_p_value_is_the_area_of_both_tails(t, freedom):
    assert two_sided(t, freedom) == pytest.approx(integrated(t, freedom), rel=1e-4)
    assert two_sided(-t, freedom) == two_sided(t, freedom)


def test_p_is_a_twentieth_at_the_printed_quantiles_and_known_at_the_ends():
    for freedom, t in enumerate(T95, start=1):
        assert two_sided(t, freedom) == pytest.approx(0.05, abs=1e-4)
    assert two_sided(0.0, 3) == 1
    assert two_sided(math.inf, 2) == 0
    assert two_sided(1.0, 1) == pytest.approx(0.5)  # Cauchy's quartile


def slow_benjamini_hochberg(ps, level):
    """Largest k with at least k p-values of at most k / m * level; those are rejected."""
    found = [k for k in range(1, len(ps) + 1) if sum(p <= k / len(ps) * level for p in ps) >= k]
    return [bool(found) and p <= max(found) / len(ps) * level for p in ps]


def slow_holm(ps, level):
    """One after another, the smallest first, as long as each is small enough for those that are left."""
    rejected = [False] * len(ps)
    for done, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[i] > level / (len(ps) - done):
            break
        rejected[i] = True
    return rejected


def test_both_procedures_reject_what_their_definitions_do():
    draw = random.Random(0)
    for n in (1, 2, 7, 33):
        for _ in range(50):
            ps = [draw.random() ** draw.choice((1, 4, 8)) for _ in range(n)]
            for level in (0.01, 0.05, 0.3):
                assert [p <= level for p in benjamini_hochberg(ps)] == slow_benjamini_hochberg(ps, level)
                assert [p <= level for p in holm(ps)] == slow_holm(ps, level)
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def seeds(row, *losses):
    return [line(SCALE, row, seed, loss) for seed, loss in enumerate(losses)]


def test_one_clear_cell_alone_is_not_clear_among_many_that_are_not():
    noise = (4.1, 4.1, 4.5)
    lines = [*seeds("dense", 4.0, 4.2, 4.4), *seeds("het-8", 4.1, 4.27, 4.5)]
    for row in ("pp-8", "pp-24", "pp-96", "pp-192", "het-24", "het-96", "het-192"):
        lines += seeds(row, *noise)
    book = Book(lines, SCALE)
    alone = "{{verdict het-8 dense full}}"
    assert "higher by" in render(alone, book)
    assert "before correction" not in render(alone, book)
    many = alone + "".join(f"\n{{{{verdict {row} dense full}}}}" for row in ("pp-8", "pp-24", "pp-96"))
    assert "higher by 2.15 ± 0.25 % before correction only" in render(many, book)
    assert "higher by" in render(alone, book)  # a page of its own again
    sure = [*lines, *seeds("diloco", 5.0, 5.251, 5.5)]
    assert "higher by 25.01 ± 0.01 % †" in render(many + "\n{{verdict diloco dense full}}", Book(sure, SCALE))
