"""The finish table: what is run, and what its page says of fabricated lines whose losses are known."""

import pytest
from fabricated import line

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.reproduce.figures import Book
from isthmus.reproduce.finish import enough
from isthmus.reproduce.plots import draw_all
from isthmus.reproduce.render import render
from isthmus.reproduce.tables import finishes, pick_scale, recipe_of, rows_of
from isthmus.reproduce.trial import run_trial
from isthmus.reproduce.work import all_runs, pick_tables

SCALE = pick_scale("10m")


def lines_of(row, fulls, pipelined=None, at=None):
    """Three seeds; `at`: (plain, compressed) where finishing begins."""
    recipe, lines = recipe_of(rows_of(SCALE)[row], SCALE, 0, "", SCALE.lr), []
    begins = recipe.outer.rounds - recipe.finish.rounds
    for seed, full in enumerate(fulls):
        pipe = full if pipelined is None else pipelined[seed]
        curve = [[0, 9.0, 9.0, 9.0], [recipe.outer.rounds, full, pipe, pipe]]
        if at:
            curve.insert(1, [begins, *at, at[1]])
        lines.append(line(SCALE, row, seed, full, pipe, pipe, curve=curve))
    return lines


def some_lines():
    lines = lines_of("dense", [4.0] * 3) + lines_of("pp-8", [5.0, 5.1, 5.2], [4.1, 4.2, 4.3])
    for n, full in ((2, 4.5), (5, 4.25), (10, 4.1), (20, 4.2)):
        lines += lines_of(f"pp-8-open-{n}", [full, full + 0.1, full + 0.2], at=(5.2, 4.3))
    return lines


def test_rounds_are_of_the_run_and_before_them_it_is_the_run_without():
    assert [n for how, n in finishes(SCALE) if how == "open"] == [2, 5, 10, 20]
    rows = rows_of(SCALE)
    plain, finished = (recipe_of(rows[name], SCALE, 0, "", SCALE.lr) for name in ("pp-64", "pp-64-open-5"))
    assert finished.outer == plain.outer
    assert finished.replicas == plain.replicas
    assert (finished.finish.rounds, plain.finish.rounds) == (5, 0)
    assert finished.opening(95) is None
    assert finished.opening(96) == 0.2
    runs = all_runs(pick_tables(["finish"], SCALE), SCALE, "c/", [])
    assert {run.seed for run in runs if run.row.name == "pp-8-full-20"} == {0, 1, 2}


def test_the_table_has_losses_before_and_after_and_their_distance_from_what_was_trained():
    text = render("{{finish}}", Book(some_lines(), SCALE))
    [row] = [part for part in text.splitlines() if "| opened over 5 rounds" in part and "1/8" in part]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    tokens = 5 * recipe_of(rows_of(SCALE)["pp-8"], SCALE, 0, "", SCALE.lr).round_tokens
    assert cells[2] == f"{tokens / 1e6:.1f} M"
    assert [cell.split()[0] for cell in cells[3:7]] == ["5.200", "4.300", "4.350", "4.350"]
    gaps = [100 * 0.15 / base for base in (4.1, 4.2, 4.3)]
    assert float(cells[7].split()[0]) == pytest.approx(sum(gaps) / 3, abs=0.006)
    assert cells[9] == "3"
    assert "| 1/64 | opened over 5 rounds |" in text
    assert "not run" in text


def test_enough_is_the_fewest_rounds_that_keep_the_bound():
    book = Book(some_lines(), SCALE)
    assert enough(book, "1/8", 2).startswith("10 of 100 rounds (")
    assert enough(book, "1/8", 5).startswith("5 of 100 rounds (")
    assert enough(book, "1/8", -50) == "more than the 20 rounds that were tried"
    assert enough(book, "1/64", 2) == "not run"
    with pytest.raises(ConfigError, match="there is 1/8, 1/64"):
        enough(book, "1/3", 2)


def test_the_plot_is_drawn_once_a_finished_run_is_there(tmp_path):
    lines = some_lines()
    assert "results-finish.svg" in [path.name for path in draw_all(Book(lines, SCALE), tmp_path)]
    assert "opened step by step" in (tmp_path / "results-finish.svg").read_text()
    without = [one for one in lines if "open" not in one["row"]]
    assert "results-finish.svg" not in [path.name for path in draw_all(Book(without, SCALE), tmp_path)]


def test_a_run_tells_the_losses_where_finishing_begins_however_rarely_it_is_scored():
    scale = pick_scale("toy")
    recipe = recipe_of(rows_of(scale)["pp-8-open-1"], scale, 0, "builtin:sample", scale.lr)
    assert recipe.finish.rounds == 1
    told = run_trial("pp-8-open-1", "toy", recipe, "cpu", "here")
    assert [point[0] for point in told["curve"]] == [0, 1, 2]
    rare = parse_recipe(told["recipe"], ["data.eval_every=50", "outer.rounds=4", "replicas.edge.wire=fp32"])
    told = run_trial("pp-8-open-1", "toy", rare, "cpu", "here")
    assert [point[0] for point in told["curve"]] == [0, 3, 4]
    (_, full, pipelined, _), (_, last_full, last_pipelined, _) = told["curve"][1:]
    assert full != pipelined
    assert last_full == last_pipelined
