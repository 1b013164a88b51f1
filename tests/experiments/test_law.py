"""The law's rows, and its fit on lines whose answer is known."""

import statistics

import pytest
from matplotlib.collections import PolyCollection
from result_lines import line

from experiments.catalog import rows_of
from experiments.estimates import Book
from experiments.law import (
    fit,
    growth,
    law_answer,
    law_claims,
    law_table,
    line_through,
    prices,
    slope_from_origin,
)
from experiments.law_rows import FULL, HS, OF, SEEDS, law_name
from experiments.plots import _law, draw_all
from experiments.tables import pick_scale, recipe_of

SCALE = pick_scale("12m")
ROWS = rows_of(SCALE)


def lines_of(price, wobble=0.02):
    """`price(compressed share, H)` in percent, a little apart from seed to seed."""
    lines = []
    for h in HS:
        for seed in SEEDS:
            base = 4.0 + seed / 10
            lines.append(line(SCALE, law_name(h, OF), seed, base))
            for full in FULL:
                percent = price(1 - full / OF, h) + wobble * ((seed * 7 + full * 3 + h) % 5 - 2)
                lines.append(line(SCALE, law_name(h, full), seed, base * (1 + percent / 100)))
    return lines


def test_within_one_h_every_share_has_the_same_rounds_and_all_have_the_same_tokens():
    by_h = {}
    for h in HS:
        for full in (*FULL, OF):
            recipe = recipe_of(ROWS[law_name(h, full)], SCALE, 0, "", SCALE.lr)
            compressing = sum(one.count for one in recipe.replicas if one.compressed)
            assert (recipe.num_replicas, compressing) == (OF, OF - full)
            assert not recipe.subspace.decay_t_perp
            by_h.setdefault(h, set()).add((recipe.outer.rounds, recipe.outer.rounds * recipe.round_tokens))
    assert all(len(found) == 1 for found in by_h.values())
    assert len({tokens for found in by_h.values() for _, tokens in found}) == 1


def test_a_price_that_follows_the_law_is_found_with_its_slope_and_its_growth():
    book = Book(lines_of(lambda share, h: 2.0 * (h / 30) ** 0.5 * share), SCALE)
    for h in HS:
        found = fit(prices(book, h, "full"))
        assert found.slope.mean == pytest.approx(2.0 * (h / 30) ** 0.5, abs=0.05)
        assert abs(found.intercept.mean) < 0.05
        assert found.power.mean == pytest.approx(1.0, abs=0.06)
        assert found.slope.count == len(SEEDS)
    grows = growth(book, "full")
    assert grows.mean == pytest.approx(0.5, abs=0.02)
    answer = law_answer(book)
    assert "falls clearly with the share of full replicas at H = 5, 30, 100" in answer
    assert "not in proportion to what is compressed is clear at no H" in answer
    assert "it grows, clearly: as H to the power +0.50" in answer


def test_a_price_with_a_floor_is_not_called_proportional_and_one_that_shrinks_with_h_falls():
    book = Book(lines_of(lambda share, h: (1.5 + share) * (30 / h) ** 0.2), SCALE)
    found = fit(prices(book, 30, "pipelined"))
    assert found.intercept.mean == pytest.approx(1.5, abs=0.05)
    assert found.free_slope.mean == pytest.approx(1.0, abs=0.05)
    assert found.power.mean < 0.5
    assert "not in proportion to what is compressed is clear at H = 5, 30, 100" in law_answer(book)
    assert "it falls, clearly: as H to the power -0.20" in law_answer(book)
    assert law_table(book).count("| no | 5 |") == 2 * len(HS)


def test_a_price_of_chance_alone_is_not_said_to_grow():
    book = Book(lines_of(lambda share, h: share, wobble=0.3), SCALE)
    assert growth(book, "full").mean == pytest.approx(0.0, abs=0.1)
    assert "not clearly" in law_answer(book)


def test_seeds_without_every_share_are_left_out_and_nothing_is_said_before_it_is_run(tmp_path):
    lines = lines_of(lambda share, h: 2 * share)
    assert fit(prices(Book(lines[1:], SCALE), HS[0], "full")).slope.count == len(SEEDS) - 1
    assert "Not run yet" in law_answer(Book(lines[:5], SCALE))
    assert "One seed so far" in law_answer(Book(lines[:10], SCALE))
    assert "not run" in law_table(Book(lines[:1], SCALE))
    assert "results-law.svg" in [path.name for path in draw_all(Book(lines, SCALE), tmp_path)]
    assert "results-law.svg" not in [path.name for path in draw_all(Book(lines[:1], SCALE), tmp_path)]


def test_in_both_panels_of_the_figure_a_line_has_the_standard_error_of_its_seeds_around_it():
    book = Book(lines_of(lambda share, h: 1 + 2 * share, wobble=0.3), SCALE)
    for view, axes in zip(("full", "pipelined"), _law(book).axes, strict=True):
        bands = [one for one in axes.collections if isinstance(one, PolyCollection)]
        assert len(bands) == len(HS)
        for h, band in zip(HS, bands, strict=True):
            (found,) = band.get_paths()
            ends = sorted(y for x, y in found.vertices if x == 1)
            seeds = prices(book, h, view).values()
            if view == "full":
                at_one = [slope_from_origin(seed) for seed in seeds]
            else:
                at_one = [sum(line_through(list(seed), list(seed.values()))) for seed in seeds]
            error = statistics.stdev(at_one) / len(at_one) ** 0.5
            assert error > 0
            assert ends[0] == pytest.approx(statistics.mean(at_one) - error)
            assert ends[-1] == pytest.approx(statistics.mean(at_one) + error)


def test_a_session_cut_short_leaves_an_answer_for_the_h_that_are_whole():
    lines = [one for one in lines_of(lambda share, h: 2 * share) if "-h100-" not in one["row"]]
    answer = law_answer(Book(lines, SCALE))
    assert "falls clearly with the share of full replicas at H = 5, 30;" in answer
    assert "Of H = 100 no seed has every share yet" in answer
    assert [words for words, _ in law_claims(Book(lines, SCALE))] == ["cannot be told yet"] * 2


@pytest.mark.parametrize(
    ("price", "says"),
    [
        (lambda share, h: 2.0 * (h / 30) ** 0.5 * share, ("holds", "holds")),
        (lambda share, h: (1.5 + share) * (30 / h) ** 0.2, ("does not hold", "does not hold")),
    ],
)
def test_what_the_papers_claims_are_answered_with(price, says):
    assert tuple(answer for answer, _ in law_claims(Book(lines_of(price), SCALE))) == says


def test_a_line_through_the_origin_has_to_be_shown_and_noise_does_not_show_it():
    noisy = Book(lines_of(lambda share, h: 9 * share * h**0.1, wobble=1.5), SCALE)
    assert law_claims(noisy)[0][0] == "cannot be told here"
