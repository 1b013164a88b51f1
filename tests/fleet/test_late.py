"""A replica that comes back late costs the others nothing: it stops where they settle the round."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from seats import take_seat
from small_recipes import recipe_text, replicas
from torch.testing import assert_close

from isthmus.config import OuterConfig, Recipe, parse_recipe
from isthmus.errors import RunError
from isthmus.outer.methods import DiLoCo
from isthmus.outer.rounds import run_rounds
from isthmus.outer.sparseloco import SparseLoCo
from isthmus.protocol import closer
from isthmus.runtime.create import create
from isthmus.runtime.trainer import Trainer
from isthmus.store import StoreError

STEPS = 4


@pytest.mark.parametrize("scaled", [False, True])
def test_what_nobody_waited_for_is_carried_by_the_feedback(scaled: bool):
    """e <- beta e + Delta, and the next payload is of all of it."""
    config = OuterConfig(lr=0.5, feedback_decay=0.9, feedback_lr_scaled=scaled, keep=4096, values="fp64")
    anchor, params, e = ({"w": torch.randn(64, 64, dtype=torch.float64)} for _ in range(3))
    before = e["w"].clone()
    outer = SparseLoCo(anchor, config)
    outer.fold(params, e)
    delta = (anchor["w"] - params["w"]) * (0.5 if scaled else 1.0)
    assert_close(e["w"], 0.9 * before + delta)
    carried = e["w"].clone()
    sent = outer.contribute(anchor, e)  # a round in which nothing was trained
    assert_close(outer.codec.mean([sent], "all", None)["w"], 0.9 * carried)
    DiLoCo(anchor, config).fold(params, {})  # it has no feedback to carry it


def recipe(**bucket: float) -> Recipe:
    text = recipe_text(
        replicas("rack", count=2),
        model={"layers": 2},
        inner={"batch": 2, "precision": "fp64"},
        outer={"inner_steps": STEPS, "rounds": 6, "keep": 8, "values": "2bit"},
        bucket={"heartbeat_seconds": 1, "anchor_every": 2, "quorum": 1, "deadline_seconds": 0.01} | bucket,
    )
    return parse_recipe(text)


@pytest.fixture
def come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Trainer]:
    """A replica of a run in a folder, restored; nobody is waited for."""
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)
    made = recipe()
    create(made, str(tmp_path / "bucket"), tmp_path / "keys")

    def start(name: str) -> Trainer:
        fleet = take_seat(made, tmp_path, next(m for m in made.fleet() if m.name == name))
        fleet.resume()
        return fleet

    return start


def run(fleet: Trainer, rounds: range, progress: Callable[[int], None] = lambda h: None) -> None:
    run_rounds(fleet, rounds, progress, lambda t, seconds: None)


def test_a_round_that_is_settled_meanwhile_ends_there_and_the_next_begins_with_the_others(come):
    first, quick = come("rack-0"), come("rack-1")
    run(first, range(1, 2))
    run(quick, range(1, 2))
    late = come("rack-0")
    run(late, range(1, 2))  # which is settled, and was delivered before
    before = {name: e.clone() for name, e in late.feedback.items()}
    anchor = {name: p.clone() for name, p in late.anchor.items()}
    assert any(bool(e.any()) for e in before.values())
    steps: list[int] = []

    def progress(h: int) -> None:
        steps.append(h)
        if h == 2:  # of 4
            run(quick, range(2, 3))

    assert late.begin(2)
    late.train_round(2, progress)
    assert steps == [1, 2]
    assert late.step_count == STEPS + 2
    params = {name: p.detach() for name, p in late.replica.named_parameters().items()}
    late.settle(2)
    for name, e in late.feedback.items():
        assert_close(e, late.recipe.outer.feedback_decay * before[name] + anchor[name] - params[name])
    assert late.session.edge.settle() == quick.session.edge.settle()
    assert late.begin(3)
    late.train_round(3, steps.append)  # from the edge on it is one of them
    assert steps == [1, 2, 1, 2, 3, 4]
    run(quick, range(3, 4))
    manifest = late.ledger.manifest(3)
    assert manifest is not None
    assert [entry.replica for entry in manifest.entries] == ["rack-0", "rack-1"]


def test_only_the_first_round_of_a_start_is_left_in_the_middle(come):
    """A replica that is slow, and not late, delivers what it has trained."""
    slow, quick = come("rack-0"), come("rack-1")
    run(slow, range(1, 2))
    run(quick, range(1, 3))
    run(slow, range(2, 3))
    steps: list[int] = []

    def progress(h: int) -> None:
        steps.append(h)
        if h == 2:
            run(quick, range(3, 4))

    assert slow.begin(3)
    slow.train_round(3, progress)
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(("usual", "pause"), [(3.0, 0.5), (60.0, 1.0), (1800.0, 30.0), (1e6, 30.0)])
def test_a_long_round_is_not_looked_at_more_often_than_a_short_one(usual, pause, come):
    session = come("rack-0").session
    session.ledger.known = lambda t: SimpleNamespace(seconds=usual)
    assert session.look_seconds() == pause


def test_a_store_that_is_away_settles_nothing(come):
    def away(round_number: int) -> float | None:
        raise StoreError("s3://b: head manifests/000002.json: cannot reach the store", "network")

    session = come("rack-0").session
    session.watching, session.ledger.settled_at = True, away
    session.look_after()
    assert not session.overtaken()
    assert issubclass(StoreError, RunError)
