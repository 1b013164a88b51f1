"""The lists of rows: they are recipes, at the paper's scale the paper's, and a digest tells them apart."""

import dataclasses

import pytest

from experiments.catalog import home_of, rows_of, tables_of
from experiments.lines import digest
from experiments.tables import SCALES, pick_scale, recipe_of
from experiments.work import all_runs, jobs_of, next_job, pick_tables
from isthmus.config import load_recipe

SCALE = pick_scale("12m")


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_table_shows_rows_that_are_recipes_and_every_row_is_shown(scale):
    rows, tables = rows_of(scale), tables_of(scale)
    shown = {entry.row for table in tables.values() for entry in table.shown}
    assert shown == set(rows)
    for row in rows.values():
        recipe = recipe_of(row, scale, 7, "corpus/", scale.lr)
        assert recipe.seed == 7
        if not row.name.startswith("nearer-"):
            assert recipe.num_replicas == scale.replicas
        assert not row.against or row.against in rows
        assert home_of(row.name, scale) in tables


@pytest.mark.parametrize(
    ("row", "file", "overrides"),
    [
        ("dense", "512m-dense", []),
        ("pp-8", "512m-pp-k192", []),
        ("het-8", "512m-het-half-k192", []),
        ("het-768", "512m-het-half-k192", ["replicas.edge.compression=1/768"]),
        ("pp-8-star", "512m-pp-k192", ["inner.warmup_steps=3910", "outer.lr=0.8"]),
        ("pp-8-more", "512m-pp-k192", ["outer.rounds=458"]),  # 12B tokens, as README has it
        ("adamw", "512m-adamw-dense", []),
        ("adamw-het-8", "512m-adamw-het-half-k192", []),
        ("pp-8-grassmann", "512m-pp-k192", ["subspace.grassmann_every=500"]),
    ],
)
def test_at_the_papers_scale_the_rows_are_the_recipes_of_the_paper(row, file, overrides):
    scale = pick_scale("512m")
    ours = recipe_of(rows_of(scale)[row], scale, 0, "corpus/", scale.lr)
    papers = load_recipe(file, overrides)
    assert dataclasses.replace(ours, name=papers.name) == papers


def test_the_small_scale_is_of_ten_to_twenty_million_parameters_and_a_hundred_rounds():
    recipe = recipe_of(rows_of(SCALE)["dense"], SCALE, 0, "corpus/", SCALE.lr)
    assert 10e6 <= recipe.model.num_parameters <= 20e6
    assert recipe.outer.rounds >= 100
    assert SCALE.ladder() == ("1/8", "1/24", "1/96", "1/192", "1/384")
    dims = [
        recipe_of(rows_of(SCALE)[f"pp-{n}"], SCALE, 0, "", SCALE.lr).replicas[0].subspace_dim(SCALE.width)
        for n in (8, 24, 96, 192, 384)
    ]
    assert dims == [48, 16, 4, 2, 1]  # k of every rung is exact at this width


def test_a_digest_is_of_what_is_computed_and_not_of_name_seed_or_place():
    rows = rows_of(SCALE)
    # What is recommended may be a row of the search, too: one run.
    tuned = [row for row in rows.values() if row.tuned and not row.name.startswith("recommended")]
    digests = {row.name: digest(recipe_of(row, SCALE, 0, "a/", SCALE.lr)) for row in tuned}
    assert len(set(digests.values())) == len(tuned)
    again = recipe_of(rows["het-8"], SCALE, 5, "b/", SCALE.lr)
    assert digest(dataclasses.replace(again, name="other")) == digests["het-8"]
    other = dataclasses.replace(again, inner=dataclasses.replace(again.inner, beta2=0.99))
    assert digest(other) != digests["het-8"]


def test_a_row_of_several_tables_is_run_once_and_every_row_before_any_second_seed():
    runs = all_runs(pick_tables(["1", "2", "5", "h"], SCALE), SCALE, "corpus/", [])
    keys = [(run.row.name, run.seed) for run in runs]
    assert len(keys) == len(set(keys))
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert keys.count(("dense", 0)) == 1


def test_the_baseline_at_the_chosen_learning_rate_is_the_run_of_the_tune_table():
    runs = all_runs(pick_tables(["tune", "1"], SCALE), SCALE, "corpus/", [])
    names = [(run.row.name, run.seed) for run in runs]
    assert (f"sparseloco-lr-{SCALE.lr['sparseloco']:g}", 0) in names
    assert ("dense", 0) not in names
    assert ("dense", 1) in names


def test_a_worker_takes_what_it_has_compiled_then_what_nobody_has():
    runs = all_runs(pick_tables(["1", "2"], SCALE), SCALE, "corpus/", [])
    jobs = jobs_of(runs)
    assert [job.runs for job in jobs] == [(run,) for run in runs]
    by_name = {(job.runs[0].row.name, job.seed): job for job in jobs}
    dense, pp, het = by_name["dense", 0], by_name["pp-8", 0], by_name["het-96", 0]
    assert next_job(jobs, set(), set()) is dense
    assert next_job(jobs, set(), dense.signatures) is pp
    assert next_job(jobs, het.signatures, set()) is het
    # Only runs of others are left of seed 0: a later seed that needs no compiling comes first.
    rest = [job for job in jobs if job.seed or job is dense]
    signatures = {run.signature for run in runs}
    assert next_job(rest, pp.signatures, signatures) is by_name["pp-8", 1]
    assert next_job([dense], pp.signatures, signatures) is dense


def test_runs_that_differ_in_k_or_method_are_compiled_apart_and_those_in_seed_or_values_are_not():
    rows = rows_of(SCALE)
    runs = {run.row.name: run for run in reversed(all_runs(pick_tables(["all"], SCALE), SCALE, "c/", []))}
    assert runs["het-8"].signature == runs["het-8-2bit"].signature == runs["het-8-h15"].signature
    different = ["dense", "pp-8", "pp-24", "het-8", "het-24", "adamw", "adamw-pp-8"]
    assert len({runs[name].signature for name in different if name in rows}) == len(different)
