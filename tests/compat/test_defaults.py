"""A default that changes is one for new runs: runs, recipes and results that exist keep what they had."""

import json
import tarfile
import tomllib
from pathlib import Path

import pytest

from experiments.lines import digest, wire_version
from experiments.rows import rows
from isthmus.config import BucketConfig, OuterConfig, dump_recipe, load_recipe, parse_recipe, stored_recipe
from isthmus.config.shipped import shipped_names
from isthmus.runlog import RunDir

ROOT = Path(__file__).parents[2]
SMALLEST = 'name = "x"\n[model]\npreset = "nano"\n[[replicas]]\nname = "a"\n'


def test_a_new_run_clips_to_the_median_and_refuses_beyond_three_times_it():
    assert (OuterConfig().clip, BucketConfig().norm_limit) == ("median", 3.0)


@pytest.mark.parametrize("name", ["train", "simulate"])
def test_a_run_made_before_is_read_without_the_clip(tmp_path: Path, name: str):
    with tarfile.open(Path(__file__).parent / "v0.1" / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    recipe = RunDir.open(tmp_path / name).recipe
    assert (recipe.outer.clip, recipe.bucket.norm_limit) == ("none", 20.0)


@pytest.mark.parametrize("name", ["train", "simulate"])
def test_a_run_made_before_is_read_with_the_decay_of_t_perp(tmp_path: Path, name: str):
    with tarfile.open(Path(__file__).parent / "v0.1" / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert RunDir.open(tmp_path / name).recipe.subspace.decay_t_perp
    assert not parse_recipe(SMALLEST).subspace.decay_t_perp
    assert not stored_recipe(dump_recipe(parse_recipe(SMALLEST))).subspace.decay_t_perp


def test_what_is_stored_of_a_recipe_names_every_default():
    """run.json and recipe.toml are dumps: a default that changes later does not change them."""
    stored = tomllib.loads(dump_recipe(parse_recipe(SMALLEST)))
    assert {"clip", "aggregation", "values"} <= stored["outer"].keys()
    assert {"norm_limit", "quorum"} <= stored["bucket"].keys()


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_stored_result_is_still_found_by_its_digest(path: Path):
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        recipe = stored_recipe(line["recipe"])
        assert recipe.outer.clip == "none"
        assert digest(recipe, wire_version(line)) == line["digest"]


def test_the_papers_rows_and_recipes_have_no_clip():
    assert all(row.recipe(0).outer.clip == "none" for row in rows())
    for name in shipped_names():
        clip = "median" if name.startswith(("demo", "smollm2")) else "none"  # the others are the paper's
        assert load_recipe(name).outer.clip == clip, name
