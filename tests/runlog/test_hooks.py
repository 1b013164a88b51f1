"""Functions that get the rounds of a run: once each, in order, whole, and able to stop it."""

import io

import pytest
from small_recipes import RACK, recipe_text

from isthmus.config import parse_recipe
from isthmus.runlog import Row
from isthmus.runlog.hooks import RoundHooks
from isthmus.runlog.live import View


def delivered(hooks: RoundHooks, got: list) -> list:
    hooks.deliver()
    return [(row.round, row.loss_full) for row in got]


def test_a_round_waits_for_its_losses_and_for_the_rounds_before_it():
    got: list[Row] = []
    view = View(parse_recipe(recipe_text(RACK)), 0, 9, io.StringIO())
    view.hooks = hooks = RoundHooks([got.append])
    late = Row(round=1)
    view.round(Row(round=0, loss_full=5.0))
    view.round(late, awaited=True)
    view.round(Row(round=2, loss_full=4.0))
    assert delivered(hooks, got) == [(0, 5.0)]
    late.loss_full = 4.5
    view.losses(late)
    view.losses(late)  # a row that was delivered is not delivered again
    assert delivered(hooks, got) == [(0, 5.0), (1, 4.5), (2, 4.0)]
    view.losses(late)
    assert len(delivered(hooks, got)) == 3


def test_false_stops_and_none_does_not_and_the_others_are_still_called():
    first, second = [], []
    hooks = RoundHooks([lambda row: first.append(row) or row.round < 1, second.append])
    for t in range(3):
        hooks.add(Row(round=t))
        assert hooks.deliver() == (t >= 1)
    assert [len(first), len(second)] == [2, 3]
    hooks.raise_error()


def test_what_a_function_raises_stops_and_is_raised_at_the_end():
    def fails(row: Row) -> None:
        raise KeyError("mine")

    hooks = RoundHooks([fails])
    hooks.add(Row(round=0))
    assert hooks.deliver()
    with pytest.raises(KeyError, match="mine"):
        hooks.raise_error()


def test_a_function_cannot_change_the_runs_own_row():
    row = Row(round=0, train_by_kind={"rack": 1.0})

    def meddles(given: Row) -> None:
        given.loss_full = 0.0
        given.train_by_kind.clear()

    hooks = RoundHooks([meddles])
    hooks.add(row)
    hooks.deliver()
    assert (row.loss_full, row.train_by_kind) == (None, {"rack": 1.0})
