"""The score of an update: an identity against the plain model, and text that nobody can prepare for."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from isthmus.config import Recipe, parse_recipe
from isthmus.data.corpus import TokenView
from isthmus.data.tokens import drawn_batches
from isthmus.model.llama import forward, init_params, rope_table, token_losses
from isthmus.outer.codec import PlainCodec
from isthmus.replica.usefulness import UpdateScorer
from isthmus.sparse.topk import decode
from isthmus.subspace.boundaries import BasisSet, boundary_functions

CPU = torch.device("cpu")
TEXT = """
name = "score"
[model]
width = 32
layers = 2
heads = 2
ffn = 64
vocab = 64
context = 16
[inner]
batch = 3
micro_batches = 3
precision = "fp64"
[outer]
lr = 0.8
chunk_side = 16
keep = 8
values = "fp64"
[score]
batches = 2
[[replicas]]
name = "a"
[[replicas]]
name = "b"
kind = "pipelined"
stages = 2
compression = "1/8"
wire = "fp64"
[[replicas]]
name = "c"
kind = "pipelined"
stages = 2
"""


@pytest.fixture
def recipe() -> Recipe:
    return parse_recipe(TEXT)


@pytest.fixture
def held_out() -> TokenView:
    return TokenView("validation", [np.random.default_rng(0).integers(0, 64, 4_000)])


def anchor_of(recipe: Recipe) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in init_params(recipe.model, 0).items()}


def plain_loss(recipe: Recipe, params: dict[str, Tensor], tokens: Tensor) -> float:
    """One sequence after the other."""
    rope = rope_table(recipe.model, recipe.model.context, torch.float64, CPU)
    losses = [
        token_losses(forward(params, row[None, :-1], recipe.model, rope), row[None, 1:]).mean()
        for row in tokens
    ]
    return float(torch.stack(losses).mean())


def test_a_score_is_the_held_out_loss_after_a_step_with_one_update_less_the_loss_before(
    recipe: Recipe, held_out: TokenView
):
    anchor = anchor_of(recipe)
    codec = PlainCodec(16, 8, "fp64")
    noise = {name: 0.3 * torch.randn_like(tensor) for name, tensor in anchor.items()}
    update, draw = codec.encode_many(noise), b"\7" * 32
    scorer = UpdateScorer(recipe, held_out, codec, CPU, torch.float64)
    scorer.begin(anchor, 1, draw)

    tokens = torch.cat(drawn_batches(held_out, 3, 16, 2, draw))
    stepped = {name: tensor - 0.8 * decode(update[name]) for name, tensor in anchor.items()}
    before, after = plain_loss(recipe, anchor, tokens), plain_loss(recipe, stepped, tokens)

    assert math.isclose(scorer.score(update), after - before, rel_tol=1e-9, abs_tol=1e-9)
    assert abs(after - before) > 1e-3, "an update that changes nothing would show nothing"
    assert_close(anchor, anchor_of(recipe))  # it was not changed


def test_down_the_gradient_helps_and_up_hurts(recipe: Recipe, held_out: TokenView):
    anchor, draw = anchor_of(recipe), b"\1" * 32
    tokens = torch.cat(drawn_batches(held_out, 3, 16, 2, draw))
    params = {name: tensor.clone().requires_grad_() for name, tensor in anchor.items()}
    rope = rope_table(recipe.model, recipe.model.context, torch.float64, CPU)
    token_losses(forward(params, tokens[:, :-1], recipe.model, rope), tokens[:, 1:]).mean().backward()
    codec = PlainCodec(16, 8, "fp64")
    scorer = UpdateScorer(recipe, held_out, codec, CPU, torch.float64)
    scorer.begin(anchor, 1, draw)
    down = {name: 0.01 * p.grad for name, p in params.items() if p.grad is not None}
    up = {name: -tensor for name, tensor in down.items()}
    assert scorer.score(codec.encode_many(down)) < 0 < scorer.score(codec.encode_many(up))


def test_a_compressed_author_is_not_refused_for_what_helps_the_function_that_it_trains(
    recipe: Recipe, held_out: TokenView
):
    """The identity through its boundaries; and the full model's score stands for everybody else."""
    _, b, c = recipe.fleet()
    anchor, draw = anchor_of(recipe), b"\2" * 32
    tokens = torch.cat(drawn_batches(held_out, 3, 16, 2, draw))
    bases = BasisSet(recipe, CPU, torch.float64)
    codec = PlainCodec(16, 8, "fp64")

    def own_loss(params: dict[str, Tensor]) -> Tensor:
        rope = rope_table(recipe.model, 16, torch.float64, CPU)
        table = params["tok_embeddings.weight"].detach()
        edges = boundary_functions(recipe, [b], bases, table, len(tokens), params=params)
        return token_losses(forward(params, tokens[:, :-1], recipe.model, rope, edges), tokens[:, 1:]).mean()

    random = torch.Generator().manual_seed(0)
    scorer = UpdateScorer(recipe, held_out, codec, CPU, torch.float64)
    scorer.begin(anchor, 1, draw)
    differ = 0
    for _ in range(20):
        noise = {n: 0.3 * torch.randn(t.shape, generator=random, dtype=t.dtype) for n, t in anchor.items()}
        update = codec.encode_many(noise)
        stepped = {name: tensor - 0.8 * decode(update[name]) for name, tensor in anchor.items()}
        full, own = scorer.score(update), float(own_loss(stepped) - own_loss(anchor))
        better = full if full <= recipe.score.bound else min(full, own)
        assert math.isclose(scorer.score(update, b), better, rel_tol=1e-6, abs_tol=1e-6)
        assert scorer.score(update, c) == full
        differ += better < full
    assert differ, "no case shows the difference"


def test_windows_are_drawn_anew_and_none_twice(held_out: TokenView):
    drawn = [torch.cat(drawn_batches(held_out, 4, 16, 3, bytes([n]) * 32)) for n in range(8)]
    for one, other in pairwise(drawn):
        assert one.shape == (12, 17)
        assert not torch.equal(one, other)
        assert len({tuple(row) for row in one.tolist()}) == 12
    again = torch.cat(drawn_batches(held_out, 4, 16, 3, bytes([0]) * 32))
    assert torch.equal(drawn[0], again), "the same draw, the same text"


def test_a_small_split_is_scored_whole():
    view = TokenView("validation", [np.arange(50) % 7])
    assert [tuple(batch.shape) for batch in drawn_batches(view, 2, 16, 9, b"x")] == [(2, 17), (1, 17)]
