"""Three processes with loops of their own around a module that Isthmus does not know, and SIGKILL."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loops import Run

from isthmus.cli.main import main
from isthmus.protocol.access import open_ledger

NAMES = ("a", "b", "c")
SCRIPT = Path(__file__).parent / "loop_process.py"


class Fleet:
    """The processes of a run, their saved states and their output."""

    def __init__(self, run: Run, pause: float = 0.02) -> None:
        self.run, self.pause = run, pause
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def state(self, name: str) -> Path:
        return self.run.folder / f"{name}.pt"

    def start(self, name: str, saved: bool = True) -> None:
        state = str(self.state(name)) if saved else "-"
        command = [sys.executable, str(SCRIPT), str(self.run.keys[name]), state, str(self.pause)]
        with open(self.run.folder / f"{name}.out", "ab") as output:
            self.processes[name] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def said(self, name: str) -> str:
        return (self.run.folder / f"{name}.out").read_text()

    def wait_for_round(self, round_number: int, seconds: float = 90.0) -> None:
        ledger, until = open_ledger(self.run.url), time.monotonic() + seconds
        while ledger.last_round() < round_number:
            assert time.monotonic() < until, "\n".join(self.said(name) for name in self.processes)
            time.sleep(0.05)

    def ends(self, seconds: float = 150.0) -> tuple[set[str], float]:
        """(the digests that all replicas end with, the largest loss)"""
        until = time.monotonic() + seconds
        for name, process in self.processes.items():
            assert process.wait(max(0.1, until - time.monotonic())) == 0, self.said(name)
        last = [re.findall(r"digest (\w+) loss ([\d.]+)", self.said(name))[-1] for name in self.processes]
        return {digest for digest, _ in last}, max(float(loss) for _, loss in last)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def fleets() -> Iterator[list[Fleet]]:
    started: list[Fleet] = []
    yield started
    for fleet in started:
        fleet.stop()


def begin(fleets: list[Fleet], folder: Path, **more: object) -> Fleet:
    overrides = {"bucket.heartbeat_seconds": 0.5, "bucket.anchor_every": 3}
    overrides |= dict(more.pop("overrides", {}))  # pyright: ignore[reportCallIssue, reportArgumentType]
    fleet = Fleet(Run(folder, NAMES, overrides=overrides, **more))
    fleets.append(fleet)
    return fleet


@pytest.mark.parametrize("store", ["folder", "moto"])
def test_three_loops_end_at_one_digest_through_kills(
    store: str, tmp_path: Path, fleets: list[Fleet], request: pytest.FixtureRequest
):
    url = request.getfixturevalue(f"{store}_url")
    fleet = begin(fleets, tmp_path, rounds=14, url=url)
    for name in NAMES:
        fleet.start(name)
    fleet.wait_for_round(3)
    shutil.copy(fleet.state("b"), tmp_path / "old.pt")
    fleet.kill("a")  # with its state
    fleet.start("a")
    fleet.wait_for_round(6)
    fleet.kill("b")  # with an old one
    shutil.copy(tmp_path / "old.pt", fleet.state("b"))
    fleet.start("b")
    fleet.wait_for_round(9)
    fleet.kill("c")  # with none
    fleet.state("c").unlink()
    fleet.start("c")
    digests, _ = fleet.ends()
    assert len(digests) == 1
    assert main(["ledger", "verify", url]) == 0


def test_a_replica_that_comes_late_ends_with_the_others(tmp_path: Path, fleets: list[Fleet]):
    overrides = {"bucket.start_seconds": 0.0, "bucket.deadline_seconds": 2.0}
    fleet = begin(fleets, tmp_path, rounds=20, overrides=overrides)
    fleet.pause = 0.2
    for name in ("a", "b"):
        fleet.start(name)
    fleet.wait_for_round(4)
    fleet.start("c")
    digests, _ = fleet.ends()
    assert len(digests) == 1
    counted = [
        entry.replica for t in range(1, 21) for entry in open_ledger(fleet.run.url).manifest(t).entries
    ]
    assert counted.count("c") > 0


@pytest.mark.soak
def test_twenty_kills_at_random_times_cost_no_loss(tmp_path: Path, fleets: list[Fleet]):
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    whole = begin(fleets, tmp_path / "whole", rounds=30)
    for name in NAMES:
        whole.start(name)
    digests, loss = whole.ends()
    assert len(digests) == 1
    fleet, chance = begin(fleets, tmp_path / "killed", rounds=30), random.Random(os.environ.get("SEED", "1"))
    for name in NAMES:
        fleet.start(name)
    fleet.wait_for_round(1)
    for _ in range(20):
        name = chance.choice(NAMES)
        time.sleep(chance.uniform(0.2, 2.0))
        if fleet.processes[name].poll() is None:
            fleet.kill(name)
            fleet.start(name)
    digests, killed_loss = fleet.ends(240)
    assert len(digests) == 1
    assert killed_loss < 1.15 * loss
    assert main(["ledger", "verify", fleet.run.url]) == 0
