"""A test that hangs ends by itself, and says where every thread was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HANGS = """
import signal, threading, time

def helper_thread_waits():
    time.sleep(600)

def wait():
    threading.Thread(target=helper_thread_waits, daemon=True).start()
    time.sleep(600)

def test_that_waits():
    wait()

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    wait()

def test_after_it():
    pass
"""


def run(folder, test, *options):
    (folder / "test_hangs.py").write_text(HANGS)
    ini = [f"--override-ini={name}" for name in ("timeout=2", "faulthandler_timeout=8")]
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder, *ini]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    done = subprocess.run(
        [*command, *options, f"test_hangs.py::{test}", "test_hangs.py::test_after_it"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_every_test_has_a_limit_and_another_behind_it(request):
    config = request.config
    assert config.pluginmanager.has_plugin("timeout"), "pip install -e '.[dev]'"
    assert 0 < float(config.getini("timeout")) < config.getini("faulthandler_timeout")
    assert config.getini("faulthandler_exit_on_timeout") is True


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_test_that_waits_fails_with_all_stacks_and_the_next_one_runs(tmp_path, workers):
    status, said = run(tmp_path, "test_that_waits", *workers)
    assert status == 1, said
    assert "1 failed, 1 passed" in said
    assert "Timeout (>2.0s) from pytest-timeout" in said
    assert "in helper_thread_waits" in said
    assert "wait()" in said
