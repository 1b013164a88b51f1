"""Recipes: what is right loads and comes back unchanged; what is wrong says what would be right."""

import dataclasses
import os
import re
import subprocess
import sys
import typing

import pytest

from isthmus.config import PRESETS, Recipe, ReplicaConfig, dump_recipe, load_recipe, parse_recipe
from isthmus.config.shipped import shipped_names
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
    for odd in ("🚀/模型", "a\\b", 'say "hi"', "\x7f\x1b\x85\u202e", "\U000e0041"):
        named = parse_recipe(TEXT, [f"data.corpus={odd}"])
        assert parse_recipe(dump_recipe(named)) == named
        assert named.data.corpus == odd


@pytest.mark.parametrize("name", shipped_names())
def test_every_recipe_that_ships_loads_by_its_name(name):
    assert load_recipe(name).name == name


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


@pytest.mark.parametrize(("override", "told"), [("inner.precision=fp16", "fp64"), ("model.preset=7b", "1b")])
def test_another_number_is_not_a_typing_error(override, told):
    with pytest.raises(ConfigError, match="it is one of") as error:
        parse_recipe(TEXT, [override])
    assert f'did you mean "{told}"' not in str(error.value)


def test_an_empty_recipe_is_answered_by_the_smallest_one():
    with pytest.raises(
        ConfigError, match=r'nothing in it.*`isthmus new mine\.toml`.*preset = "nano".*"rack"'
    ):
        parse_recipe("")
    assert parse_recipe('name = "mine"\n[model]\npreset = "nano"\n[[replicas]]\nname = "rack"').name == "mine"


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
        ("finish.rounds=117", "at most outer.rounds = 116"),
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


def fields_of(kind, path=""):
    """(dotted key, type) of everything that a recipe may state, by the dataclasses themselves."""
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        hint = hints[f.name]
        hint = next((h for h in typing.get_args(hint) if dataclasses.is_dataclass(h)), hint)
        if dataclasses.is_dataclass(hint) and hint is not ReplicaConfig:
            yield from fields_of(hint, f"{path}{f.name}.")
        elif hint is ReplicaConfig:
            yield from fields_of(hint, "replicas.edge.")
        else:
            yield path + f.name, hint


FIELDS = dict(fields_of(Recipe))


@pytest.mark.parametrize("key", [key for key, kind in FIELDS.items() if kind in (int, float)])
def test_every_number_is_finite_and_has_an_upper_and_a_lower_bound(key):
    bad = ["-1e30", "1e30", "inf", "-inf", "nan", f"1{'0' * 400}", f"0x{'f' * 9000}", "1" + "0" * 9000]
    for value in bad if FIELDS[key] is float else [f"-1{'0' * 30}", f"1{'0' * 30}", *bad[-3:]]:
        with pytest.raises(ConfigError) as caught:
            parse_recipe(TEXT, [f"{key}={value}"])
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", [key for key, kind in FIELDS.items() if kind is str])
def test_every_text_has_a_longest_length(key):
    with pytest.raises(ConfigError) as caught:
        parse_recipe(TEXT, [f'{key}="{"x" * 100_000}"'])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "override",
    [
        "replicas.edge.count=1000000000",
        "replicas.edge.count=4095",  # together with the other two
        "model.layers=100000000",
        "model.context=1000000000",
        "replicas.edge.compression=1e-999999999",
        "replicas.edge.compression=1e999999999",
        "outer.rounds=1000000000000",
    ],
)
def test_a_recipe_of_a_billion_is_refused_in_the_memory_of_a_small_one(tmp_path, override):
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT)
    code = (
        "import resource, sys\n"
        "from isthmus.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "sys.exit(main(['plan', sys.argv[1], '--tflops', '10', '--set', sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(path), override]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "{a=" * 100_000,
        "a." * 100_000 + "a = 1",
        '"a".' * 100_000 + "a = 1",
        ("a." * 60 + "a = 1\n") * 8000,
        "[[replicas]]\n" * 80_000 + TEXT,
        "x" * (2 << 20),
        "a = 1" + "0" * 10_000,
        "a = 1\n" * 2,
        "model = 0x" + "f" * 9000 + TEXT,
        TEXT.replace("model", "model\n" * 2),
        TEXT.replace('preset = "nano"', 'preset = ["nano"]'),
        TEXT.replace('name = "rack"', "name = {}"),
        "\x1b" * 1000 + "=1" + TEXT,
    ],
    ids=range(14),
)
def test_a_file_that_would_take_its_reader_hours_is_refused_in_one_short_line(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_recipe_is_a_regular_file(tmp_path, kind):
    path = tmp_path / "recipe.toml"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda p: os.symlink("/dev/zero", p)}[kind](path)
    with pytest.raises(ConfigError, match=f"cannot read the recipe: .* is a {kind}, not a regular file"):
        load_recipe(path)
