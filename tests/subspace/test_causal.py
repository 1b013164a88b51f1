"""A pipelined model is causal on every wire, however it is run."""

import dataclasses

import pytest
import torch
from small_recipes import pipelined, recipe_text
from torch.testing import assert_close

from isthmus.config import parse_recipe
from isthmus.config.fleet import WIRES
from isthmus.layout.stages import EMBEDDING, table_name
from isthmus.model.decode import Decoder
from isthmus.model.llama import forward, head, init_params, rope_table
from isthmus.replica.stage import Stage
from isthmus.subspace.boundaries import BasisSet, boundary_functions

LENGTH = 16
CPU = torch.device("cpu")
every_wire = pytest.mark.parametrize("wire", WIRES)
both_anchors = pytest.mark.parametrize("anchor", ["fixed", "learned"])


def recipe_of(wire, anchor="fixed", compression="1/4", precision="fp64"):
    fleet = pipelined("edge", count=2, stages=3, compression=compression, wire=wire)
    settings = [f"subspace.anchor={anchor}", f"inner.precision={precision}", "inner.micro_batches=1"]
    return parse_recipe(recipe_text(fleet, model={"width": 32, "context": LENGTH}), settings)


def weights(recipe, dtype=torch.float64):
    """Far enough from the start that tokens matter to each other, with learned tables that are not zero."""
    generator = torch.Generator().manual_seed(0)
    params = {name: t.to(dtype) for name, t in init_params(recipe.model, recipe.seed).items()}
    for tensor in params.values():
        if tensor.dim() == 2:
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator, dtype=dtype)
    assert all(table_name(b) in params for b in range(recipe.model.boundary_tables))
    return params


def tokens_of(recipe, rows=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(recipe.model.vocab, (rows, LENGTH + 1), generator=generator)


def futures(tokens):
    """(t, the same tokens with others after position t)."""
    for t in (0, LENGTH // 2):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 7) % int(tokens.max())
        yield t, changed


def functions(recipe, params, members, rows):
    """The boundaries of these replicas in the simulator, `rows` of the leading axis each."""
    bases = BasisSet(recipe, CPU, params[EMBEDDING].dtype)
    table = params[EMBEDDING][0] if params[EMBEDDING].dim() == 3 else params[EMBEDDING]
    return boundary_functions(recipe, members, bases, table, rows, params=params)


def simulated(recipe, params, rows=4):
    rope = rope_table(recipe.model, LENGTH, params[EMBEDDING].dtype)
    fns = functions(recipe, params, recipe.fleet()[:1], rows)
    return lambda tokens: forward(params, tokens[:, :-1], recipe.model, rope, fns)


def stacked(recipe, params):
    """Two replicas with weights of their own, half of the sequences each."""
    own = {name: torch.stack([t, 1.1 * t]) for name, t in params.items()}
    rope = rope_table(recipe.model, LENGTH, params[EMBEDDING].dtype)
    fns = functions(recipe, own, recipe.fleet(), 1)

    def run(tokens):
        return forward(own, tokens.view(2, -1, LENGTH + 1)[..., :-1], recipe.model, rope, fns).flatten(0, 1)

    return run


def by_stages(recipe, params):
    """Frames from stage to stage, as real processes send them."""
    stages = [Stage(recipe, recipe.fleet()[0], s, precision=recipe.inner.precision) for s in range(3)]
    seen, losses = [], stages[-1].parts.head_losses
    catch = lambda own, x, *rest: seen.append(x.detach()) or losses(own, x, *rest)  # noqa: E731
    stages[-1].parts = dataclasses.replace(stages[-1].parts, head_losses=catch)
    for stage in stages:
        stage.begin_round(params)

    def run(tokens):
        data = None
        for stage in stages:
            data = stage.forward(0, tokens, data)
        return head(params, seen.pop(), recipe.model)

    return run


ENGINES = {"simulated": simulated, "stacked": stacked, "by stages": by_stages}


@every_wire
@pytest.mark.parametrize(
    ("anchor", "compression"), [("fixed", "1/4"), ("learned", "1/4"), ("fixed", "none"), ("learned", "none")]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_other_tokens_after_a_position_leave_the_logits_up_to_it(engine, wire, anchor, compression):
    recipe = recipe_of(wire, anchor, compression, "fp32")
    run, tokens = ENGINES[engine](recipe, weights(recipe, torch.float32)), tokens_of(recipe)
    before = run(tokens)
    for t, changed in futures(tokens):
        after = run(changed)
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert not torch.equal(after[:, t + 1 :], before[:, t + 1 :])


@every_wire
@both_anchors
def test_the_stages_and_the_simulator_have_the_same_logits(wire, anchor):
    recipe = recipe_of(wire, anchor)
    params, tokens = weights(recipe), tokens_of(recipe)
    assert_close(by_stages(recipe, params)(tokens), simulated(recipe, params)(tokens), rtol=0, atol=1e-9)


@every_wire
@both_anchors
def test_token_by_token_gives_the_logits_of_the_whole_sequence(wire, anchor):
    recipe = recipe_of(wire, anchor)
    params, tokens = weights(recipe), tokens_of(recipe)
    whole = simulated(recipe, params)(tokens)
    for row, wanted in zip(tokens[:2], whole, strict=False):
        decoder = Decoder(params, recipe.model, functions(recipe, params, recipe.fleet()[:1], 1))
        for t in range(LENGTH):
            assert_close(decoder.feed([int(row[t])]), wanted[t], rtol=0, atol=1e-9)
