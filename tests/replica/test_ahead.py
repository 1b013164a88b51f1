"""What a command says of its duration before it begins."""

import re

import pytest
import torch
from small_recipes import EDGE, RACK, recipe_text

from isthmus import simulate
from isthmus.config import load_recipe, parse_recipe
from isthmus.replica import ahead
from isthmus.replica.ahead import announce, announce_scoring, product_rate, run_flops, scoring_flops
from isthmus.runlog.words import duration

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Two cores of 50 GFLOP/s."""
    monkeypatch.setattr(ahead, "product_rate", lambda width: 50e9)
    monkeypatch.setattr(ahead, "usable_cores", lambda: 2)


def small(**outer):
    text = recipe_text(RACK + EDGE, model={"layers": 2}, inner={"batch": 2}, outer=outer)
    return parse_recipe(text)


def test_operations_are_six_a_parameter_and_token_and_two_for_every_forward_that_scores():
    recipe = small(rounds=4, inner_steps=3)
    params, sequence = recipe.model.num_parameters, recipe.model.context
    trained = 4 * 3 * 6 * params * recipe.num_replicas * 2 * sequence
    held_out = recipe.data.eval_batches * 2 * sequence
    assert scoring_flops(recipe, held_out) == 2 * params * held_out * 2  # full, and through edge's boundaries
    assert run_flops(recipe) == pytest.approx(trained + 5 * scoring_flops(recipe, held_out))  # before it, too
    assert run_flops(recipe, done=3) == pytest.approx(trained / 4 + scoring_flops(recipe, held_out))


def test_the_line_says_how_long_and_on_what_basis(capsys):
    recipe = load_recipe("demo", [])
    announce(recipe, CPU)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"isthmus: about {duration(run_flops(recipe) / 60e9)} on this machine, if nothing")
    assert line.endswith("operations at 60 GFLOP/s, from matrix products timed on 2 cores)")
    announce(recipe, CPU, recipe.outer.rounds)
    assert capsys.readouterr().err == ""  # nothing is left to do


def test_a_run_of_hours_names_the_command_for_a_first_result(capsys):
    announce(load_recipe("10m-recommended", []), CPU)
    first, second = capsys.readouterr().err.splitlines()
    assert re.match(r"isthmus: about (\d+ h \d\d min|\d+ d \d+ h) on this machine", first)
    assert second.endswith("isthmus simulate demo")


def test_scoring_is_announced_where_it_takes_more_than_seconds(capsys):
    recipe = small()
    announce_scoring(recipe, 1_000, CPU)
    assert capsys.readouterr().err == ""
    announce_scoring(recipe, 100_000_000, CPU)
    assert re.fullmatch(
        r"isthmus: scoring 100,000,000 held-out tokens takes about [\d a-z]+ on this machine\n",
        capsys.readouterr().err,
    )


def test_the_rate_is_that_of_one_core_and_leaves_the_threads_as_they_were():
    before = torch.get_num_threads()
    assert 1e8 < product_rate(64) < 1e13
    assert torch.get_num_threads() == before


def test_simulate_says_it_before_its_first_round_unless_it_is_quiet(tmp_path, capsys):
    recipe = small(rounds=1, inner_steps=1)
    simulate(recipe, tmp_path / "one", device="cpu")
    assert capsys.readouterr().err.startswith("isthmus: about ")
    simulate(recipe, tmp_path / "two", device="cpu", quiet=True)
    assert "about" not in capsys.readouterr().err
