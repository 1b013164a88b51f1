"""Two machines with one key: both are told, by name, and the run goes on."""

import re

import pytest
import torch
from little import Little
from returning import Seat, seat, small

from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.same_key import SameKey


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


class Machine:
    """A start of a replica that only beats."""

    def __init__(self, ledger: Ledger, incarnation: str, host: str, pid: int = 7) -> None:
        self.ledger, self.incarnation, self.host, self.pid = ledger, incarnation, host, pid
        self.said: list[str] = []
        self.same_key = SameKey(ledger, incarnation, self.said.append)
        self.num_beats = 0

    def beat(self, round_number: int = 1, state: str = "training") -> None:
        if self.num_beats:
            self.same_key.look(round_number)
        self.num_beats += 1
        self.ledger.beat(
            Heartbeat(
                incarnation=self.incarnation,
                beat=self.num_beats,
                host=self.host,
                pid=self.pid,
                state=state,
                also_on=self.same_key.also_on,
            )
        )


def two_machines(url: str, folder) -> tuple[Machine, Machine]:
    little = Little(url, folder)
    return Machine(little.ledger("a"), "aa", "rack-one"), Machine(little.ledger("a"), "bb", "rack-two", 8)


def told(machine: Machine) -> list[str]:
    return [found[1] for line in machine.said if (found := re.search(r"here, and on (.*?);", line))]


def test_both_are_told_of_the_other_by_name_once(any_store_url, tmp_path):
    one, two = two_machines(any_store_url, tmp_path)
    for t in range(1, 6):
        one.beat(t)
        two.beat(t)
    assert told(one) == ["rack-two (process 8)"]
    assert told(two) == ["rack-one (process 7)"]
    assert "replica a runs twice with one key" in one.said[0]
    assert one.ledger.heartbeat("a")[0].also_on == "rack-one (process 7)"


def test_in_one_long_round_too(tmp_path):
    one, two = two_machines(str(tmp_path / "bucket"), tmp_path)
    for _ in range(5):
        one.beat()
        two.beat()
    assert len(told(one)) == len(told(two)) == 1


def test_when_the_other_has_ended_nobody_says_so_any_longer(tmp_path):
    one, two = two_machines(str(tmp_path / "bucket"), tmp_path)
    for t in range(1, 5):
        one.beat(t)
        two.beat(t)
    two.beat(5, state="left")
    one.beat(6)
    one.beat(7)
    assert one.ledger.heartbeat("a")[0].also_on == ""
    assert len(told(one)) == 1


@pytest.mark.parametrize("last", ["killed", "in flight"])
def test_an_ordinary_restart_tells_nothing(last, tmp_path):
    """Killed; or its last heartbeat lands after the first of the next start, as that of `train --resume`
    may, which beats in the name of a replica that starts."""
    before, after = two_machines(str(tmp_path / "bucket"), tmp_path)
    for t in range(1, 4):
        before.beat(t)
    after.beat(4)
    if last == "in flight":
        before.beat(4)
    for t in range(4, 9):
        after.beat(t)
        after.beat(t)
    assert after.said == []


def test_one_look_a_round_is_one_request(tmp_path):
    one, _ = two_machines(str(tmp_path / "bucket"), tmp_path)
    one.beat(1)
    before = one.ledger.store.requests
    for _ in range(10):
        one.beat(1)
    now = one.ledger.store.requests
    assert now["get"] - before["get"] == 1
    assert sum(now[verb] - before[verb] for verb in ("head", "list")) == 0


# Their commits


def come(one: Seat):
    fleet = one.come()
    assert Recovery(fleet).resume() == 0
    return fleet


def test_of_two_commits_the_first_stands_the_other_update_returns_and_the_run_goes_on(tmp_path):
    here = seat(small(rounds=4, full=1, quorum=1), tmp_path)
    there = Seat(here.recipe, tmp_path, "rack", machine="elsewhere")
    first, second = come(here), come(there)
    for tensor in second.feedback.values():  # their states have gone different ways
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) * 1e-3)
    fleets = [first, second]
    for t in (1, 2, 3):
        own = [fleet.train_round(t - 1, lambda h: None) for fleet in fleets]
        for fleet, mine in zip(fleets, own, strict=True):
            fleet.exchange.deliver(t, mine[0])
        for fleet in fleets:
            fleet.apply(t, fleet.exchange.close(t, []))
        fleets.reverse()  # once the one is first, once the other
    assert here.anchors() == there.anchors()
    for one, rounds in ((here, [2]), (there, [1, 3])):
        stands = [line for line in one.said if "has committed another update, and that one stands" in line]
        assert [int(re.search(r"round (\d+)", line)[1]) for line in stands] == rounds
        assert sum("returned to the error feedback" in line for line in one.said) == len(rounds)
    entries = [entry for t in (1, 2, 3) for entry in first.ledger.manifest(t).entries]
    assert [entry.replica for entry in entries] == ["rack"] * 3
    assert run_rounds(first, first.exchange, range(4, 5), lambda h: None, lambda t, seconds: None)
