"""The bias gauge: what boundaries drop, and how far the embedding leaves S, against slow plain references."""

import pytest
import torch
from small_recipes import pipelined, recipe_text, replicas
from torch.testing import assert_close

from isthmus import simulate
from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import embed, init_params, run_layers
from isthmus.replica.evaluate import Scorer
from isthmus.subspace import random_basis
from isthmus.subspace.bias import drift, outside
from isthmus.subspace.boundaries import BasisSet

RECIPE = recipe_text(
    replicas("rack") + pipelined("edge", stages=3, compression="1/4", wire="fp64"),
    model={"layers": 3},
    data={"eval_batches": 2},
    inner={"precision": "fp64"},
    outer={"rounds": 3, "keep": 8},
)


def complement(basis):
    return torch.eye(len(basis), dtype=basis.dtype) - basis @ basis.T


def test_the_share_outside_is_that_of_x_without_t_perp():
    basis = random_basis(16, 4, seed=0)
    x, table = torch.randn(2, 3, 5, 16, dtype=torch.float64)[0], torch.randn(40, 16, dtype=torch.float64)
    tokens = torch.randint(40, (3, 5))
    rest = x - (table @ complement(basis))[tokens]
    expected = (rest @ complement(basis)).square().sum() / rest.square().sum()
    assert outside(basis, table)(x, tokens).item() == pytest.approx(expected.item(), rel=1e-12)
    # What lies in S, but for T_perp, passes whole.
    inside = torch.randn(3, 5, 4, dtype=torch.float64) @ basis.T + (table @ complement(basis))[tokens]
    assert outside(basis, table)(inside, tokens).item() == pytest.approx(0, abs=1e-25)


def test_drift_is_relative_to_t_perp_and_blind_to_what_happens_inside_s(monkeypatch):
    monkeypatch.setattr("isthmus.subspace.bias.ROWS", 7)  # so that the table is read in several parts
    basis = random_basis(16, 4, seed=1)
    before, change = torch.randn(2, 40, 16, dtype=torch.float64)
    expected = (change @ complement(basis)).norm() / (before @ complement(basis)).norm()
    assert drift(before + change, before, basis).item() == pytest.approx(expected.item(), rel=1e-12)
    assert drift(before + change @ basis @ basis.T, before, basis).item() == pytest.approx(0, abs=1e-12)


def test_every_compressed_boundary_is_measured_on_the_stream_that_reaches_it():
    recipe = parse_recipe(RECIPE)
    cpu, dtype = torch.device("cpu"), torch.float64
    bases = BasisSet(recipe, cpu, dtype)
    scorer = Scorer(recipe, open_corpus(recipe.data.corpus), bases, cpu, dtype)
    params = {name: t.to(dtype) for name, t in init_params(recipe.model, 0).items()}
    table = params[EMBEDDING]
    scorer.hold(table * 1.5)
    bias = scorer.score(params, table)["bias"]
    assert bias.keys() == {"edge"}
    basis = bases.get(recipe.fleet()[1], 0)
    tokens = scorer.held_out[0][:, :-1]
    t_perp = (table @ complement(basis))[tokens]
    x, shares = embed(params, tokens, dtype), []
    for i in range(2):
        rest = run_layers(params, range(i, i + 1), x, recipe.model, scorer.rope) - t_perp
        kept = rest @ basis @ basis.T
        shares.append((rest - kept).square().sum() / rest.square().sum())
        x = kept + t_perp
    assert_close(torch.tensor(bias["edge"]["outside"], dtype=dtype), torch.stack(shares))
    assert bias["edge"]["drift"] == pytest.approx(1 / 3)


def test_rows_of_a_run_carry_it_from_the_first_round_on(tmp_path):
    rows = simulate(parse_recipe(RECIPE), tmp_path / "run", quiet=True).rows
    assert rows[0]["bias"]["edge"]["drift"] is None
    for row in rows[1:]:
        assert all(0 < share < 1 for share in row["bias"]["edge"]["outside"])
        assert 0 < row["bias"]["edge"]["drift"] < 1


def test_a_fleet_without_compressed_boundaries_has_none(tmp_path):
    recipe = parse_recipe(RECIPE, ["replicas.edge.compression=none"])
    assert simulate(recipe, tmp_path / "run", quiet=True).rows[-1]["bias"] == {}
