"""deploy/slurm.sh, run here by bash with stand-ins for srun and scontrol."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.cli.main import build_parser

TEMPLATE = Path(__file__).parents[2] / "deploy" / "slurm.sh"
# Notes what it was asked to run, and ends as it is told to.
STAND_IN = """#!{python}
import json, os, sys
at = 1
while sys.argv[at].startswith("--"):
    at += 1
name = os.path.basename(sys.argv[0])
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps([name, sys.argv[1:at], sys.argv[at:]]) + "\\n")
if name == "srun" and sys.argv[at] == "bash":
    os.execvp("bash", sys.argv[at:])
sys.exit(int(os.environ.get("STATUS", 0)) if name == "srun" else 0)
"""


class Cluster:
    """srun and scontrol that only take notes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, folder / "seen.jsonl"
        (folder / "bin").mkdir()
        for name in ("srun", "scontrol", "isthmus"):
            file = folder / "bin" / name
            file.write_text(STAND_IN.format(python=sys.executable))
            file.chmod(0o755)

    def run(self, *words: str, text: str = "", **environment: str) -> tuple[int, list]:
        self.seen.unlink(missing_ok=True)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        given = os.environ | {"PATH": path, "SEEN": str(self.seen), "SLURM_JOB_ID": "7"} | environment
        source = text or TEMPLATE.read_text()
        done = subprocess.run(
            ["bash", "-s", *words], input=source.encode(), env=given, cwd=self.folder, capture_output=True
        )
        lines = self.seen.read_text().splitlines() if self.seen.exists() else []
        return done.returncode, [json.loads(line) for line in lines]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def join(words: list[str]):
    """What `isthmus join` makes of it; it would exit on an option that it does not know."""
    assert words[0] == "isthmus"
    return build_parser().parse_args(words[1:])


def test_each_task_of_an_array_joins_by_its_own_file(cluster: Cluster):
    files = ["rack-0.isthmus.toml", "in a folder/$(touch owned).isthmus.toml"]
    how = {"SLURM_ARRAY_TASK_ID": "1", "ISTHMUS_JOIN": "--device cpu"}
    status, ((name, asks, words),) = cluster.run(*files, **how)
    assert (status, name, asks) == (0, "srun", ["--nodes=1", "--ntasks=1"])
    args = join(words)
    assert (args.url, args.grace_seconds, args.device) == (files[1], 110, "cpu")
    assert args.work_dir == str(cluster.folder / "work" / "$(touch owned)")
    assert cluster.run(*files, SLURM_ARRAY_TASK_ID="2") == (2, [])
    assert not list(cluster.folder.rglob("owned"))
    notice = TEMPLATE.read_text().partition("--signal=TERM@")[2].split()[0]
    assert args.grace_seconds < int(notice)


def test_only_status_75_is_requeued_and_not_where_slurm_has_ended_the_job_itself(cluster: Cluster):
    for status in (0, 1, 2, 75):
        ended, seen = cluster.run("rack-0.isthmus.toml", STATUS=str(status))
        assert ended == status
        assert [call[0] for call in seen] == ["srun"] + ["scontrol"] * (status == 75)
    assert seen[1][2] == ["requeue", "7"]
    asked = TEMPLATE.read_text().replace("' TERM\n", "' TERM\nkill -TERM $$\n")
    assert asked != TEMPLATE.read_text()
    ended, seen = cluster.run("rack-0.isthmus.toml", text=asked, STATUS="75")
    assert ended == 75
    assert [call[0] for call in seen] == ["srun"]


def test_stages_on_nodes_of_one_job_find_their_number(cluster: Cluster):
    how = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "1"}
    _, seen = cluster.run("edge.isthmus.toml", **how)
    (_, asks, _), (name, _, words) = seen
    assert asks == ["--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0"]
    args = join([name, *words])
    assert (args.url, args.stage, args.grace_seconds) == ("edge.isthmus.toml", 1, 110)
    assert args.work_dir == str(cluster.folder / "work" / "edge" / "stage-1")
