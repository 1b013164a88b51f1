"""A worker that is killed costs its own replica only: its launcher says so, and nobody waits."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import kills
from small_recipes import recipe_text, replicas

from isthmus.protocol.heartbeat import WAITING

LIMIT_SECONDS = 300
# Workers that start while the file is there wait until it is gone. Python imports this first.
HOLD = """
import os, sys, time
while "isthmus.runtime.worker" in sys.orig_argv and os.path.exists(os.environ["HOLD"]):
    time.sleep(0.05)
"""


class Fleet:
    """`isthmus train` of three full replicas that beat so rarely that silence is never noticed."""

    def __init__(self, folder: Path) -> None:
        recipe = recipe_text(
            replicas("rack", count=3),
            model={"layers": 2},
            inner={"batch": 2},
            outer={"inner_steps": 3, "rounds": 100_000, "keep": 8, "values": "2bit"},
            bucket={"heartbeat_seconds": 600, "anchor_every": 100},
        )
        (folder / "recipe.toml").write_text(recipe)
        (folder / "sitecustomize.py").write_text(HOLD)
        self.run, self.hold, self.log = folder / "run", folder / "hold", folder / "train.log"
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        words = ["train", str(folder / "recipe.toml"), "--run", str(self.run), "--device", "cpu"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HOLD": str(self.hold)},
            )

    def until(self, done: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := done()):
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return found

    def body(self, key: str) -> dict[str, Any]:
        """Of a document in the bucket; empty where there is none."""
        try:
            return json.loads((self.run / "bucket" / key).read_text())["body"]
        except FileNotFoundError:
            return {}

    def last_round(self) -> int:
        return max((int(p.stem) for p in (self.run / "bucket" / "manifests").glob("*.json")), default=0)

    def counted(self, round_number: int) -> list[str]:
        return [entry["replica"] for entry in self.body(f"manifests/{round_number:06d}.json")["entries"]]

    def kill_worker(self, replica: str) -> str:
        """SIGKILL; the incarnation that it ends."""
        incarnation = self.body(f"members/{replica}/live.json")["incarnation"]
        worker = next(p for p in kills.processes(self.run) if p.role == "full" and p.replica == replica)
        os.kill(worker.pid, signal.SIGKILL)
        return incarnation


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    started = Fleet(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()
    assert kills.check_left_over(tmp_path) == []


def test_rounds_are_settled_without_a_killed_worker_before_its_next_one_beats(fleet: Fleet):
    fleet.until(lambda: fleet.last_round() >= 2 and len(fleet.counted(fleet.last_round())) == 3)
    fleet.hold.touch()  # its next worker does not come
    dead = fleet.kill_worker("rack-1")
    said = fleet.until(lambda: fleet.body("members/rack-1/waiting.json"))
    assert (said["state"], said["incarnation"]) == (WAITING, dead)
    first = fleet.last_round() + 1
    fleet.until(lambda: fleet.last_round() >= first + 3)
    assert fleet.body("members/rack-1/live.json")["incarnation"] == dead
    for t in range(first + 1, first + 4):  # it may have delivered to the round that was open
        assert fleet.counted(t) == ["rack-0", "rack-2"]
    fleet.hold.unlink()
    fleet.until(lambda: "rack-1" in fleet.counted(fleet.last_round()))
    assert fleet.body("members/rack-1/live.json")["incarnation"] != dead
