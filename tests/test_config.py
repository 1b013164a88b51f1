"""Recipes: what is right loads and comes back unchanged; what is wrong says what would be right."""

import glob
import re

import pytest

from isthmus.config import PRESETS, dump_recipe, load_recipe, parse_recipe
from isthmus.errors import ConfigError

TEXT = """
name = "t"
[model]
preset = "nano"
[[replicas]]
name = "rack"
count = 2
[[replicas]]
name = "edge"
kind = "pipelined"
count = 2
stages = 2
compression = "1/8"
link = { mbps = 100, latency_ms = 20 }
"""


def test_the_papers_models_have_exactly_the_stated_parameters():
    assert PRESETS["178m"].num_parameters == 177_622_016
    assert PRESETS["512m"].num_parameters == 512_398_848
    assert PRESETS["1b"].num_parameters == 1_204_881_408


def test_a_resolved_recipe_reads_back_as_itself():
    recipe = parse_recipe(TEXT, ["outer.values=2bit", "replicas.edge.bucket_link={mbps=50.0}"])
    assert parse_recipe(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize("path", sorted(glob.glob("recipes/*.toml")))
def test_every_recipe_in_the_repository_loads(path):
    assert load_recipe(path).num_replicas >= 1


def test_overrides_reach_every_level_and_replicas_by_name_or_number():
    recipe = parse_recipe(
        TEXT,
        ["outer.keep=64", "seed=7", "replicas.edge.compression=1/4", "replicas.0.count=3", "model.layers=6"],
    )
    assert (recipe.outer.keep, recipe.seed, recipe.num_replicas, recipe.model.layers) == (64, 7, 5, 6)
    assert recipe.replicas[1].subspace_dim(128) == 32


def test_the_fleet_has_one_name_and_index_for_every_replica():
    assert [m.name for m in parse_recipe(TEXT).fleet()] == ["rack-0", "rack-1", "edge-0", "edge-1"]


def test_subspace_dimension_rounds_down_and_never_to_zero():
    edge = parse_recipe(TEXT, ["replicas.edge.compression=1/24"]).replicas[1]
    assert (edge.subspace_dim(1024), edge.subspace_dim(8)) == (42, 1)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("outer.kep=32", 'did you mean "keep"?'),
        ("outer.keep=4097", "1 to 4096"),
        ("outer.keep=0", "1 to 4096"),
        ("outer.keep=many", "whole number"),
        ("inner.in_flight=-1", "at least 0"),
        ("outer.method=sparselocco", 'did you mean "sparseloco"?'),
        ("replicas.edge.compression=0", '"1/8"'),
        ("replicas.edge.compression=3/2", '"1/8"'),
        ("replicas.edge.compression=abc", '"1/8"'),
        ("replicas.edge.compression=1/0", '"1/8"'),
        ("replicas.edge.stages=5", "at most 4"),
        ("replicas.edge.stages=1", "2 or more"),
        ("replicas.rack.stages=2", 'kind = "pipelined"'),
        ("replicas.edge.count=0", "at least 1"),
        ("replicas.edge.link.mbps=0", "above 0"),
        ("replicas.nobody.count=2", "there is rack, edge"),
        ("replicas.edge.name=rack", "own name"),
        ("inner.batch=9", "micro-batches"),
        ("inner.lr=-1", "above 0"),
        ("inner.lr=nan", "above 0"),
        ("model.preset=nan0", 'did you mean "nano"?'),
        ("model.heads=3", "every head"),
        ("subspace.grassmann_every=7", "multiple"),
        ("outer.values=fp64", "fp64"),
        ("finish.rounds=-1", "at least 0"),
        ("finish.rounds=117", "the last of outer.rounds, so at most 116"),
        ("finish.how=slowly", "open, full"),
        ("name=../x", "letters"),
        ("nonsense", "key=value"),
    ],
)
def test_bad_values_are_one_line_that_says_what_would_be_right(override, says):
    with pytest.raises(ConfigError) as caught:
        parse_recipe(TEXT, [override])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "not valid TOML"),
        ('name = "x"\n[[replicas]]\nname = "a"', "model.preset"),
        ('name = "x"\n[model]\nvocab = 10\n[[replicas]]\nname = "a"', "model.preset"),
        ('name = "x"\n[model]\npreset = "nano"', '"replicas" is missing'),
        ('name = "x"\nreplicas = 3\n[model]\npreset = "nano"', "[[replicas]]"),
        ('name = "x"\nmodel = 3\n[[replicas]]\nname = "a"', "must be a table"),
    ],
)
def test_malformed_recipes_are_named(text, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_recipe(text)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["replicas.edge.compression=none"], "no replica is compressed"),
        (["subspace.weight_projection=true"], "drop one of them"),
    ],
)
def test_a_run_with_nothing_to_finish_or_weights_that_may_not_leave_the_subspace_is_named(overrides, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_recipe(TEXT, ["finish.rounds=2", *overrides])


def test_boundaries_open_over_the_last_rounds_and_the_last_is_open():
    recipe = parse_recipe(TEXT, ["outer.rounds=10", "finish.rounds=4", "data.eval_every=100"])
    opening = [recipe.opening(t) for t in range(12)]
    assert opening == [None] * 7 + [0.25, 0.5, 0.75, 1.0, None]
    assert [t for t in range(1, 11) if recipe.is_scored(t)] == [6, 10]
    full = parse_recipe(TEXT, ["outer.rounds=10", "finish.rounds=4", "finish.how=full"])
    assert [full.opening(t) for t in range(5, 12)] == [None, None, 1.0, 1.0, 1.0, 1.0, None]
    assert parse_recipe(TEXT).opening(116) is None
    assert recipe.in_round(6) is recipe
    assert [r.compression for r in recipe.in_round(7).replicas] == ["none", "1"]


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        load_recipe(tmp_path / "none.toml")
