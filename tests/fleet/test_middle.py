"""A kill inside a round costs what was trained since the last checkpoint there, and no bit."""

from pathlib import Path

import pytest
import torch
from returning import LATE, Seat, seat, small
from torch.testing import assert_close

from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer
from isthmus.runtime.checkpoint import Checkpoint
from isthmus.runtime.trainer import Trainer

ROUNDS = 4


class Killed(BaseException):
    """Stands for SIGKILL: nothing below catches it."""


@pytest.fixture(autouse=True)
def _at_every_step(monkeypatch):
    """A checkpoint is saved after each inner step, and closers step in at once."""
    plain = Checkpoint.__init__

    def often(self, *args, **how):
        plain(self, *args, **how, least_seconds=0.0)

    monkeypatch.setattr(Checkpoint, "__init__", often)
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


def everything(fleet: Trainer) -> dict[str, torch.Tensor]:
    named = {f"anchor/{name}": t for name, t in fleet.anchor.items()}
    named |= {f"feedback/{name}": t for name, t in fleet.feedback.items()}
    return named | fleet.replica.state() | {"steps": torch.tensor(fleet.step_count)}


def killed(at: Seat, round_number: int, inner_step: int) -> list[int]:
    """Train until that inner step of that round has ended; how many this start has taken."""
    fleet, steps = at.come(), []

    def progress(h: int) -> None:
        steps.append(h)
        if fleet.status.round == round_number and h == inner_step:
            raise Killed

    rounds = range(fleet.resume() + 1, round_number + 1)
    with pytest.raises(Killed):
        run_rounds(fleet, rounds, progress, lambda t, seconds: None)
    return steps


def told_losses(fleet: Trainer) -> list[float | None]:
    manifests = [fleet.ledger.manifest(t) for t in range(1, ROUNDS + 1)]
    return [manifest.entries[0].facts.loss for manifest in manifests if manifest]


@pytest.mark.parametrize("inner_step", [1, 2, 3])
@pytest.mark.parametrize("round_number", [1, 3])
def test_a_round_goes_on_from_its_middle_to_the_same_bits(round_number, inner_step, tmp_path: Path):
    usual, struck = seat(small(full=1), tmp_path / "usual"), seat(small(full=1), tmp_path / "struck")
    whole = usual.run(ROUNDS)
    killed(struck, round_number, inner_step)
    again: list[int] = []
    back = struck.come()
    rounds = range(back.resume() + 1, ROUNDS + 1)
    run_rounds(back, rounds, again.append, lambda t, seconds: None)
    back.finish()
    assert again[0] == inner_step  # the step that had ended was not yet saved; those before it were
    if inner_step > 1:
        assert f"back in round {round_number}, after {inner_step - 1} of its inner steps" in struck.said
    for key, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(back)[key]), key
    assert struck.anchors() == usual.anchors()
    losses = [
        [m.entries[0].facts.loss for t in (1, 2, 3, 4) if (m := f.ledger.manifest(t))] for f in (whole, back)
    ]
    assert losses[0] == losses[1]


def test_it_can_be_killed_again_and_again(tmp_path: Path):
    usual, struck = seat(small(full=1), tmp_path / "usual"), seat(small(full=1), tmp_path / "struck")
    whole = usual.run(ROUNDS)
    assert killed(struck, 2, 2) == [1, 2, 3, 1, 2]
    assert killed(struck, 2, 3) == [2, 3]
    back = struck.run(ROUNDS)
    for key, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(back)[key]), key


def test_what_was_trained_of_a_round_that_is_settled_meanwhile_is_in_the_feedback(tmp_path: Path):
    recipe = small(**LATE)
    late, quick = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    late.run(1)
    quick.run(1)
    killed(late, 2, 3)  # the checkpoint after two inner steps is on disk
    then = late.come()
    assert then.resume() == 1
    assert len(then.losses) == 2
    before = {name: e.clone() for name, e in then.feedback.items()}
    start, params = {name: p.clone() for name, p in then.anchor.items()}, then.params
    quick.run(2)
    back = late.come()
    run_rounds(back, range(back.resume() + 1, 3), lambda h: None, lambda t, s: None)
    beta = recipe.outer.feedback_decay
    for name, e in back.feedback.items():
        assert_close(e, beta * before[name] + start[name] - params[name])
    assert back.step_count == then.step_count
    back.train_round(3, lambda h: None)
    assert back.session.pending.measured["inner_steps"] == [2 + recipe.outer.inner_steps]
    assert any("what we trained of it goes to the error feedback" in line for line in late.said)


@pytest.mark.parametrize("file", ["params", "place", "optimiser"])
def test_a_damaged_checkpoint_is_one_line_and_the_round_is_trained_from_the_one_before(file, tmp_path: Path):
    alone = seat(small(full=1), tmp_path)
    usual = seat(small(full=1), tmp_path / "usual")
    killed(alone, 3, 3)
    (path,) = tmp_path.glob(f"work/rack/state/inside/round-*/{file}.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    back = alone.run(ROUNDS)
    (line,) = [line for line in alone.said if "a checkpoint is lost" in line]
    assert "is damaged" in line
    whole = usual.run(ROUNDS)
    for key, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(back)[key]), key
