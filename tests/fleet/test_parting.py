"""SIGTERM with --grace: a replica saves and stops, in the middle of a round too, and the next start goes on
to the same bits."""

import signal
from pathlib import Path

import pytest
import torch
from clocks import Clock
from returning import seat, small
from test_middle import everything

from isthmus.errors import ConfigError
from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer
from isthmus.protocol.patience import LeftWaiting, Patience
from isthmus.runtime import preflight
from isthmus.runtime.leaving import Parted, Parting
from isthmus.runtime.supervisor import count_signals
from isthmus.runtime.trainer import Trainer

ROUNDS = 4


@pytest.fixture(autouse=True)
def _close_at_once(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


def told(grace_seconds: float, clock: Clock) -> Parting:
    """What a worker knows once its supervisor got SIGTERM."""
    parting = Parting(clock)
    parting.begin(grace_seconds)
    return parting


def same(whole: Trainer, back: Trainer) -> None:
    for key, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(back)[key]), key


@pytest.mark.parametrize("inner_step", [1, 2])
def test_a_round_that_does_not_end_in_time_is_left_in_its_middle_and_gone_on_with(inner_step, tmp_path: Path):
    usual, taken = seat(small(full=1), tmp_path / "usual"), seat(small(full=1), tmp_path / "taken")
    whole, fleet, clock = usual.run(ROUNDS), taken.come(), Clock()
    fleet.checkpoint.is_due = lambda edge: False  # of itself it saves nothing

    def progress(h: int) -> None:
        if (fleet.status.round, h) == (2, inner_step):
            fleet.parting = told(0.0, clock)

    rounds = range(fleet.resume() + 1, ROUNDS + 1)
    with pytest.raises(Parted, match=rf"stopped in round 2, after {inner_step} of its 3 inner steps"):
        run_rounds(fleet, rounds, progress, lambda t, s: None)
    again: list[int] = []
    back = taken.come()
    rounds = range(back.resume() + 1, ROUNDS + 1)
    run_rounds(back, rounds, again.append, lambda t, s: None)
    back.finish()
    assert again[0] == inner_step + 1  # no inner step is trained twice
    same(whole, back)
    assert taken.anchors() == usual.anchors()


def test_a_round_that_ends_in_time_is_saved_at_once_and_finished(tmp_path: Path):
    taken, clock = seat(small(full=1), tmp_path), Clock()
    fleet, saved = taken.come(), []
    fleet.checkpoint.is_due = lambda edge: edge

    def progress(h: int) -> None:
        saved.append(fleet.checkpoint.numbers())
        if (fleet.status.round, h) == (2, 1):
            fleet.parting = told(3600.0, clock)

    def leave() -> bool:
        return fleet.parting.asked()

    rounds = range(fleet.resume() + 1, ROUNDS + 1)
    assert not run_rounds(fleet, rounds, progress, lambda t, s: None, leave)
    assert fleet.status.round == 2
    at = 4 * (2 - 1) + 1  # of round 2, after one of three inner steps
    assert [at in numbers for numbers in saved] == [False] * 4 + [True] * 2
    assert max(fleet.checkpoint.numbers()) == 4 + 3  # and with its update on the way


def test_who_leaves_at_the_edge_of_a_round_goes_on_from_there_and_trains_nothing_twice(tmp_path: Path):
    usual, taken = seat(small(full=1), tmp_path / "usual"), seat(small(full=1), tmp_path / "taken")
    whole, fleet = usual.run(ROUNDS), taken.come()
    fleet.checkpoint.is_due = lambda edge: False
    rounds = range(fleet.resume() + 1, ROUNDS)
    run_rounds(fleet, rounds, lambda h: None, lambda t, s: None)
    fleet.finish()
    fleet.save_now()
    back, steps = taken.come(), []
    rounds = range(back.resume() + 1, ROUNDS + 1)
    assert rounds == range(ROUNDS, ROUNDS + 1)
    run_rounds(back, rounds, steps.append, lambda t, s: None)
    back.finish()
    assert steps == [1, 2, 3]
    assert f"back in round {ROUNDS}, at its start" in taken.said
    same(whole, back)


def test_who_waits_for_the_others_saves_what_it_delivered_and_leaves(tmp_path: Path):
    recipe = small(full=2, quorum=2, deadline_seconds=3600.0)
    waits, other = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    fleet = waits.come()
    fleet.checkpoint.is_due = lambda edge: False
    asked: list[bool] = []
    fleet.session.exchange.patience = Patience(
        waits.said.append, parting=lambda: bool(asked.append(True)) or True, sleep=lambda s: None
    )
    fleet.resume()
    with pytest.raises(LeftWaiting):
        run_rounds(fleet, range(1, 2), lambda h: None, lambda t, s: None)
    assert asked
    assert fleet.checkpoint.numbers() == set()
    fleet.save_now()
    assert fleet.checkpoint.numbers() == {3}
    other.background = True
    back = waits.come()
    assert back.checkpoint.numbers() == {3}
    assert not any("training round" in line for line in waits.said)


def test_half_of_the_time_is_kept_and_a_second_request_prolongs_nothing():
    clock = Clock()
    assert not Parting(clock).asked()
    assert not Parting(clock).fits(0.0)
    parting = told(100.0, clock)
    parting.begin(1000.0)
    assert parting.asked()
    assert parting.fits(50.0)
    assert not parting.fits(51.0)
    assert not parting.is_over()
    clock.now += 100.0
    assert parting.is_over()


def test_sigterm_counts_once_and_ctrl_c_each_time():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    seen: list[int] = []
    try:
        count_signals(seen)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]


def test_a_job_waits_until_the_job_before_it_is_silent_and_not_for_ever(monkeypatch, tmp_path: Path):
    looks, said, clock = [], [], Clock()

    def taken(ledger, replica, work):
        looks.append(replica)
        if len(looks) < 3:
            raise preflight.Taken("replica rack-0 is live in this run (heartbeat 1 s ago)")

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(preflight, "check_not_taken", taken)
    how = {"log": said.append, "clock": clock, "sleep": sleep}
    preflight.wait_until_free(None, "rack-0", tmp_path, **how)  # type: ignore[arg-type]
    assert looks == ["rack-0"] * 3
    assert len(said) == 1

    def always(ledger, replica, work):
        raise preflight.Taken("live")

    monkeypatch.setattr(preflight, "check_not_taken", always)
    with pytest.raises(ConfigError, match="live"):
        preflight.wait_until_free(None, "rack-0", tmp_path, **how)  # type: ignore[arg-type]
