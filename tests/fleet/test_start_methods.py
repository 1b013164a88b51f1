"""How the processes of a fleet begin and end: from any Python, by a fork server, and without an orphan."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deadlines import until
from faults import kills
from joined import Joined
from small_recipes import EDGE, RACK, recipe_text

from isthmus.config import parse_recipe
from isthmus.runtime.create import create

pytestmark = pytest.mark.soak

TRAIN = """
import isthmus
print(len(isthmus.train("r.toml", "run", device="cpu", quiet=True).rows))
"""
# A cell of a notebook runs in a __main__ that has neither a file nor a name to import it by.
CELL = f"""
from code import InteractiveInterpreter
InteractiveInterpreter({{"__name__": "__main__"}}).runsource({TRAIN!r}, "<cell>", "exec")
"""


@pytest.mark.parametrize("how", ["a script without a main guard", "standard input", "a cell"])
def test_train_starts_from_any_python(how: str, tmp_path: Path):
    (tmp_path / "r.toml").write_text(recipe_text(RACK, outer={"rounds": 2, "inner_steps": 2}))
    (tmp_path / "script.py").write_text(TRAIN)
    words = {"standard input": ["-"], "a cell": ["-c", CELL]}.get(how, ["script.py"])
    done = subprocess.run(
        [sys.executable, *words],
        input=TRAIN if words == ["-"] else None,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr  # once, and not again in each worker
    assert kills.check_left_over(tmp_path) == []


@pytest.fixture
def fleet(tmp_path: Path):
    recipe = parse_recipe(recipe_text(RACK + EDGE, outer={"rounds": 100_000, "inner_steps": 2}))
    create(recipe, str(tmp_path / "bucket"), tmp_path / "keys")
    made = Joined(tmp_path)
    yield made
    made.stop()


def test_a_supervisor_that_dies_takes_its_workers_along_also_one_that_is_stopped(fleet: Joined):
    for name in ("rack", "edge"):
        fleet.join(name)
    fleet.wait_for("edge", r"round 1: anchor")
    workers = [p.pid for p in kills.processes(fleet.folder) if p.replica == "edge" and p.role == "stage"]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGSTOP)
    fleet.running["edge"].kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "end of both workers")
    assert fleet.running["rack"].poll() is None


def test_a_worker_is_there_again_soon_after_it_was_killed(fleet: Joined):
    """Its server has imported all that it needs."""
    for name in ("rack", "edge"):
        fleet.join(name)
    fleet.wait_for("rack", r"round 1: anchor")
    (worker,) = [p.pid for p in kills.processes(fleet.folder) if p.role == "full"]
    os.kill(worker, signal.SIGKILL)
    fleet.wait_for("rack", r"(?s)starting it again.*first inner step after")


def test_two_sigterms_of_a_scheduler_end_a_replica_once_and_well(fleet: Joined):
    """Slurm sends SIGTERM to every process of a job, the fork server and the workers included."""
    for name in ("rack", "edge"):
        fleet.join(name)
    fleet.wait_for("edge", r"round 1: anchor")
    supervisor = fleet.running["edge"]
    family = [*kills.processes(fleet.folder)]
    workers = [p.pid for p in family if p.replica == "edge" and p.role == "stage"]
    for pid in (supervisor.pid, kills.parent_of(workers[0]), *workers):
        os.kill(pid, signal.SIGTERM)
    assert supervisor.wait(120) == 0
    assert fleet.log("edge").count("leaving at the end of this round") == 1
    assert "leaving now" not in fleet.log("edge")
    time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
