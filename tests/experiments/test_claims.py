"""Answers to the claims of the papers, from lines whose answers are known: every claim has one, always."""

import json
import re
import shlex
from itertools import pairwise

import pytest
from regime_lines import all_trials, regime_line, regime_seeds
from result_lines import line

from experiments.claim_judges import FAILS, HOLDS, OPEN, YET, AtMost, Fixed, Order, Same, answered
from experiments.claims import claims_of
from experiments.estimates import Book
from experiments.render import render
from experiments.tables import REGIME, pick_scale
from experiments.tuning import ROWS, regime_name
from isthmus.cli.main import main

SCALE = pick_scale("12m")


def seeds(row, fulls, pipelined=None):
    pairs = zip(fulls, pipelined or fulls, strict=True)
    return [line(SCALE, row, seed, full, pipe) for seed, (full, pipe) in enumerate(pairs)]


def near(row, loss, apart=0.001):
    """Three seeds of one row, a little apart, so that a difference between two rows is clear."""
    return seeds(row, [loss - apart, loss, loss + 1.3 * apart])


def told(lines, regime=None):
    """By claim: the cells of the table, drawn as a page draws it."""
    book = Book(lines, SCALE)
    book.regime = None if regime is None else Book(regime, pick_scale(REGIME))
    table = render("{{papers}}", book).splitlines()[1:]
    cells = [[cell.strip() for cell in one.strip("|").split("|")] for one in (table[0], *table[2:])]
    return {one[0]: one[1:] for one in cells}


def whole_regime(num_seeds=5):
    """Later rows of ROWS have the higher loss."""
    return [
        regime_line(name, seed, 3.0 + n / 20 + (seed * 7 % 5) / 1000 + n * seed / 10_000)
        for n, (name, *_) in enumerate(ROWS)
        for seed in range(num_seeds)
    ]


def command_in(cell):
    [found] = re.findall(r"`(isthmus [^`]*)`", cell)
    return shlex.split(found)


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
    answer, evidence = answered(Order("het-8", "pp-8", -1), one, str)
    assert answer == YET
    command = "`isthmus reproduce 1 --corpus corpus12m/ --only het-8 --only pp-8`"
    assert evidence == f"-2.00 %, one seed; {command}"
    two = Book([*seeds("pp-8", [5.0, 5.1]), line(SCALE, "het-8", 0, 4.9)], SCALE)
    command = "`isthmus reproduce 1-star --corpus corpus12m/ --only het-8-star`"
    assert answered(Order("het-8-star", "pp-8", -1), two, str) == (YET, command)


def test_rows_of_two_seeds_that_share_fewer_than_two_name_the_seeds_that_are_missing():
    every = [line(SCALE, "pp-8", seed, 5.0 + seed / 100) for seed in (0, 1)]
    for others, missing in (((2, 3), "0,1"), ((1, 2), "0")):
        half = [line(SCALE, "het-8", seed, 4.9 + seed / 100) for seed in others]
        answer, evidence = answered(Order("het-8", "pp-8", -1), Book([*every, *half], SCALE), str)
        assert answer == YET
        command = f"isthmus reproduce 1 --corpus corpus12m/ --only het-8 --seeds {missing}"
        plural = "s" * (len(missing) > 1)
        assert f"`het-8` without seed{plural} {missing.replace(',', ', ')}: `{command}`" in evidence
        made = [line(SCALE, "het-8", int(seed), 4.9) for seed in missing.split(",")]
        answer, _ = answered(Order("het-8", "pp-8", -1), Book([*every, *half, *made], SCALE), str)
        assert answer != YET  # the command makes what was missing


def test_a_command_of_the_regime_runs_the_rows_that_lack_a_seed_and_the_trials_that_they_wait_for(
    tmp_path, capsys
):
    lines = [*regime_seeds("dense", 3.0, 3.1), *regime_seeds("adamw", 2.9)]
    for trials, waits in (
        (all_trials(), set()),
        (all_trials()[:-2], {"trial-adamw-het-6", "trial-adamw-het-7"}),
    ):
        cells = told(near("dense", 4.0), [*lines, *trials])
        for claim, rows in {
            "SparseLoCo is level with per-step AdamW": {"regime-adamw"},
            "Under AdamW half compressed is above": {"regime-adamw-het-8", "regime-adamw-pp-8", *waits},
        }.items():
            [cell] = [row[4] for words, row in cells.items() if words.startswith(claim)]
            _, *arguments = command_in(cell)
            at = arguments.index("--corpus")
            assert arguments[at : at + 2] == ["--corpus", "corpus24m/"]
            del arguments[at : at + 2]  # which is not on this machine
            assert main([*arguments, "--dry-run", "--json", "--results", str(tmp_path)]) == 0
            assert {run["row"] for run in json.loads(capsys.readouterr().out)["runs"]} == rows


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
    lines = [one for n, row in enumerate(rows) for one in near(row, 4.0 + n / 10)]
    _, *cells = told(lines, regime=[]).values()
    assert len(cells) == len(claims_of(Book([], SCALE)))
    assert all(any(word in one[1] for word in (HOLDS, FAILS, OPEN, YET)) for one in cells)
    assert {one[4] for one in cells} == {YET, "asked at 12m only", "–"}
    _, *cells = told(lines).values()  # nothing is known of the regime
    assert {one[4] for one in cells} == {YET, "–"}


def test_the_regime_answers_beside_the_small_scale_once_its_rows_are_there():
    cells = told(near("dense", 4.0), whole_regime())
    assert (
        cells["claim"][4] == f"{REGIME}: every method tuned (20.5 M parameters, 102.2 M tokens, 4 replicas)"
    )
    half = cells["Half compressed is below all compressed at 1/8"]
    assert half[1] == f"**{YET}**"
    assert half[4].startswith(f"**{HOLDS}** (")  # het-8 comes before pp-8 in ROWS, so its loss is lower here
    assert "5 seeds" in half[4]
    for words in ("Grassmann steps change nothing: a random U suffices", "H lets bias compound"):
        assert cells[words][4] == "asked at 12m only"
    assert cells["The same at 1B (+5.9 %)"][4] == "–"
    tuned = cells["With them half is still below all"][4]
    assert tuned == half[4].replace("** (", "** (at 1/8, where each is tuned for itself: ")


def test_what_is_asked_of_every_ratio_names_those_that_the_regime_has_and_those_without_a_row():
    for num_seeds, says in ((5, HOLDS), (1, YET)):
        cells = told(near("dense", 4.0), whole_regime(num_seeds))
        every = cells["It is at every ratio"][4]
        assert every.startswith(f"**1/8, 1/24: {says}** (1/8: ")  # in ROWS het-24 comes before pp-24, too
        assert "; 1/24: " in every
        price = cells["Bias grows as k/d falls: so does the price"][4]
        assert price.startswith(f"**from 1/8 to 1/24: {says}** (")
        for cell in (every, price, cells["Its advantage grows as k/d falls"][4]):
            assert "1/96, 1/192, 1/384: no such row at 24m-4" in cell
            assert "below" not in cell  # no table of the page is of the regime's ratios
    assert "table of scores below" in cells["It is at every ratio"][2]


def test_a_trend_that_lacks_seeds_names_every_row_that_lacks_them():
    lacking = {"regime-pp-24", "regime-het-24"}
    lines = [one for one in whole_regime(2) if not (one["row"] in lacking and one["seed"])]
    cells = told([], [*lines, *all_trials()])
    for words, rows in {
        "Its advantage grows as k/d falls": lacking,
        "Bias grows as k/d falls: so does the price": {"regime-pp-24"},  # it is of all compressed alone
    }.items():
        named = command_in(cells[words][4])
        assert {row for option, row in pairwise(named) if option == "--only"} == rows


@pytest.mark.parametrize(("more", "says"), [(-1.0, HOLDS), (0.2, HOLDS), (0.5, OPEN), (1.0, FAILS)])
def test_compression_under_adamw_is_asked_to_cost_at_most_half_a_point_more(more, says):
    bases = [4.0, 4.1, 4.2]
    rows = {"dense": 0.0, "adamw": 0.0, "pp-8": 5.0, "adamw-pp-8": 5.0 + more}
    lines = []
    for n, (row, percent) in enumerate(rows.items()):
        apart = [percent + 0.002 * (seed - 1) * n for seed in range(3)]
        lines += seeds(row, [base * (1 + each / 100) for base, each in zip(bases, apart, strict=True)])
    [cells] = [row for words, row in told(lines).items() if "asked: at most half a point" in words]
    assert cells[1] == f"**{says}**"
    assert cells[2].endswith("points more than under SparseLoCo, asked: at most +0.5")


def test_answers_are_counted_by_what_all_their_parts_have():
    book = Book(near("dense", 4.0), SCALE)
    book.regime = Book(whole_regime(), pick_scale(REGIME))
    small, regime = render("{{papers}}\n{{tally}}", book).splitlines()[-1].split("; ")
    asked = [claim.asked(regime_name) for claim in claims_of(book.regime)]
    answers = [judge(book.regime, regime_name)[0] for judge in asked if not isinstance(judge, Fixed)]
    there = [answer for answer in answers if answer != "no such row"]
    plain = [re.sub(r"^from [^:]*: ", "", answer) for answer in there]
    counts = [int(n) for n in re.findall(r"\d+(?= (?:hold|do not hold|differ|cannot))", regime)]
    assert f"of {len(there)} claims" in regime
    assert counts[0] >= plain.count(HOLDS) > 0  # also where every part holds
    assert counts[1] >= plain.count(FAILS)
    assert sum(counts) == len(there)
    assert (
        f"of {len(claims_of(book))} claims that were asked 1 hold, 0 do not hold, 0 differ by score" in small
    )
