"""Corrected verdicts against slow references: the definitions, and numbers that are printed in tables."""

import math
import random

import pytest
from result_lines import line

from experiments.estimates import Book
from experiments.evidence import (
    LEVEL,
    POWER,
    Spread,
    benjamini_hochberg,
    digamma,
    holm,
    quantile,
    trigamma,
    two_sided,
)
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


def test_digamma_and_trigamma_are_the_derivatives_of_log_gamma():
    euler = 0.5772156649015329
    assert digamma(1) == pytest.approx(-euler, rel=1e-14)
    assert digamma(0.5) == pytest.approx(-euler - 2 * math.log(2), rel=1e-14)
    assert trigamma(1) == pytest.approx(math.pi**2 / 6, rel=1e-14)
    assert trigamma(0.5) == pytest.approx(math.pi**2 / 2, rel=1e-14)
    for x in (0.3, 2.7, 11.5, 60.0):
        step = 1e-4 * x
        slope = (math.lgamma(x + step) - math.lgamma(x - step)) / (2 * step)
        assert digamma(x) == pytest.approx(slope, rel=1e-6, abs=1e-6)
        assert trigamma(x) == pytest.approx((digamma(x + step) - digamma(x - step)) / (2 * step), rel=1e-6)


def test_a_quantile_is_exceeded_with_its_chance():
    for freedom, t in enumerate(T95, start=1):
        assert quantile(0.05, freedom) == pytest.approx(t, abs=1e-3)


def chi_squared(draw, freedom):
    return draw.gammavariate(freedom / 2, 2)


@pytest.mark.parametrize("shared", [2.0, 8.0])
def test_the_spread_that_variances_were_drawn_from_is_found(shared):
    draw = random.Random(1)
    freedoms = [draw.choice((3, 5, 8)) for _ in range(20_000)]
    true = [0.09 * shared / chi_squared(draw, shared) for _ in freedoms]
    measured = [v * chi_squared(draw, d) / d for v, d in zip(true, freedoms, strict=True)]
    found = Spread.of(measured, freedoms, most=math.inf)
    assert found.freedom == pytest.approx(shared, rel=0.1)
    assert found.variance == pytest.approx(0.09, rel=0.05)


def test_what_is_pooled_lies_between_own_and_common_and_never_knows_more_than_the_runs_do():
    alike = Spread.of([0.04] * 6, [1] * 6, most=5)
    assert alike.freedom == 5
    variance, freedom = alike.with_own(0.0, 1)
    assert 0 < variance < alike.variance
    assert freedom == 6
    assert Spread().with_own(0.3, 2) == (0.3, 2)  # nothing is pooled
    assert Spread.of([0.1, 0.2], [1, 1], most=5) == Spread()  # two say nothing of a third
    assert Spread.of([0.0] * 4, [1] * 4, most=5) == Spread()
    assert Spread.of([0.1] * 4, [1] * 4, most=0) == Spread()


def test_with_two_seeds_pooled_errors_keep_their_level_and_see_what_own_errors_do_not():
    draw = random.Random(2)
    sigma, seen = 0.2, {"own": 0, "pooled": 0, "false": 0}
    for _ in range(300):
        pairs = [[draw.gauss(mean, sigma) for _ in range(2)] for mean in [0.0] * 10 + [0.6] * 10]
        means = [sum(pair) / 2 for pair in pairs]
        variances = [(pair[0] - pair[1]) ** 2 / 2 for pair in pairs]
        spread = Spread.of(variances, [1] * 20, most=20)
        for at, (mean, own) in enumerate(zip(means, variances, strict=True)):
            variance, freedom = spread.with_own(own, 1)
            clear = two_sided(mean / math.sqrt(variance / 2), freedom) <= LEVEL
            seen["pooled" if at >= 10 else "false"] += clear
            seen["own"] += at >= 10 and two_sided(mean / math.sqrt(own / 2), 1) <= LEVEL
    assert 0.03 < seen["false"] / 3000 < 0.07
    assert seen["pooled"] > 3 * seen["own"]


def test_the_difference_that_is_seen_is_seen_as_often_as_promised():
    draw = random.Random(3)
    spread = Spread(variance=0.04, freedom=12)
    size, found = spread.seen(5), 0
    for _ in range(4000):
        values = [draw.gauss(size, 0.2) for _ in range(5)]
        mean = sum(values) / 5
        own = sum((value - mean) ** 2 for value in values) / 4
        variance, freedom = spread.with_own(own, 4)
        found += two_sided(mean / math.sqrt(variance / 5), freedom) <= LEVEL
    assert found / 4000 == pytest.approx(POWER, abs=0.04)
    assert spread.seen(2) > spread.seen(5)


def test_a_verdict_says_where_pooled_errors_decide_otherwise():
    lines = [*seeds("dense", 4.0, 4.0), *seeds("pp-8", 4.03, 4.05), *seeds("het-8", 4.01, 4.0104)]
    for row, apart in (("pp-24", 0.015), ("pp-96", 0.012), ("het-24", 0.018), ("het-96", 0.009)):
        lines += seeds(row, 4.2 - apart / 2, 4.2 + apart / 2)
    rows = ("pp-8", "het-8", "pp-24", "pp-96", "het-24", "het-96")
    page = "\n".join(f"{{{{verdict {row} dense full}}}}" for row in rows)
    told = dict(zip(rows, render(page, Book(lines, SCALE)).splitlines()[1:], strict=True))
    assert told["het-8"] == "higher by 0.25 ± 0.00 % (not by pooled errors)"  # two seeds that agree by luck
    assert told["pp-8"] == "not clearly different (+1.00 ± 0.25 % ‡)"
