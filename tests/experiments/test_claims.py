"""Answers to the claims of the papers, from lines whose answers are known: every claim has one, always."""

import pytest
from result_lines import line

from experiments.claims import FAILS, HOLDS, OPEN, YET, AtMost, Order, Same, claims_of, claims_table
from experiments.estimates import Book
from experiments.lines import digest
from experiments.render import render
from experiments.tables import REGIME, pick_scale, recipe_of
from experiments.tuning import REPORT, ROWS, chosen, regime_name, scored_on

SCALE = pick_scale("12m")


def seeds(row, fulls, pipelined=None):
    pairs = zip(fulls, pipelined or fulls, strict=True)
    return [line(SCALE, row, seed, full, pipe) for seed, (full, pipe) in enumerate(pairs)]


def near(row, loss, apart=0.001):
    """Three seeds of one row, a little apart, so that a difference between two rows is clear."""
    return seeds(row, [loss - apart, loss, loss + 1.3 * apart])


def rows_of_claims(table):
    cells = [[cell.strip() for cell in one.strip("|").split("|")] for one in table.splitlines()[2:]]
    return {one[0]: one[1:] for one in cells}


def test_an_order_is_answered_by_its_direction_and_its_clearness():
    book = Book([*near("pp-8", 5.0), *near("het-8", 4.9)], SCALE)
    assert Order("het-8", "pp-8", -1)(book, str)[0] == HOLDS
    assert Order("het-8", "pp-8", +1)(book, str)[0] == FAILS
    noisy = Book([*seeds("pp-8", [5.0, 5.1, 4.8]), *seeds("het-8", [4.9, 5.2, 4.6])], SCALE)
    assert Order("het-8", "pp-8", -1)(noisy, str)[0] == OPEN


def test_a_gain_that_only_the_mixed_score_has_is_told_from_one_through_the_same_boundaries():
    every = seeds("pp-8", [5.2, 5.21, 5.19], [5.0, 5.01, 4.99])
    for one in every:
        one["loss_mixed"] = one["loss_pipelined"]
    half = seeds("het-8", [4.6, 4.61, 4.592], [5.0, 5.012, 4.987])
    answer, evidence = Order("het-8", "pp-8", -1)(Book([*every, *half], SCALE), str)
    assert answer == f"{HOLDS} by the paper's score; through the same boundaries it {OPEN}"
    assert "mixed: lower by" in evidence
    assert "pipelined: not clearly different" in evidence


def test_a_missing_row_or_a_single_seed_is_not_yet_and_names_the_command():
    one = Book([line(SCALE, "pp-8", 0, 5.0), line(SCALE, "het-8", 0, 4.9)], SCALE)
    answer, evidence = Order("het-8", "pp-8", -1)(one, str)
    assert answer == YET
    assert "-2.00 %, one seed; `isthmus reproduce 1 --only het-8`" in evidence
    answer, evidence = Order("het-8-star", "pp-8", -1)(one, str)
    assert (answer, evidence) == (YET, "`isthmus reproduce 1-star --only het-8-star`")


def test_no_change_has_to_be_shown_and_a_price_is_held_against_what_was_asked():
    close = Book([*near("pp-8", 5.0), *near("pp-8-grassmann", 5.001, 0.002)], SCALE)
    assert Same("pp-8-grassmann", "pp-8")(close, str)[0] == HOLDS
    noisy = Book([*near("pp-8", 5.0), *seeds("pp-8-grassmann", [4.9, 5.0, 5.1])], SCALE)
    assert (
        Same("pp-8-grassmann", "pp-8")(noisy, str)[0] == OPEN
    )  # a difference that is not clear shows nothing
    apart = Book([*near("pp-8", 5.0), *near("pp-8-grassmann", 5.2)], SCALE)
    assert Same("pp-8-grassmann", "pp-8")(apart, str)[0] == FAILS
    book = Book([*near("dense", 4.0), *near("pp-8", 4.2)], SCALE)
    assert AtMost("pp-8", "dense", 8.0)(book, str)[0] == HOLDS
    assert AtMost("pp-8", "dense", 3.0)(book, str)[0] == FAILS
    assert AtMost("pp-8", "dense", 5.0)(book, str)[0] == OPEN


def test_what_is_one_number_in_two_scores_is_one_comparison():
    every = [*near("pp-8", 5.0), *near("pp-8-projected", 4.9)]
    for one in every:
        one["loss_full"] = one["loss_pipelined"] + 0.1 * one["seed"]
        one["loss_mixed"] = one["loss_pipelined"]
    page = "{{verdict pp-8-projected pp-8 mixed}} {{verdict pp-8-projected pp-8 pipelined}}\n{{judged}}"
    assert render(page, Book(every, SCALE)).splitlines()[-1].startswith("of 1 comparisons")


@pytest.mark.parametrize("rows", [(), ("dense",), ("dense", "pp-8", "het-8", "adamw")])
def test_every_claim_has_an_answer_whatever_has_been_run(rows):
    book = Book([one for n, row in enumerate(rows) for one in near(row, 4.0 + n / 10)], SCALE)
    book.regime = Book([], pick_scale(REGIME))
    told = rows_of_claims(claims_table(book))
    assert len(told) == len(claims_of(book))
    assert all(any(word in cells[1] for word in (HOLDS, FAILS, OPEN, YET)) for cells in told.values())
    assert {cells[4] for cells in told.values()} <= {YET, "no such row", ""}


def test_the_regime_answers_beside_the_small_scale_once_its_rows_are_there():
    scale = pick_scale(REGIME)
    picks, rows = chosen(scale, []), Book([], scale).rows
    lines = []
    for n, (name, *_) in enumerate(ROWS):
        for seed in range(5):
            row = rows[regime_name(name)]
            found = digest(recipe_of(row, scale, seed, "corpus/", scale.lr, picks))
            loss = 3.0 + n / 20 + (seed * 7 % 5) / 1000 + n * seed / 10_000
            made = line(scale, regime_name(name), seed, loss) | {"digest": found}
            lines.append(made | {"corpus": scored_on(made["corpus"], REPORT)})
    book = Book(near("dense", 4.0), SCALE)
    book.regime = Book(lines, scale)
    told = rows_of_claims(claims_table(book))
    half = told["Half compressed is below all compressed at 1/8"]
    assert half[1] == f"**{YET}**"
    assert half[4].startswith(f"**{HOLDS}** (")  # het-8 comes before pp-8 in ROWS, so its loss is lower here
    assert "5 seeds" in half[4]
    assert told["Grassmann steps change nothing: a random U suffices"][4] == "no such row"
