"""CPU threads: what was asked for, or the cores that a process may use; waiting threads sleep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isthmus.planner import rate
from isthmus.replica import picks


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("800000 100000", 4), ("", 4)],
)
def test_cores_are_those_of_the_affinity_and_of_the_containers_quota(
    monkeypatch, tmp_path: Path, quota, cores
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert rate.usable_cores(tmp_path) == cores


def test_threads_are_those_asked_for_or_one_for_each_usable_core(monkeypatch, threads):
    monkeypatch.setattr(picks, "usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    assert picks.pick_threads() == torch.get_num_threads() == 2
    assert picks.pick_threads(3) == torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    torch.set_num_threads(4)
    assert picks.pick_threads() == torch.get_num_threads() == 4


@pytest.mark.parametrize(("stated", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(stated, found):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    if stated:
        environment["OMP_WAIT_POLICY"] = stated
    code = "import isthmus, os, sys; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == found
