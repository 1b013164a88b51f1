"""Real processes: a bucket that takes nothing for a while. No worker starts again, and the run finishes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import kills
from returning import small

from isthmus.cli.main import main
from isthmus.runtime.create import create

pytestmark = pytest.mark.soak

LIMIT_SECONDS = 180.0  # for a machine that does much else; nothing waits for it
NAMES = ("rack-0", "rack-1")
# In workers alone, and only what a closed bucket would refuse: heartbeats have a prefix of their own.
READ_ONLY = """
import errno, os, sys
if "forkserver" in " ".join(sys.orig_argv):
    from isthmus.store import folder
    write = folder.write_file
    def refuse(root, key, data, **how):
        if os.path.exists({mark!r}) and not key.startswith("members/"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return write(root, key, data, **how)
    folder.write_file = refuse
"""


class Fleet:
    """`isthmus join` of both replicas of a run of some rounds."""

    def __init__(self, folder: Path, url: str, rounds: int, site: str = "") -> None:
        self.folder, self.url = folder, url
        create(small(rounds=rounds, precision="fp32"), url, folder / "keys")
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(site)
        path = f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        self.processes = {name: self._join(name, os.environ | {"PYTHONPATH": path}) for name in NAMES}

    def _join(self, name: str, environment: dict[str, str]) -> subprocess.Popen:
        key, work = self.folder / "keys" / f"{name}.key", self.folder / "work" / name
        words = ["join", self.url, "--replica", name, "--key", key, "--work", work, "--device", "cpu"]
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", *map(str, words), "--threads", "1"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not done():
            assert time.monotonic() < deadline, [self.log(name) for name in NAMES]
            time.sleep(0.1)

    def trains(self) -> bool:
        return all(re.search(r"round [2-9]: anchor", self.log(name)) for name in NAMES)

    def waits(self) -> list[str]:
        return [name for name in NAMES if "waiting for that to pass" in self.log(name)]


@pytest.fixture
def fleet(tmp_path) -> Iterator[Callable[..., Fleet]]:
    started: list[Fleet] = []

    def begin(url: str, rounds: int, site: str = "") -> Fleet:
        started.append(Fleet(tmp_path, url, rounds, site))
        return started[-1]

    yield begin
    for process in (process for one in started for process in one.processes.values()):
        if process.poll() is None:
            process.kill()
            process.wait()
    assert kills.check_left_over(tmp_path) == []


def finishes_in_one_start(fleet: Fleet, words: str) -> None:
    for name, process in fleet.processes.items():
        assert process.wait(LIMIT_SECONDS) == 0, fleet.log(name)
        log = fleet.log(name)
        assert "all rounds are done" in log
        assert log.count("first inner step after") == 1, log  # one worker, from the start to the end
        assert "starting it again" not in log
    said = [line for name in fleet.waits() for line in fleet.log(name).splitlines()]
    begun = [line for line in said if "waiting for that to pass" in line]
    assert begun
    assert all(words in line for line in begun)
    assert len([line for line in said if "the bucket can be used again" in line]) == len(begun)


@pytest.mark.parametrize("bad_network", ["moto"], indirect=True)
def test_a_bucket_without_rights_for_a_while_restarts_no_worker_and_status_names_it(
    fleet, bad_network, capsys
):
    url, proxy = bad_network
    run = fleet(url, rounds=40)
    run.until(run.trains)
    for part in ("/payloads/", "/commits/", "/manifests/", "/anchors/"):
        proxy.trouble("answer", "PUT", part, times=float("inf"), status=403, code="AccessDenied")
    run.until(lambda: bool(run.waits()))

    def named() -> bool:
        capsys.readouterr()
        assert main(["status", url, "--json"]) == 0
        members = json.loads(capsys.readouterr().out)["members"]
        waits = [member["waits_for"] for member in members if member["replica"] in run.waits()]
        return any(
            re.match(r"cannot write to the bucket: permission denied .*\(for \d+ s\)$", w) for w in waits
        )

    run.until(named)
    proxy._troubles.clear()
    finishes_in_one_start(run, "permission denied")


def test_ctrl_c_ends_the_wait_for_a_bucket(fleet, tmp_path):
    mark = tmp_path / "read-only"
    run = fleet(str(tmp_path / "bucket"), 100_000, READ_ONLY.format(mark=str(mark)))
    run.until(run.trains)
    mark.touch()
    run.until(lambda: len(run.waits()) > 0)
    (name, *_) = run.waits()
    run.processes[name].send_signal(signal.SIGINT)
    assert run.processes[name].wait(LIMIT_SECONDS) == 0, run.log(name)
    assert "left while it waited: cannot write to the bucket: Read-only file system" in run.log(name)
    assert "starting it again" not in run.log(name)
