"""`isthmus slurm`: the file that sbatch takes, run here by bash with a stand-in for srun."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipes import EDGE, recipe_text, replicas

from isthmus.cli.main import build_parser, main
from isthmus.cli.slurm_script import Job, Task, sbatch_text
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.runtime.create import create

HOSTILE = [
    "$(touch owned)",
    "`touch owned`",
    "a'b\"c",
    "x; touch owned",
    "two\nlines",
    "-n",
    "*",
    "\\",
    "é |& <",
]
# Notes what it was asked to run, and ends as it is told to.
STAND_IN = """#!{python}
import json, os, sys
at = 1
while sys.argv[at].startswith("--"):
    at += 1
call = os.path.basename(sys.argv[0]), sys.argv[1:at], sys.argv[at:], os.getcwd()
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(call) + "\\n")
if os.environ.get("RUN") and sys.argv[at] == "bash":
    os.execvp("bash", sys.argv[at:])
sys.exit(int(os.environ.get("STATUS", 0)) if "srun" in sys.argv[0] else 0)
"""


class Cluster:
    """srun and scontrol that only take notes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, folder / "seen.jsonl"
        (folder / "bin").mkdir()
        for name in ("srun", "scontrol", "program"):
            file = folder / "bin" / name
            file.write_text(STAND_IN.format(python=sys.executable))
            file.chmod(0o755)

    def run(self, text: str, **environment: str) -> tuple[int, list]:
        self.seen.unlink(missing_ok=True)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        given = os.environ | {"PATH": path, "SEEN": str(self.seen), "SLURM_JOB_ID": "7"} | environment
        done = subprocess.run(["bash"], input=text.encode(), env=given, cwd=self.folder, capture_output=True)
        lines = self.seen.read_text().splitlines() if self.seen.exists() else []
        return done.returncode, [json.loads(line) for line in lines]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def a_job(folder: Path, **changed) -> Job:
    return Job(**{"name": "isthmus-small", "folder": str(folder), "program": ("program",)} | changed)


@pytest.mark.parametrize("word", HOSTILE)
def test_words_from_outside_reach_join_as_they_are(word, cluster: Cluster):
    folder = cluster.folder / f"in {word.replace('/', '')}"
    folder.mkdir()
    tasks = [Task([word, "--replica", "rack-0", "--key", word], f"/state/{word}")]
    status, seen = cluster.run(sbatch_text(a_job(folder), tasks))
    assert status == 0
    ((name, asks, words, where),) = seen
    assert (name, asks, where) == ("srun", ["--nodes=1", "--ntasks=1"], str(folder))
    assert words == [
        *("program", "join", word, "--replica", "rack-0", "--key", word),
        *("--grace", "110", "--work", f"/state/{word}"),
    ]
    assert not list(cluster.folder.rglob("owned"))


@pytest.mark.parametrize("word", HOSTILE)
def test_each_task_of_an_array_has_its_own_words(word, cluster: Cluster):
    tasks = [Task(["url", "--replica", f"rack-{i}", "--key", word * i], f"/state/{i}") for i in (1, 2, 3)]
    text = sbatch_text(a_job(cluster.folder, at_once=2), tasks)
    assert "#SBATCH --array=0-2%2\n" in text
    _, ((_, _, words, _),) = cluster.run(text, SLURM_ARRAY_TASK_ID="1")
    assert words[2:7] == ["url", "--replica", "rack-2", "--key", word * 2]
    assert cluster.run(text, SLURM_ARRAY_TASK_ID="3") == (2, [])
    assert not list(cluster.folder.rglob("owned"))


def test_only_status_75_is_requeued_and_not_where_slurm_has_ended_the_job_itself(cluster: Cluster):
    text = sbatch_text(a_job(cluster.folder), [Task(["url"], "/state")])
    for status in (0, 1, 2, 75):
        ended, seen = cluster.run(text, STATUS=str(status))
        assert ended == status
        assert [call[0] for call in seen] == ["srun"] + ["scontrol"] * (status == 75)
    assert seen[1][2] == ["requeue", "7"]
    told = text.replace("' TERM\n", "' TERM\nkill -TERM $$\n")
    assert told != text
    ended, seen = cluster.run(told, STATUS="75")
    assert ended == 75
    assert [call[0] for call in seen] == ["srun"]


def test_stages_on_nodes_of_one_job_find_their_number_and_the_first_node(cluster: Cluster):
    text = sbatch_text(a_job(cluster.folder, nodes=2, cpus=4), [Task(["url", "--replica", "edge"], "/a b")])
    assert "#SBATCH --nodes=2\n" in text
    _, seen = cluster.run(text, RUN="1", SLURM_PROCID="1", SLURM_JOB_NODELIST="n[1-2]")
    (_, _, hostnames, _), (_, asks, _, _), (name, _, words, _) = seen
    assert hostnames == ["show", "hostnames", "n[1-2]"]
    assert asks == ["--nodes=2", "--ntasks=2", "--cpus-per-task=4", "--kill-on-bad-exit=0"]
    assert [name, *words] == [
        *("program", "join", "url", "--replica", "edge", "--grace", "110"),
        *("--master", ":29500", "--stage", "1", "--work", "/a b/stage-1"),
    ]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"partition": "a b"}, "--partition"),
        ({"partition": "x\n#SBATCH --uid=0"}, "--partition"),
        ({"time": "soon"}, "--time"),
        ({"gpus": "1 --wrap=x"}, "--gpus"),
        ({"mem": "$(id)"}, "--mem"),
        ({"options": ["account=x"]}, "--sbatch"),
        ({"options": ["--account=x\nid"]}, "--sbatch"),
        ({"options": ["--comment=a b"]}, "--sbatch"),
        ({"setup": ["one\ntwo"]}, "--setup"),
        ({"notice_seconds": 5}, "--signal"),
        ({"cpus": -1}, "--cpus"),
    ],
)
def test_lines_that_slurm_reads_take_nothing_odd(what, words, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        a_job(tmp_path, **what)


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    """A run in a folder, its keys where `join` looks for them."""
    recipe = parse_recipe(recipe_text(replicas("rack", count=2) + EDGE))
    create(recipe, str(tmp_path / "bucket"), tmp_path / "keys" / "small")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def joined(line: str) -> list[str]:
    """What `isthmus join` gets by one line of the file, read by its own parser."""
    words = re.search(r"task=\((.*?)\) state=(\S+)", line)
    assert words
    return [*words[1].split(), "--grace", "110", "--work", words[2]]


def test_the_file_joins_as_the_replicas_whose_keys_are_here(run: Path, capsys):
    (run / "keys" / "small" / "rack-1.key").unlink()
    how = ["--array", "--cpus", "4", "--gpus", "a100:1", "--time", "4:00:00", "--join", "--device cpu"]
    assert main(["slurm", "bucket", *how]) == 0
    out, _ = capsys.readouterr()
    assert out == "sbatch small-array.sbatch\n"
    text = (run / "small-array.sbatch").read_text()
    for ask in ("--array=0-1", "--gres=gpu:a100:1", "--time=4:00:00", "--cpus-per-task=4", "--requeue"):
        assert f"#SBATCH {ask}\n" in text
    found = [
        build_parser().parse_args(["join", *joined(line)]) for line in text.splitlines() if "task=(" in line
    ]
    assert [(args.replica, args.num_threads, args.grace_seconds) for args in found] == [
        ("rack-0", 4, 110.0),
        ("edge", 2, 110.0),  # two stages share the cores
    ]
    assert [args.work_dir for args in found] == [
        str(run / "work" / "small" / name) for name in ("rack-0", "edge")
    ]
    assert main(["slurm", "bucket", "--array"]) == 0  # its own file is written anew
    (run / "small-array.sbatch").write_text("mine")
    assert main(["slurm", "bucket", "--array"]) == 2
    assert "not written by" in capsys.readouterr().err


def test_one_stage_has_a_folder_of_its_own_and_a_bundle_is_enough(run: Path, capsys):
    how = ["--replica", "edge", "--stage", "1", "--relay", "192.0.2.10:29520", "--state", "/shared/a b"]
    assert main(["slurm", "bucket", *how, "--file", "-"]) == 0
    text = capsys.readouterr().out
    assert "state='/shared/a b/small/edge/stage-1'" in text
    assert "--replica edge --stage 1 --relay 192.0.2.10:29520)" in text
    from isthmus.protocol.bundle import Bundle

    bundle = Bundle(url="s3://bucket/r", run="small", run_sha256="0" * 64, replica="rack-0", key="1" * 64)
    bundle.write(run / "rack-0.isthmus.toml")
    assert main(["slurm", "rack-0.isthmus.toml", "--file", "-"]) == 0
    text = capsys.readouterr().out
    state = run / "work" / "small" / "rack-0"
    assert f"task=({run / 'rack-0.isthmus.toml'}) state={state}" in text
    assert "1" * 64 not in text


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ([], "which replica"),
        (["--replica", "nobody"], "there is rack-0"),
        (["--replica", "rack-0", "--spread"], "has 1"),
        (["--replica", "edge", "--stage", "2", "--relay", "h:1"], "stages 0 to 1"),
        (["--replica", "edge", "--stage", "1"], "--master HOST:PORT"),
        (["--replica", "edge", "--relay", "h:1"], "--stage N"),
        (["--replica", "rack-0", "--join", "--work elsewhere"], "sets itself"),
        (["--replica", "rack-0", "--join", "--devise cpu"], "join"),
        (["--replica", "rack-0", "--join", "'"], "cannot be read"),
        (["--replica", "rack-0", "--key", "gone.key"], "gone.key is missing"),
        (["--replica", "rack-0", "--array"], "leave --replica out"),
        (["--replica", "rack-0", "--submit", "--file", "-"], "only prints"),
    ],
)
def test_wrong_input_is_one_line_with_the_cure(words, cure, run: Path, capsys):
    assert main(["slurm", "bucket", *words]) == 2
    error = capsys.readouterr().err
    assert cure in error
    assert error.count("\n") == 1
    assert not list(run.glob("*.sbatch"))


def test_without_slurm_submit_says_so(run: Path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(run))
    assert main(["slurm", "bucket", "--replica", "rack-0", "--submit"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


def test_submit_prints_the_number_and_tells_why_not(run: Path, monkeypatch, capsys):
    sbatch = run / "sbatch"
    monkeypatch.setenv("PATH", f"{run}:{os.environ['PATH']}")
    sbatch.write_text("#!/bin/sh\necho '42;cluster'\n")
    sbatch.chmod(0o755)
    assert main(["slurm", "bucket", "--replica", "rack-0", "--submit"]) == 0
    assert capsys.readouterr().out == "42\n"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    assert main(["slurm", "bucket", "--replica", "rack-0", "--submit"]) == 1
    assert "invalid partition" in capsys.readouterr().err
