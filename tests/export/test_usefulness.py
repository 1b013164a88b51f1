"""The score of an update: an identity against the plain model; and what `ledger show` prints of a run."""

import json
import math
from pathlib import Path

import pytest
import torch
from seats import take_seat
from small_recipes import recipe_text, replicas
from torch import Tensor
from torch.testing import assert_close

from isthmus.cli.main import main
from isthmus.config import Recipe, parse_recipe
from isthmus.export.usefulness import UpdateScorer
from isthmus.model.llama import forward, init_params, rope_table, token_losses
from isthmus.outer.codec import PlainCodec
from isthmus.outer.exchange import Contribution
from isthmus.protocol import closer
from isthmus.protocol.shards import unpack_shards
from isthmus.runtime.create import create
from isthmus.runtime.trainer import Trainer
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
def tokens() -> Tensor:
    return torch.randint(64, (6, 17), generator=torch.Generator().manual_seed(0))


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
    recipe: Recipe, tokens: Tensor
):
    anchor = anchor_of(recipe)
    codec = PlainCodec(16, 8, "fp64")
    noise = {name: 0.3 * torch.randn_like(tensor) for name, tensor in anchor.items()}
    update = codec.encode_many(noise)
    scorer = UpdateScorer(recipe, tokens.split(3), codec, torch.float64)
    scorer.begin(anchor, 1)

    stepped = {name: tensor - 0.8 * decode(update[name]) for name, tensor in anchor.items()}
    before, after = plain_loss(recipe, anchor, tokens), plain_loss(recipe, stepped, tokens)

    assert math.isclose(scorer.score(update), after - before, rel_tol=1e-9, abs_tol=1e-9)
    assert abs(after - before) > 1e-3, "an update that changes nothing would show nothing"
    assert_close(anchor, anchor_of(recipe))  # it was not changed


def test_down_the_gradient_helps_and_up_hurts(recipe: Recipe, tokens: Tensor):
    anchor = anchor_of(recipe)
    params = {name: tensor.clone().requires_grad_() for name, tensor in anchor.items()}
    rope = rope_table(recipe.model, recipe.model.context, torch.float64, CPU)
    token_losses(forward(params, tokens[:, :-1], recipe.model, rope), tokens[:, 1:]).mean().backward()
    codec = PlainCodec(16, 8, "fp64")
    scorer = UpdateScorer(recipe, tokens.split(3), codec, torch.float64)
    scorer.begin(anchor, 1)
    down = {name: 0.01 * p.grad for name, p in params.items() if p.grad is not None}
    up = {name: -tensor for name, tensor in down.items()}
    assert scorer.score(codec.encode_many(down)) < 0 < scorer.score(codec.encode_many(up))


def test_of_a_compressed_author_the_better_of_its_two_forwards_counts(recipe: Recipe, tokens: Tensor):
    """The identity through its boundaries; and the full model's score stands for everybody else."""
    _, b, c = recipe.fleet()
    anchor = anchor_of(recipe)
    bases, codec = BasisSet(recipe, CPU, torch.float64), PlainCodec(16, 8, "fp64")

    def own_loss(params: dict[str, Tensor]) -> Tensor:
        rope = rope_table(recipe.model, 16, torch.float64, CPU)
        table = params["tok_embeddings.weight"].detach()
        edges = boundary_functions(recipe, [b], bases, table, len(tokens), params=params)
        return token_losses(forward(params, tokens[:, :-1], recipe.model, rope, edges), tokens[:, 1:]).mean()

    random = torch.Generator().manual_seed(0)
    scorer = UpdateScorer(recipe, tokens.split(3), codec, torch.float64)
    scorer.begin(anchor, 1)
    differ = 0
    for _ in range(20):
        noise = {n: 0.3 * torch.randn(t.shape, generator=random, dtype=t.dtype) for n, t in anchor.items()}
        update = codec.encode_many(noise)
        stepped = {name: tensor - 0.8 * decode(update[name]) for name, tensor in anchor.items()}
        full, own = scorer.score(update), float(own_loss(stepped) - own_loss(anchor))
        better = min(full, own)
        assert math.isclose(scorer.score(update, b), better, rel_tol=1e-6, abs_tol=1e-6)
        assert scorer.score(update, c) == full
        differ += better < full
    assert differ, "no case shows the difference"


def turned(trainer: Trainer, own: Contribution) -> Contribution:
    """The same update uphill, and twice as far."""
    sent = unpack_shards(trainer.ledger, own.shards)
    payloads = trainer.outer.codec.encode_many({name: -2 * decode(payload) for name, payload in sent.items()})
    shards = {i: trainer.outer.codec.pack_many(payloads.part(trainer.ledger.shards[i])) for i in own.shards}
    return Contribution(own.replica, shards, own.facts)


def test_show_tells_from_the_history_who_helps_and_who_does_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)
    recipe = parse_recipe(recipe_text(replicas("rack", count=3), outer={"inner_steps": 10}))
    create(recipe, str(tmp_path / "bucket"), tmp_path / "keys", closers=["rack-0"])
    fleet = [take_seat(recipe, tmp_path, member) for member in recipe.fleet()]
    for one in fleet:
        one.resume()
        one.session.heart.beat()
    bad = fleet[2].session.exchange
    deliver = bad.deliver
    bad.deliver = lambda t, own: deliver(t, turned(fleet[2], own))
    for one in fleet:
        one.train_round(1, lambda h: None)
    for one in fleet:
        one.settle(1)

    assert main(["ledger", "show", str(tmp_path / "bucket"), "--usefulness", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    scores = row["usefulness"]
    assert scores.keys() == row["contributors"].keys() == {"rack-0", "rack-1", "rack-2"}
    assert scores["rack-0"] < 0 < scores["rack-2"]
    assert scores["rack-1"] < 0
