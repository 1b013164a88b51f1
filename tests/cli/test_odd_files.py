"""A pipe, a device or an endless file in a bucket ends every command with one line."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from little import Little, hasty, rounds  # noqa: F401 - a fixture

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


KINDS = ["pipe", "zero", "folder", "loop", "endless"]


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


def test_a_name_that_is_almost_a_manifests_is_none(any_store_url, tmp_path):
    little = Little(any_store_url, tmp_path)
    rounds(little.replicas(), (1, 2))
    store = little.ledger().store
    for name in ("0000003.json", "00003.json", "000003.json.json", "3.json"):
        store.put(f"manifests/{name}", b"")
    assert little.ledger().last_round() == 2
