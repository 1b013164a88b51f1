"""The short form of bench/fuzz.py: what is spoilt is read or refused, and nothing else happens."""

import json
import resource
import signal
from pathlib import Path

import pytest
from fuzz_cases import OUTCOMES, draw_case, run_case
from fuzz_worker import CASE_SECONDS, MEMORY_BYTES, Hang, copy_of, warm_up
from fuzz_world import make_world

KEPT = Path(__file__).parent / "support" / "fuzz_kept.jsonl"  # every kind of case that ever failed, once
SEED = 14


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("fuzz") / "world")


@pytest.fixture(scope="module")
def here(world):
    """The working directory is a copy of the world, which every reader can read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "none")
        with copy_of(world):
            warm_up()
            yield world


@pytest.fixture(autouse=True)
def _alarm():
    def hang(signum, frame):
        raise Hang(f"not done after {CASE_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def run(case, world):
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    run_case(case, world)


@pytest.mark.parametrize(
    ("part", "count"), [("documents", 150), ("members", 60), ("payloads", 300), ("folders", 30)]
)
def test_what_is_spoilt_is_read_or_refused_in_one_line_and_nothing_is_written(here, part, count):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    OUTCOMES.clear()
    for number in range(count):
        run(draw_case(part, SEED, number, here), here)
    assert OUTCOMES["refused"] > count / 10  # it was spoilt indeed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY_BYTES >> 10


def kept():
    return [json.loads(line) for line in KEPT.read_text().splitlines()]


@pytest.mark.parametrize("case", kept(), ids=lambda case: case["was"])
def test_what_once_failed_does_not_fail_again(here, case):
    run(case, here)
