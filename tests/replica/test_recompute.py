"""Layers that run again in the backward: the same bits, and fewer activations between."""

import pytest
import torch
from small_recipes import pipelined, recipe_text, replicas
from test_stage import batches_of, trained

from isthmus.config import parse_recipe
from isthmus.replica.full import FullReplica
from isthmus.replica.pipelined import PipelinedReplica
from isthmus.replica.stage import Stage

RECIPE = recipe_text(
    replicas("rack") + pipelined("edge", stages=2, compression="1/4", wire="fp64"),
    inner={"batch": 8, "micro_batches": 4, "precision": "fp64"},
    outer={"inner_steps": 3, "rounds": 3, "values": "fp64"},
)


def both(*settings):
    return [parse_recipe(RECIPE, [*settings, f"inner.recompute={yes}"]) for yes in ("false", "true")]


def kept_bytes(run):
    """What autograd keeps of this call, less the weights."""
    kept = {}

    def pack(tensor):
        if not (tensor.is_leaf and tensor.requires_grad):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(kept.values())


def test_a_full_replica_reaches_the_same_bits():
    kept, again = (
        trained(recipe, FullReplica(recipe, recipe.fleet()[0], batches_of(recipe), precision="fp64"))
        for recipe in both()
    )
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


@pytest.mark.parametrize("backward", ["whole", "split"])
def test_stages_reach_the_same_bits(backward):
    kept, again = (
        trained(
            recipe,
            PipelinedReplica.in_one_process(
                recipe, recipe.fleet()[1], batches_of(recipe), precision="fp64", schedule="1f1b"
            ),
        )
        for recipe in both(f"inner.backward={backward}")
    )
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


def test_a_stage_keeps_one_stream_for_each_of_its_layers():
    """Of a micro-batch in flight; the plan counts it alike."""
    sizes = []
    for recipe in both():
        stage = Stage(recipe, recipe.fleet()[1], 0, precision="fp64")
        tokens = batches_of(recipe).at(1, 0)[:2].long()  # (B, L + 1)
        sizes.append(kept_bytes(lambda stage=stage, tokens=tokens: _output(stage, tokens)))
    stream = 2 * recipe.model.context * recipe.model.width * 8
    num_layers = len(stage.layers)
    assert sizes[1] <= (num_layers + 2) * stream  # and what the boundary keeps
    assert sizes[0] > 4 * sizes[1]


def _output(stage, tokens):
    stage.forward(0, tokens)
    return stage.activations[0][1]
