"""Spoil what comes from others, and let every reader read it: it reads or refuses, and does nothing else.

Real code makes a small world: a run with its bucket, keys and a corpus. Each case spoils one file of the
bucket, the corpus or a friend's bundle (most signed files are signed again, as a faulty member would), or one
payload. A traceback, a hang, a gibibyte of memory, a signal, a write outside the
output folder or a control character on the terminal is a fault. The cases are always the same.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from fuzz_cases import run_case
from fuzz_worker import CASE_SECONDS, Hang, copy_of, warm_up
from fuzz_world import make_world

pytestmark = pytest.mark.soak

SUPPORT = Path(__file__).parents[1] / "support"
KEPT = SUPPORT / "fuzz_kept.jsonl"  # every kind of case that ever failed, once
PARTS = {"documents": 600, "members": 600, "payloads": 2000}  # cases of each
SEED = 14
HARD_SECONDS = 60.0  # after which a case is ended from outside: no alarm reaches a loop in C


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("fuzz") / "world")


def told_by(child: subprocess.Popen[str]):
    """Yield what the worker says, line by line, until it ends."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while line := lines.get(timeout=HARD_SECONDS):
        yield json.loads(line)


@pytest.mark.parametrize("part", PARTS)
def test_what_is_spoilt_is_read_or_refused_in_one_line_and_nothing_is_written(world: Path, part: str):
    words = [
        sys.executable,
        str(SUPPORT / "fuzz_worker.py"),
        str(world),
        part,
        str(SEED),
        "0",
        str(PARTS[part]),
        "1",
    ]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    outcomes, num_cases, case = Counter[str](), 0, None
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | quiet) as child:
        try:
            for told in told_by(child):
                if "begin" in told:
                    case = told["case"]
                else:
                    assert told["fault"] == "", case
                    outcomes.update(told["outcomes"])
                    num_cases += 1
        except queue.Empty:
            pytest.fail(f"not done after {HARD_SECONDS:.0f} s, in C: {case}")
        finally:
            with suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
    assert child.returncode == 0, f"a case ended the process with status {child.returncode}: {case}"
    assert num_cases == PARTS[part]
    assert outcomes["refused"] > num_cases / 10  # it was spoilt indeed


@pytest.fixture(scope="module")
def here(world: Path):
    """The working directory is a copy of the world, which every reader can read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "none")
        with copy_of(world):
            warm_up()
            yield world


@pytest.fixture
def _alarm():
    def hang(signum, frame):
        raise Hang(f"not done after {CASE_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def kept():
    return [json.loads(line) for line in KEPT.read_text().splitlines()]


@pytest.mark.usefixtures("_alarm")
@pytest.mark.parametrize("case", kept(), ids=lambda case: case["was"])
def test_what_once_failed_does_not_fail_again(here: Path, case):
    run_case(case, here)
