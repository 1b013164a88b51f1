"""Learned tables: what every boundary adds for a token, where subspace.anchor is "learned"."""

import pytest
import torch
from small_recipes import pipelined, recipe_text, replicas
from torch.testing import assert_close

from isthmus.config import dump_recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.layout.chunks import packed_many_bytes
from isthmus.layout.stages import EMBEDDING, boundaries, stage_names, table_name
from isthmus.layout.traffic import shard_bytes
from isthmus.model.llama import forward, init_params, rope_table, token_losses
from isthmus.subspace import OpeningBoundary, SubspaceBoundary, learned_part, random_basis
from isthmus.subspace.boundaries import BasisSet, boundary_functions

EDGE = pipelined("edge", count=2, stages=4, compression="1/4", wire="fp64")
SETTINGS = ["subspace.anchor=learned", "inner.precision=fp64", "outer.values=fp64"]


def recipe_of(*settings, fleet=EDGE):
    return parse_recipe(recipe_text(fleet, model={"width": 32, "context": 16}), [*SETTINGS, *settings])


def some(recipe, seed=0):
    """Weights with tables that are not zero, and tokens (B, L + 1)."""
    torch.manual_seed(seed)
    params = {name: t.double() for name, t in init_params(recipe.model, recipe.seed).items()}
    for boundary in range(recipe.model.boundary_tables):
        params[table_name(boundary)].normal_(std=0.02)
    return params, torch.randint(0, recipe.model.vocab, (2, recipe.model.context + 1))


def losses_of(recipe, params, tokens):
    bases = BasisSet(recipe, torch.device("cpu"), torch.float64)
    table = params[EMBEDDING].detach()
    member, rows = recipe.fleet()[0], len(tokens)
    fns = boundary_functions(recipe, [member], bases, table, rows, params=params)
    rope = rope_table(recipe.model, recipe.model.context, torch.float64)
    return token_losses(forward(params, tokens[:, :-1], recipe.model, rope, fns), tokens[:, 1:])


def test_every_boundary_has_a_table_of_its_own_at_the_stage_that_receives():
    recipe = recipe_of()
    tables = [table_name(b) for b in range(3)]
    assert [name for name in recipe.model.shapes() if name not in recipe.model.plain.shapes()] == tables
    assert [[n for n in names if n in tables] for names in stage_names(recipe.model, 4)] == [
        [],
        *([table] for table in tables),
    ]
    assert all(init_params(recipe.model, 0, tables)[table].eq(0).all() for table in tables)


def test_with_tables_of_zeros_the_model_is_the_papers():
    recipe, plain = recipe_of(), recipe_of("subspace.anchor=fixed")
    params, tokens = some(recipe)
    zeroed = {name: t.zero_() if name.startswith("boundaries.") else t for name, t in params.items()}
    expected = losses_of(plain, {name: params[name] for name in plain.model.shapes()}, tokens)
    assert_close(losses_of(recipe, zeroed, tokens), expected, rtol=0, atol=0)


def test_a_table_adds_its_row_to_what_a_boundary_passes_on_and_gets_that_streams_gradient():
    recipe = recipe_of()
    params, tokens = some(recipe)
    leaf = params[table_name(1)].requires_grad_()
    caught = []
    edge = boundaries(recipe.model, 4)[1]
    bases = BasisSet(recipe, torch.device("cpu"), torch.float64)
    fns = boundary_functions(recipe, recipe.fleet()[:1], bases, params[EMBEDDING], 2, params=params)
    ((rows, cross),) = fns[edge]

    def watched(x, ids):
        caught.append((x, cross(x, ids)))
        caught[-1][1].retain_grad()
        return caught[-1][1]

    fns[edge] = [(rows, watched)]
    rope = rope_table(recipe.model, recipe.model.context, torch.float64)
    token_losses(forward(params, tokens[:, :-1], recipe.model, rope, fns), tokens[:, 1:]).backward()
    ((x, x_hat),) = caught
    boundary = SubspaceBoundary(bases.get(recipe.fleet()[0], 1), params[EMBEDDING])
    paper = boundary.expand(boundary.compress(x, tokens[:, :-1]), tokens[:, :-1])
    assert_close(x_hat - paper, leaf[tokens[:, :-1]])
    expected = torch.zeros_like(leaf)
    for token, grad in zip(tokens[:, :-1].flatten(), x_hat.grad.flatten(0, 1), strict=True):
        expected[token] += grad
    assert_close(leaf.grad, expected)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_table_fades_as_its_boundary_opens(share):
    table, tokens = torch.randn(50, 8, dtype=torch.float64), torch.randint(0, 50, (2, 5))
    basis = random_basis(8, 2, seed=0)
    opening = OpeningBoundary(basis, table, torch.tensor(share, dtype=torch.float64))
    faded = learned_part(opening, table, tokens, torch.float64)
    assert_close(faded, (1 - share) * table[tokens])
    assert_close(learned_part(SubspaceBoundary(basis, table), table, tokens, torch.float64), table[tokens])


def test_what_is_sent_grows_by_the_tables_bytes():
    recipe = recipe_of("outer.values=fp32", "inner.precision=fp32", "replicas.edge.wire=fp32")
    plain = recipe_of(
        "subspace.anchor=fixed", "outer.values=fp32", "inner.precision=fp32", "replicas.edge.wire=fp32"
    )
    entries = {table_name(b): recipe.model.shapes()[table_name(b)] for b in range(3)}
    outer = recipe.outer
    tables = packed_many_bytes(entries, outer.chunk_side, outer.keep, outer.values)
    more = sum(shard_bytes(recipe)) - sum(shard_bytes(plain))
    assert abs(more - tables) < 0.02 * tables  # headers are shared
    assert recipe.model.num_stored - plain.model.num_stored == 3 * recipe.model.vocab * recipe.model.width


def test_a_recipe_with_tables_is_written_and_read_as_it_is_and_no_file_states_their_number():
    recipe = recipe_of()
    assert parse_recipe(dump_recipe(recipe)) == recipe
    assert "boundary_tables" not in dump_recipe(recipe)
    with pytest.raises(ConfigError, match=r'unknown key "model\.boundary_tables"'):
        parse_recipe(dump_recipe(recipe), ["model.boundary_tables=7"])


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        (replicas("rack") + EDGE, "replica rack: .* every replica is pipelined; set"),
        (EDGE + pipelined("far", stages=2, compression="1/4"), "the same number of stages"),
    ],
)
def test_a_fleet_whose_replicas_do_not_have_the_same_boundaries_is_refused_by_one_line(fleet, words):
    with pytest.raises(ConfigError, match=words):
        recipe_of(fleet=fleet)
