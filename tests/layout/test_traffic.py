"""Bytes per link as arithmetic, against counting by hand."""

import pytest

from isthmus.config import PRESETS, parse_recipe
from isthmus.layout.chunks import packed_many_bytes
from isthmus.layout.stages import EMBEDDING, stage_names
from isthmus.layout.traffic import (
    dense_round_bytes,
    inner_step_bytes,
    machine_shards,
    outer_bytes,
    shards,
    shards_read,
)

TEXT = """
name = "t"
[model]
preset = "512m"
[outer]
values = "2bit"
[[replicas]]
name = "rack"
count = 2
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 4
compression = "1/8"
[[replicas]]
name = "pair"
kind = "pipelined"
stages = 2
compression = "none"
"""


# 384 B a token each way, 2 B for its id
def test_one_boundary_costs_what_the_paper_counts():
    recipe = parse_recipe(TEXT)
    crossing = inner_step_bytes(recipe, recipe.fleet()[2])
    tokens = 32 * 2048
    assert crossing["activations"] == crossing["gradients"] == 3 * tokens * 384
    assert crossing["tokens"] == 3 * 32 * 2049 * 2
    assert inner_step_bytes(recipe, recipe.fleet()[0]) == {"activations": 0, "gradients": 0, "tokens": 0}


def test_shards_cover_every_tensor_once_and_each_stage_finds_its_own_whole():
    recipe = parse_recipe(TEXT)
    parts = shards(recipe)
    assert sorted(name for names in parts for name in names) == sorted(PRESETS["512m"].shapes())
    for stages in (2, 4):
        for own in stage_names(recipe.model, stages):
            covered = [name for names in parts if set(names) <= set(own) for name in names]
            assert sorted(covered) == sorted(own)


def test_a_compressed_stage_also_reads_the_embedding():
    recipe = parse_recipe(TEXT)
    at = shards(recipe).index((EMBEDDING,))
    full, edge, pair = recipe.fleet()[0], recipe.fleet()[2], recipe.fleet()[3]
    assert [shards_read(recipe, member)[at] for member in (full, edge, pair)] == [1, 4, 1]
    assert all(count == 1 for i, count in enumerate(shards_read(recipe, edge)) if i != at)


def test_everybody_uploads_once_and_reads_all_the_others():
    recipe = parse_recipe(TEXT)
    sizes = [
        packed_many_bytes({n: recipe.model.shapes()[n] for n in names}, 64, 32, "2bit")
        for names in shards(recipe)
    ]
    up, down = outer_bytes(recipe, recipe.fleet()[0])
    assert up == sum(sizes)
    assert down == 3 * sum(sizes)
    assert 5.7e6 < up < 5.9e6  # with 12-bit indices it would be 7.01 MB


def test_dense_data_parallelism_is_a_ring_all_reduce_of_fp32_gradients_every_step():
    recipe = parse_recipe(TEXT)
    n, m, steps = recipe.model.num_parameters, 4, recipe.outer.inner_steps
    one_way = 2 * (m - 1) / m * n * 4
    assert dense_round_bytes(recipe)["replicas"] == pytest.approx(steps * m * 2 * one_way)


def test_open_boundaries_are_their_own_dense_measure():
    recipe = parse_recipe(TEXT)
    steps, width, tokens = recipe.outer.inner_steps, 1536, 32 * 2048
    ids = 4 * 32 * 2049 * 2
    assert dense_round_bytes(recipe)["stages"] == steps * ((3 + 1) * tokens * width * 2 * 2 + ids)


def test_who_was_missing_counts_on_neither_side():
    """Else a replica that is away would make the others' compression look better than it is."""
    recipe = parse_recipe(TEXT)
    fleet = recipe.fleet()
    whole = dense_round_bytes(recipe, fleet)
    assert whole == dense_round_bytes(recipe)
    without = dense_round_bytes(recipe, [m for m in fleet if m is not fleet[2]])
    steps, width = recipe.outer.inner_steps, recipe.model.width
    assert whole["stages"] - without["stages"] == steps * sum(
        inner_step_bytes(recipe, fleet[2], width).values()
    )
    assert without["replicas"] == pytest.approx(
        whole["replicas"] * 2 / 3
    )  # 2 (M-1) of the gradients: M 4 -> 3
    assert dense_round_bytes(recipe, []) == {"stages": 0, "replicas": 0}


def test_a_sharded_replica_cuts_its_update_as_one_of_as_many_stages_does():
    cut = {
        "rack": ["replicas.edge.stages=2", "replicas.rack.processes=4", "replicas.rack.sharding=full"],
        "edge": [],
    }
    found = {name: parse_recipe(TEXT, settings) for name, settings in cut.items()}
    assert shards(found["rack"]) == shards(found["edge"])
    node = found["rack"].fleet()[0]
    assert [
        sorted(n for i in writes for n in shards(found["rack"])[i])
        for writes, _ in machine_shards(found["rack"], node.config)
    ] == [sorted(names) for names in stage_names(found["rack"].model, 4)]
    assert set(shards_read(found["rack"], node)) == {1}  # each shard by the process that answers for it
    whole = parse_recipe(TEXT, cut["rack"][:2])
    assert sum(outer_bytes(found["rack"], node)) < 1.01 * sum(outer_bytes(whole, whole.fleet()[0]))
