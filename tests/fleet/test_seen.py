"""Real processes: what goes wrong in a fleet is seen from outside, by name, and without secrets."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import kills
from small_recipes import EDGE, RACK, recipe_text

from isthmus.cli.main import main
from isthmus.page.source import open_source
from isthmus.page.state import StateBuilder
from isthmus.protocol.documents import decode
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.trust import Refused
from isthmus.runlog import RunDir

pytestmark = pytest.mark.soak

LIMIT_SECONDS = 180.0
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


class Train:
    """`isthmus train` in a process of its own, with what it has said so far."""

    def __init__(self, folder: Path, fleet: str) -> None:
        self.folder, self.run = folder, folder / "run"
        text = recipe_text(
            fleet,
            model={"layers": 2},
            inner={"batch": 2, "precision": "fp32"},
            outer={"inner_steps": 3, "rounds": 100_000, "keep": 8, "values": "2bit"},
            bucket={"heartbeat_seconds": 1},
        )
        (folder / "r.toml").write_text(text)
        self.log = folder / "said"
        words = ["train", folder / "r.toml", "--run", self.run, "--device", "cpu"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", *map(str, words)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"AWS_SECRET_ACCESS_KEY": SECRET},
            )

    def until(self, found: Callable[[], object]) -> object:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (what := found()):
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        return what

    def rounds(self) -> int:
        rows = RunDir.open(self.run).rows() if (self.run / "recipe.toml").exists() else []
        return rows[-1].round if rows else 0

    def member(self, capsys, name: str) -> dict:
        capsys.readouterr()
        assert main(["status", str(self.run), "--json"]) == 0
        members = json.loads(capsys.readouterr().out)["members"]
        return next(member for member in members if member["replica"] == name)

    def stage(self, number: int) -> int:
        """The process id of a stage."""
        return next(p.pid for p in kills.processes(self.run) if p.name == f"edge stage {number}")


@pytest.fixture
def train(tmp_path) -> Iterator[Train]:
    made = Train(tmp_path, RACK + EDGE)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()
    assert kills.check_left_over(tmp_path) == []


@pytest.mark.fleet_check
def test_a_stage_that_is_killed_is_named_and_counted_right_after_its_restart(train, capsys):
    train.until(lambda: train.rounds() >= 1)
    assert train.member(capsys, "edge")["restarts"] == 0
    os.kill(train.stage(1), signal.SIGKILL)
    member = train.until(lambda: (found := train.member(capsys, "edge"))["restarts"] and found)
    assert member["restarts"] == 1
    assert member["last_error"] == "stage 1: killed by signal 9"
    assert member["missing"] in ([], [1])  # never both
    train.until(lambda: train.member(capsys, "edge")["state"] == "training")
    assert train.member(capsys, "edge")["restarts"] == 1, "the first heartbeat of the next worker has it too"
    assert main(["status", str(train.run)]) == 0
    assert "edge was started again 1 time, the last" in capsys.readouterr().out
    train.until(lambda: "edge was started again: stage 1: killed by signal 9" in train.log.read_text())

    one = StateBuilder().build(open_source(str(train.run)).look())["replicas"][1]
    assert (one["name"], one["restarts"], one["last_error"]) == ("edge", 1, "stage 1: killed by signal 9")
    assert one["disk_free"]
    train.process.send_signal(signal.SIGINT)
    train.process.wait(LIMIT_SECONDS)
    assert RunDir.open(train.run).about["restarts"] == 1


def test_what_a_heartbeat_says_of_its_machine_is_checked_where_it_is_read():
    def read(**body):
        return decode(json.dumps(body).encode(), Heartbeat, "heartbeat")

    good = {"restarts": 3, "last_error": "stage 1: lost", "disk_free_bytes": 5, "last_error_seconds": 1.5}
    said = read(missing=[1], vitals=good)
    assert (said.missing, said.vitals.restarts, said.vitals.last_error) == ((1,), 3, "stage 1: lost")
    odd = {"restarts": -1, "last_error": "\x1b[2J", "disk_free_bytes": -5, "last_error_seconds": "x"}
    for missing in ([True], [-1], [10**6], ["1"], list(range(65)), "12", {"1": 1}):
        with pytest.raises(Refused, match="the heartbeat is malformed"):
            read(missing=missing)
    for vitals in ([1], {"last_error": "x" * 201}, *({name: value} for name, value in odd.items())):
        with pytest.raises(Refused, match="the heartbeat is malformed"):
            read(vitals=vitals)
