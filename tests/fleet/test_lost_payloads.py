"""Payloads that a round counts are lost while a replica is away: how its trainer gets past them."""

import shutil
from pathlib import Path

import pytest
from returning import LATE, Seat, seat, small

from isthmus.errors import Diverged
from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer, history
from isthmus.protocol.damage import find_damage
from isthmus.protocol.replay import Replay
from isthmus.protocol.rescue import LedPast
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.trainer import Trainer
from isthmus.store.objects import open_store


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


def lose(folder: Path, round_number: int) -> None:
    """All payloads of a round, and all copies."""
    store = open_store(str(folder / "bucket"))
    for key in store.list("payloads"):
        if f"/{round_number:06d}/" in key:
            store.delete(key)


def rounds_to(back: Trainer, done: int, last: int) -> None:
    """As the worker does it."""
    recovery = Recovery(back)
    while done < last:
        try:
            run_rounds(
                back, back.exchange, range(done + 1, last + 1), lambda h: None, lambda t, seconds: None
            )
            done = last
        except LedPast as gap:
            done = recovery.pass_over(gap)


def test_a_replica_that_was_away_gets_past_by_a_later_anchor_and_keeps_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its state is of round 1, round 3 is lost, and the anchor of round 4 is there. Before, its worker was
    started again for ever."""
    monkeypatch.setattr(history, "WITNESS_ROUNDS", 2)  # so soon the other one speaks for anchors
    recipe = small(rounds=9, **LATE, anchor_every=4)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    away.run(1)
    there.run(6)
    lose(tmp_path, 3)
    back = away.come()
    rounds_to(back, Recovery(back).resume(), 6)
    assert away.anchors()[6] == there.anchors()[6]
    assert 3 not in away.anchors()
    assert back.step_count == 3  # its optimiser is its own
    assert any("the anchor of round 4 leads past it" in line for line in away.said)


def test_after_a_power_cut_a_replica_puts_its_own_update_again(tmp_path: Path):
    usual, struck = seat(small(full=1), tmp_path / "usual"), seat(small(full=1), tmp_path / "struck")
    usual.run(4)
    struck.run(3)
    lose(tmp_path / "struck", 3)
    struck.run(4)
    assert struck.anchors() == usual.anchors()
    assert any(
        "round 3: our shard 0 was lost; it is put again from this disk" in line for line in struck.said
    )


def decides(alone: Seat, back: Trainer) -> None:
    """While it waits, the decision is made."""

    def decide(seconds: float) -> None:
        assert back.exchange.awaiting.startswith("a copy of lost payloads")
        damage = find_damage(back.ledger, clock=lambda: 1e11, log=alone.said.append)
        assert back.ledger.repairs.decide(damage.decision)

    back.exchange.rescue._pause = decide  # type: ignore[method-assign]


def test_a_replica_without_state_goes_on_from_the_last_whole_model_once_it_is_decided(tmp_path: Path):
    alone = seat(small(rounds=9, full=1, anchor_every=9), tmp_path)
    alone.run(4)
    lose(tmp_path, 3)
    shutil.rmtree(tmp_path / "work")
    back = alone.come()
    decides(alone, back)
    rounds_to(back, Recovery(back).resume(), 6)
    replay = Replay(back.ledger)
    while replay.step():
        pass
    assert replay.round == 6
    assert {replay.digest()[:16]} == alone.anchors()[6]
    assert alone.anchors()[2] <= alone.anchors()[4]  # theta^(4) is theta^(2) now
    assert alone.run(7).status.round == 7  # with the state that it saved since


def test_an_update_to_a_void_round_returns_to_the_feedback(tmp_path: Path):
    alone = seat(small(rounds=9, full=1, anchor_every=9), tmp_path)
    alone.run(3)
    lose(tmp_path, 3)
    back = alone.come()
    back.exchange.rescue.saved = lambda round_number: {}  # as if its disk had it no more
    decides(alone, back)
    assert Recovery(back).resume() == 3
    assert any(
        "round 3 was settled without our update; it returned to the error feedback" in line
        for line in alone.said
    )
    assert back.ledger.repairs.decision(3).digest == back.exchange.anchor


def test_state_of_void_rounds_is_put_aside(tmp_path: Path):
    alone = seat(small(rounds=9, full=1, anchor_every=9), tmp_path)
    alone.run(4)
    shutil.copytree(tmp_path / "work", tmp_path / "copy")
    lose(tmp_path, 3)
    ledger = alone.come().ledger
    assert ledger.repairs.decide(find_damage(ledger, clock=lambda: 1e11).decision)
    with pytest.raises(Diverged, match="rounds 3 to 4 are void by the decision of rack"):
        Recovery(alone.come()).resume()
