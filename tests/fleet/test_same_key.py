"""Two machines with one key: of each round the first commit stands, and the run goes on."""

import re

import pytest
import torch
from returning import Seat, seat, small

from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


def come(one: Seat):
    fleet = one.come()
    assert fleet.resume() == 0
    return fleet


def test_of_two_commits_the_first_stands_the_other_update_returns_and_the_run_goes_on(tmp_path):
    here = seat(small(rounds=4, full=1, quorum=1), tmp_path)
    there = Seat(here.recipe, tmp_path, "rack", machine="elsewhere")
    there.incarnation = "fedcba9876543210"
    first, second = come(here), come(there)
    for tensor in second.feedback.values():  # their states have gone different ways
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 1e-3)
    fleets = [first, second]
    for t in (1, 2, 3):
        for fleet in fleets:
            fleet.train_round(t, lambda h: None)
        for fleet in fleets:
            fleet.settle(t)
        fleets.reverse()  # once the one is first, once the other
    assert here.anchors() == there.anchors()
    for one, rounds in ((here, [2]), (there, [1, 3])):
        stands = [line for line in one.said if "has committed another update, and that one stands" in line]
        assert [int(re.search(r"round (\d+)", line)[1]) for line in stands] == rounds
        emptied = [line for line in one.said if "the error feedback is emptied where that update" in line]
        assert [int(re.search(r"round (\d+)", line)[1]) for line in emptied] == rounds
    entries = [entry for t in (1, 2, 3) for entry in first.ledger.manifest(t).entries]
    assert [entry.replica for entry in entries] == ["rack"] * 3
    assert run_rounds(first, range(4, 5), lambda h: None, lambda t, seconds: None)
