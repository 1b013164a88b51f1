"""What is said of the verdicts, and the figure of everything, from lines whose answers are known."""

import pytest
from regime_lines import regime_seeds
from result_lines import line

from experiments import checks
from experiments.bytes_plot import Point, draw_bytes, draw_regime_bytes, frontier, points
from experiments.estimates import Book
from experiments.render import render
from experiments.tables import REGIME, pick_scale

SCALE = pick_scale("12m")


def seeds(row, fulls, pipelined, **facts):
    pairs = zip(fulls, pipelined, strict=True)
    return [line(SCALE, row, seed, full, pipe, **facts) for seed, (full, pipe) in enumerate(pairs)]


def test_the_share_of_a_gain_that_is_scoring_is_what_the_boundaries_do_not_show():
    # Through the boundaries 0.1 better; mixed, where half is scored without them, 0.4 better.
    lines = [*seeds("pp-8", [6.0] * 3, [5.0] * 3), *seeds("het-8", [4.3] * 3, [4.9] * 3, mixed=4.6)]
    lines[0]["loss_mixed"] = lines[1]["loss_mixed"] = lines[2]["loss_mixed"] = 5.0
    assert checks.scoring(Book(lines, SCALE), "het-8", "pp-8") == "75 %"
    assert checks.scoring(Book(lines, SCALE), "pp-8", "het-8") == "no gain"
    assert checks.scoring(Book(lines[:3], SCALE), "het-8", "pp-8") == "not run"
    assert checks.scoring(Book([lines[0], lines[3]], SCALE), "het-8", "pp-8") == "75 % (one seed)"


def test_rows_of_two_commits_are_named():
    lines = [*seeds("dense", [4.0, 4.1], [4.0, 4.1]), *seeds("pp-8", [4.3, 4.5], [4.3, 4.5], commit="other")]
    lines += seeds("het-8", [4.2, 4.35], [4.2, 4.35])
    text = render("{{verdict pp-8 dense full}} {{verdict het-8 dense full}}\n{{commits}}", Book(lines, SCALE))
    assert text.splitlines()[-1] == "1 of 2; not of `pp-8` and `dense`"


def test_rows_of_two_commits_that_compute_the_same_for_one_of_them_are_counted_apart():
    early = [*seeds("dense", [4.0, 4.1], [4.0, 4.1]), *seeds("pp-24", [4.4, 4.6], [4.4, 4.6])]
    late = [*seeds("pp-8", [4.3, 4.5], [4.3, 4.5], commit="other")]
    book = Book([*early, *late], SCALE)
    digest = early[0]["digest"]
    page = "{{verdict pp-8 dense full}} {{verdict pp-8 pp-24 full}}\n{{commits}}\n{{later}}"

    def told(curves):
        book.curves = curves
        return render(page, book).splitlines()[-2:]

    both = "`pp-8` and `dense`, `pp-8` and `pp-24`"
    assert told({}) == [f"0 of 2; not of {both}", "not run"]
    assert told({(digest, "c0ffee"): [[1, 4.0]]})[0] == f"0 of 2; not of {both}"
    apart = {(digest, "c0ffee"): [[1, 4.0]], (digest, "other"): [[1, 4.000001]]}
    assert told(apart)[0] == f"0 of 2; not of {both}"  # in the last digit, too
    shown, later = told({(digest, "c0ffee"): [[1, 4.0]], (digest, "other"): [[1, 4.0]]})
    assert shown == (
        "0 of 2; 1 more are of commits that compute the same for them on a CPU; not of `pp-8` and `pp-24`"
    )
    assert later.startswith("the code of `other` computes the same as the commit that ran it for 1 of 3 ")


def test_a_run_repeated_with_its_seed_is_told_from_one_that_was_shared():
    plain = seeds("pp-8", [5.0, 5.2], [5.0, 5.2])
    for entry in plain:
        entry["curve"].insert(1, [80, 6.0, 5.0, 5.0])
    again = seeds("pp-8-open-20", [4.9, 5.1], [4.9, 5.1], rounds_shared=80)
    again[0]["curve"].insert(1, [80, 6.0, 5.05, 5.05])
    again[1]["curve"].insert(1, [80, 6.0, 5.0, 5.0])  # the same to the last digit: trained as one
    book = Book([*plain, *again], SCALE)
    assert checks.repeated(book, "1/8") == {0: pytest.approx(1.0)}
    assert checks.repeats(book, "1/8").startswith("1.00 % (repeated once), where seeds differ by 2.77 %")
    assert checks.repeats(book, "1/64") == "not run"


def test_a_row_of_the_regime_that_is_run_once_more_is_held_against_itself_and_its_spread():
    def told(*lines):
        return checks.run_again(Book(lines, pick_scale(REGIME)))

    first, again = regime_seeds("dense", 3.0, 3.1), regime_seeds("dense-again", 3.03, 3.069)
    assert told(*first) == told(*again) == "not run yet"
    beside = "where seeds differ by 2.32 %; `het-8` not run yet"
    assert told(*first, *again) == f"`dense` 1.00 % (repeated 2 times), {beside}"  # one up, one down
    assert told(*first, again[0]) == f"`dense` 1.00 % (repeated once), {beside}"
    assert told(first[0], *again).startswith("`dense` 1.00 % (repeated once), where there is one seed;")
    other = regime_seeds("dense-again", 3.03, commit="other")
    assert "2.32 %, by another commit;" in told(*first, *other)


def test_how_many_are_judged_and_how_many_are_clear():
    lines = [*seeds("dense", [4.0, 4.2], [4.0, 4.2]), *seeds("pp-8", [5.0, 5.25], [5.0, 5.25])]
    lines += seeds("het-8", [4.0, 4.3], [4.0, 4.3])
    page = "{{verdict pp-8 dense full}} {{verdict het-8 dense full}} {{verdict pp-8 dense full}}\n{{judged}}"
    last = render(page, Book(lines, SCALE)).splitlines()[-1]
    own = "of 2 comparisons 1 are clear one by one, 1 among all, 1 by Holm's"
    assert last == f"{own} (by pooled errors 1, 1 and 1)"  # two comparisons are too few to pool


def slow_frontier(found, sent):
    """Nobody with as few bytes is as low."""
    return {
        p.name
        for p in found
        if not any(sent(q) <= sent(p) and q.loss <= p.loss and q is not p for q in found)
    }


def test_the_frontier_is_of_the_rows_that_nothing_dominates():
    found = [Point(str(n), (n * 37 % 11) / 10, (n * 53 % 17) + n / 100, 1.0, "", 3) for n in range(40)]
    best = frontier(found, lambda p: p.stages)
    assert {p.name for p in best} == slow_frontier(found, lambda p: p.stages)
    assert [p.stages for p in best] == sorted(p.stages for p in best)


def test_every_row_with_a_result_is_a_point_with_the_bytes_of_its_whole_run():
    lines = [
        *seeds("dense", [4.0], [4.0]),
        *seeds("pp-8", [5.0], [4.9]),
        *seeds("pp-8-full-20", [4.9], [4.9]),
    ]
    lines += [*seeds("pp-8-more", [4.0], [4.0]), *seeds("sparseloco-lr-0.002", [4.0], [4.0])]
    found = {point.name: point for point in points(Book(lines, SCALE))}
    assert set(found) == {"dense", "pp-8", "pp-8-full-20"}  # more tokens, and candidates, are left out
    mean = 0.8 * found["pp-8"].stages + 0.2 * found["dense"].stages
    assert found["pp-8-full-20"].stages == pytest.approx(mean)
    assert draw_bytes(Book(lines, SCALE)) is not None
    assert draw_bytes(Book(lines[:1], SCALE)) is None


def test_the_regimes_rows_are_points_too_and_those_on_one_another_share_a_label():
    lines = [*regime_seeds("dense", 3.49), *regime_seeds("diloco", 3.491), *regime_seeds("pp-8", 3.8)]
    figure = draw_regime_bytes(Book([*lines, *regime_seeds("adamw", 3.4)], pick_scale(REGIME)))
    left, right = ([text.get_text() for text in axes.texts] for axes in figure.axes)
    assert left == ["dense, diloco", "adamw", "pp-8"]  # the same boundaries, other exchanges
    assert right == ["dense", "adamw", "pp-8", "diloco"]
    assert draw_regime_bytes(None) is None
