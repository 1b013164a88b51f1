"""A run directory by a stranger: a pipe, a device, a file without end end every command with one line."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from fabricate import FULL, make_run, recipe
from little import Little, hasty, rounds  # noqa: F401 - a fixture

from isthmus.runlog import REAL, RunDir

pytestmark = pytest.mark.usefixtures("hasty")

MOST_BYTES = 1 << 30

# Each command in the process of the one before: what Python itself needs is loaded once.
RUN_ALL = """
import contextlib, io, json, re, sys
from isthmus.cli.main import main
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    print(json.dumps({"began": command}), flush=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(command)
    print(json.dumps({"command": command, "status": status, "out": out.getvalue(), "err": err.getvalue()}))
# Not ru_maxrss, which begins with that of the process that started this one.
peak = re.search("VmHWM:\\s*([0-9]+) kB", open("/proc/self/status").read())
print(json.dumps({"peak": int(peak[1]) * 1024}))
"""


def ran(commands):
    """(what each command said, the most memory that any of them took); none may hang."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    command = [sys.executable, "-c", RUN_ALL, words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"it hangs: {(late.stdout or b'').decode().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line for line in lines if "status" in line], lines[-1]["peak"]


def one_line(said):
    return said["status"] == 2 and not said["out"] and said["err"].count("\n") == 1


def put(kind, path):
    """Something odd in the place of a file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        with open(path, "wb") as file:  # it takes no room on the disk, and would take all of the memory
            file.write(b'{"round": 1, "x": "')
            file.truncate(200 << 30)


OWN = ["pipe", "zero", "folder", "loop"]
KINDS = [*OWN, "endless"]  # in a bucket


def test_a_run_directory_with_odd_files_is_refused_by_one_line(tmp_path):
    commands = []
    for name in ("recipe.toml", "metrics.jsonl", "about.json"):
        for kind in OWN:
            run = make_run(tmp_path / f"{name}-{kind}", recipe(FULL, "replicas.rack.tflops=1"), 3).path
            put(kind, run / name)
            commands += [("report", run), ("report", run, "--json")]
            if name != "about.json":
                commands.append(("compare", run, run, "--json"))
            if name == "recipe.toml":
                commands += [("plan", run / name), ("watch", run), ("status", run), ("ledger", "show", run)]
    said, peak = ran(commands)
    assert [each for each in said if not one_line(each)] == []
    assert peak < MOST_BYTES


def test_an_honest_run_beside_them_is_still_reported(tmp_path):
    run = make_run(tmp_path / "run", recipe(FULL, "replicas.rack.tflops=1"), 3).path
    (tmp_path / "linked").symlink_to(run)
    said, _ = ran([("report", run), ("report", tmp_path / "linked"), ("compare", run, run, "--json")])
    assert [each["status"] for each in said] == [0, 0, 0]


def test_odd_objects_in_a_bucket_are_answered_at_once(tmp_path):
    little = Little(str(tmp_path / "bucket"), tmp_path)
    rounds(little.replicas(), (1, 2))
    commands = []
    names = ("run.json", "manifests/000001.json", "manifests/000002.json", "members/a/live.json")
    for name in names:
        for kind in KINDS:
            there = shutil.copytree(tmp_path / "bucket", tmp_path / f"{name.replace('/', '-')}-{kind}")
            put(kind, there / name)
            commands += [("status", there), ("ledger", "show", there), ("ledger", "verify", there)]
            commands.append(("report", there, "--to", tmp_path / f"to-{len(commands)}"))
    said, peak = ran(commands)
    for each in said:
        assert each["status"] in (0, 1, 2), each
        assert each["err"].count("\n") <= 1 or each["status"] == 0, each
        if "run.json" in each["command"][-1]:
            assert one_line(each), each
    assert peak < MOST_BYTES


def test_resuming_a_run_with_odd_files_ends_with_one_line(tmp_path):
    commands = []
    for kind in ("pipe", "zero", "folder"):
        for name in ("metrics.jsonl", "about.json", "state/latest.json"):
            run = make_run(tmp_path / f"{name.replace('/', '-')}-{kind}", recipe(FULL), 3).path
            setup = {"precision": "fp32", "compiled": False, "device": "cpu", "device_type": "cpu"}
            RunDir.open(run).update_about(group=2, pieces=1, parked=False, predicted_bytes=1, **setup)
            put(kind, run / name)
            commands.append(("simulate", "--resume", run))
        for name in ("metrics.jsonl", "about.json", "bucket/run.json"):
            about = {"mode": REAL, "status": "interrupted"}
            run = make_run(tmp_path / f"real-{name.replace('/', '-')}-{kind}", recipe(FULL), 3, **about).path
            put(kind, run / name)
            commands.append(("train", "--resume", run))
    said, _ = ran(commands)
    assert [each for each in said if not one_line(each)] == []


def test_a_name_that_is_almost_a_manifests_is_none(any_store_url, tmp_path):
    little = Little(any_store_url, tmp_path)
    rounds(little.replicas(), (1, 2))
    store = little.ledger().store
    for name in ("0000003.json", "00003.json", "000003.json.json", "3.json"):
        store.put(f"manifests/{name}", b"")
    assert little.ledger().last_round() == 2
