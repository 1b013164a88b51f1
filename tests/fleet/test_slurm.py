"""A real Slurm takes every replica's machine back in the middle of a round: no round is lost."""

import os
import re
import sys
from pathlib import Path

import pytest
import slurm_cluster
from faults import kills
from returning import small
from slurm_cluster import Cluster, until

from isthmus.protocol.access import open_ledger

pytestmark = pytest.mark.soak

ROUNDS, NAMES = 12, ("rack-0", "rack-1")
# Workers stop after the first inner step of a round for which there is a file, until it is gone or they must
# go: so the test does not race with them.
HOLD = """
import os, sys, time
if "forkserver" in " ".join(sys.orig_argv):
    from isthmus.runtime.trainer import Trainer
    plain = Trainer._wish
    def held(fleet, h, seconds_left):
        mark = os.path.join({folder!r}, f"{{fleet.member.name}}-{{fleet.session.round}}")
        if os.path.exists(mark):
            os.rename(mark, mark + ".held")
            while os.path.exists(mark + ".held") and not fleet.parting.asked():
                time.sleep(0.05)
        return plain(fleet, h, seconds_left)
    Trainer._wish = held
"""


@pytest.fixture
def cluster():
    if reason := slurm_cluster.reason_to_skip():
        pytest.skip(reason)
    with Cluster(len(NAMES)) as found:
        yield found


class Fleet:
    """Two replicas as an array of jobs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder, self.site = folder, folder / "site"
        recipe = small(rounds=ROUNDS, precision="fp32", deadline_seconds=3600.0)
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(HOLD.format(folder=str(self.site)))
        for mark in ("rack-0-3", "rack-1-6", "rack-0-9"):
            (self.site / mark).touch()
        path = os.pathsep.join([str(self.site), *sys.path])
        how = {"PYTHONPATH": path, "ISTHMUS_JOIN": "--device cpu --threads 1"}
        self.number = slurm_cluster.submit_run(recipe, folder, NAMES, cluster.environment | how)
        self.tasks = [f"{self.number}_{i}" for i in range(len(NAMES))]

    def log(self, i: int) -> str:
        path = self.folder / f"isthmus-{self.number}_{i}.log"
        return path.read_text() if path.exists() else ""

    def held(self, mark: str) -> bool:
        return (self.site / f"{mark}.held").exists()

    def trains_again(self, i: int) -> bool:
        return self.log(i).count("first inner step after") == 2


def test_jobs_that_slurm_requeues_lose_no_round_and_end_with_one_digest(cluster: Cluster, tmp_path: Path):
    fleet = Fleet(cluster, tmp_path)
    until(lambda: fleet.held("rack-0-3"), "rack-0 does not train")
    cluster.requeue(fleet.tasks[0])
    until(lambda: fleet.trains_again(0), "rack-0 does not come back")
    until(lambda: fleet.held("rack-1-6"), "rack-1 does not train")
    cluster.requeue(fleet.tasks[1])
    until(lambda: fleet.trains_again(1), "rack-1 does not come back")
    until(lambda: fleet.held("rack-0-9"), "rack-0 does not go on")
    (fleet.site / "rack-0-9.held").unlink()
    for i, task in enumerate(fleet.tasks):
        until(lambda task=task: cluster.ended(task), "the jobs do not end")
        assert cluster.job(task)["JobState"] == "COMPLETED", fleet.log(i)
        assert cluster.job(task)["Restarts"] == "1"
        assert "SIGTERM: saving" in fleet.log(i)
        assert re.search(r"back in round \d+", fleet.log(i)), fleet.log(i)
        assert "all rounds are done" in fleet.log(i)
        assert not re.search(r"training round \d+ again|time is over", fleet.log(i)), fleet.log(i)
    assert open_ledger(str(tmp_path / "bucket")).last_round() == ROUNDS
    digests = [re.findall(rf"round {ROUNDS}: anchor (\w+)", fleet.log(i)) for i in range(len(NAMES))]
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]
    assert kills.check_left_over(tmp_path) == []
