"""The finish table: what is run, and what its page says of fabricated lines whose losses are known."""

import pytest
import torch
from result_lines import line as fabricated_line

from experiments import trial
from experiments.budget import stage_bytes
from experiments.catalog import rows_of
from experiments.estimates import Book
from experiments.finish import dominating, enough
from experiments.paper import finishes
from experiments.plots import draw_all
from experiments.render import render
from experiments.tables import pick_scale, recipe_of
from experiments.trial import run_trial, run_trials
from experiments.work import all_runs, jobs_of, pick_tables
from isthmus.config import dump_recipe, parse_recipe
from isthmus.errors import ConfigError

SCALE = pick_scale("10m")
SMALL = ["replicas.edge.count=2"]  # instead of 8


def lines_of(row, fulls, pipelined=None, at=None):
    """Three seeds; `at`: (plain, compressed) where finishing begins."""
    recipe, lines = recipe_of(rows_of(SCALE)[row], SCALE, 0, "", SCALE.lr), []
    begins = recipe.outer.rounds - recipe.finish.rounds
    for seed, full in enumerate(fulls):
        pipe = full if pipelined is None else pipelined[seed]
        curve = [[0, 9.0, 9.0, 9.0], [recipe.outer.rounds, full, pipe, pipe]]
        if at:
            curve.insert(1, [begins, *at, at[1]])
        closed = pipe + 0.5 if recipe.finish.rounds else None
        lines.append(fabricated_line(SCALE, row, seed, full, pipe, pipe, curve=curve, loss_closed=closed))
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
    assert [cell.split()[0] for cell in cells[4:8]] == ["5.200", "4.300", "4.350", "4.850"]
    gaps = [100 * 0.15 / base for base in (4.1, 4.2, 4.3)]
    assert float(cells[8].split()[0]) == pytest.approx(sum(gaps) / 3, abs=0.006)
    assert cells[11] == "3"
    assert "| 1/64 | opened over 5 rounds |" in text
    assert "not run" in text


def test_bytes_stand_beside_a_finish_and_so_does_what_is_lower_with_no_more_of_them():
    [row] = [r for r in render("{{finish}}", Book(some_lines(), SCALE)).splitlines() if "over 5 rounds" in r][
        :1
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    closed, opened = (recipe_of(rows_of(SCALE)[n], SCALE, 0, "", SCALE.lr) for n in ("pp-8", "dense"))
    # Five of a hundred rounds send whole streams.
    sent = (95 * stage_bytes(closed) + 5 * stage_bytes(opened)) / (100 * stage_bytes(opened))
    assert cells[3] == f"{100 * sent:.1f} %"
    assert cells[10] == ""  # nothing that sends as little is lower
    lines = [
        *lines_of("pp-64-open-20", [5.0] * 3),
        *lines_of("pp-24", [4.9] * 3),
        *lines_of("pp-8", [4.8] * 3),
    ]
    assert dominating(Book(lines, SCALE), "pp-64-open-20") == "pp-8"
    assert dominating(Book(lines[:6], SCALE), "pp-64-open-20") == "pp-24"
    assert dominating(Book(lines[:6], SCALE), "pp-24") is None


def test_what_is_lower_may_be_any_row_that_differs_in_what_crosses_boundaries_alone():
    def cell(*lines):
        text = render("{{finish}}", Book([*lines_of("pp-8-open-20", [5.0] * 3), *lines], SCALE))
        [row] = [part for part in text.splitlines() if "| 1/8 | opened over 20 rounds" in part]
        return row.split("|")[11].strip()

    assert cell(*lines_of("pp-4", [4.9])) == "`pp-4` throughout (one seed)"  # by seed 0 alone
    assert cell(*lines_of("pp-4", [5.1])) == ""
    wire = lines_of("pp-4-int5", [4.8] * 3)
    assert cell(*lines_of("pp-4", [4.9]), *wire) == "`pp-4-int5` throughout"
    assert cell(*lines_of("pp-2", [4.0] * 3)) == ""  # more bytes
    for other in ("adamw-pp-8", "muon-pp-8-int5", "pp-8-star", "pp-8-more", "pp-8-full-5", "het-8"):
        assert cell(*lines_of(other, [4.0] * 3)) == "", other


def test_enough_is_the_fewest_rounds_that_keep_the_bound():
    book = Book(some_lines(), SCALE)
    assert enough(book, "1/8", 2, "open").startswith("10 of 100 rounds (")
    assert enough(book, "1/8", 5, "open").startswith("5 of 100 rounds (")
    assert enough(book, "1/8", 40, "open") == "no round: it is so without"
    assert enough(book, "1/8", -50, "open") == "more than the 20 rounds that were tried"
    assert enough(book, "1/64", 2, "open") == "not run"
    assert enough(book, "1/8", 2, "full") == "not run"
    with pytest.raises(ConfigError, match="there are 1/8, 1/64"):
        enough(book, "1/3", 2, "open")
    with pytest.raises(ConfigError, match="there are open, full"):
        enough(book, "1/8", 2, "ajar")


def test_the_plot_is_drawn_once_a_finished_run_is_there(tmp_path):
    lines = some_lines()
    assert "results-finish.svg" in [path.name for path in draw_all(Book(lines, SCALE), tmp_path)]
    assert "opened step by step" in (tmp_path / "results-finish.svg").read_text()
    without = [one for one in lines if "open" not in one["row"]]
    assert "results-finish.svg" not in [path.name for path in draw_all(Book(without, SCALE), tmp_path)]


def test_runs_that_finish_are_trained_with_the_run_that_does_not():
    runs = all_runs(pick_tables(["finish"], SCALE), SCALE, "c/", [])
    jobs = {(job.runs[0].row.name, job.seed): job for job in jobs_of(runs)}
    assert set(jobs) == {(name, seed) for name in ("dense", "pp-8", "pp-64") for seed in (0, 1, 2)}
    job = jobs["pp-64", 1]
    ways = finishes(SCALE)
    assert len(job.runs) == 1 + len(ways)
    once = runs[0].tokens // SCALE.rounds
    assert job.trained_tokens == once * (SCALE.rounds + sum(n for _, n in ways))


def test_what_is_shared_is_trained_once_and_gives_what_separate_runs_give():
    scale = pick_scale("toy")
    settings = [*SMALL, "data.eval_every=1", "outer.rounds=3", "inner.warmup_steps=1"]
    text = dump_recipe(recipe_of(rows_of(scale)["pp-8"], scale, 0, "builtin:sample", scale.lr))
    wanted = [("none", parse_recipe(text, settings))]
    for how, n in (("open", 1), ("open", 2), ("full", 2)):
        finish = [f"finish.rounds={n}", f"finish.how={how}"]
        wanted.append((f"{how}-{n}", parse_recipe(text, settings + finish)))
    timed = ("seconds", "tokens_per_second")
    together = [
        {k: v for k, v in line.items() if k not in timed} for line in run_trials(wanted, "toy", "cpu", "here")
    ]
    apart = [
        {k: v for k, v in run_trial(row, "toy", recipe, "cpu", "here").items() if k not in timed}
        for row, recipe in wanted
    ]
    assert together == apart
    recipe, whole = wanted[2][1], trial.Course()  # without a stop where finishing begins
    trial._train(recipe, trial.checked_corpus(recipe), torch.device("cpu"), "fp32", whole, range(1, 4))
    assert whole.points[-1]["loss_full"] == pytest.approx(together[2]["loss_full"], abs=1e-6)
    assert whole.closed == pytest.approx(together[2]["loss_closed"], abs=1e-6)
    assert len({line["loss_full"] for line in together}) == 4
    assert [line["loss_closed"] is None for line in together] == [True, False, False, False]
    assert all(line["loss_closed"] != line["loss_pipelined"] for line in together)


def test_a_line_has_the_losses_where_finishing_begins_however_rarely_it_is_scored():
    scale = pick_scale("toy")
    recipe = recipe_of(rows_of(scale)["pp-8-open-1"], scale, 0, "builtin:sample", scale.lr)
    assert recipe.finish.rounds == 1
    often = parse_recipe(dump_recipe(recipe), SMALL)
    line = run_trial("pp-8-open-1", "toy", often, "cpu", "here")
    assert [point[0] for point in line["curve"]] == [0, 1, 2]
    settings = [*SMALL, "data.eval_every=50", "outer.rounds=4", "replicas.edge.wire=fp32"]
    rare = parse_recipe(dump_recipe(recipe), settings)
    line = run_trial("pp-8-open-1", "toy", rare, "cpu", "here")
    assert [point[0] for point in line["curve"]] == [0, 3, 4]
    (_, full, pipelined, _), (_, last_full, last_pipelined, _) = line["curve"][1:]
    assert full != pipelined
    assert last_full == last_pipelined
