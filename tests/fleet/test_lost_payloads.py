"""Payloads that a round counts are lost while a replica is away: how its trainer gets past them."""

from pathlib import Path

import pytest
from clocks import Clock
from returning import LATE, seat, small

from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer
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


def at_once(back: Trainer) -> None:
    """Its waits take no time."""
    clock = Clock()
    back.session.exchange.missing.clock = clock
    back.session.exchange.missing.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)


def test_a_replica_that_was_away_gets_past_by_a_later_anchor_and_keeps_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its state is of round 1, round 3 is lost, and the anchor of round 4 is there. Before, its worker was
    started again for ever."""
    recipe = small(rounds=9, **LATE, anchor_every=4)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    away.run(1)
    there.run(6)
    lose(tmp_path, 3)
    back = away.come()
    at_once(back)
    run_rounds(back, range(back.resume() + 1, 7), lambda h: None, lambda t, seconds: None)
    assert away.anchors()[6] == there.anchors()[6]
    assert 3 not in away.anchors()
    assert back.step_count == 3  # its optimiser is its own
    assert any("the anchor of round 4 leads past it" in line for line in away.said)
