"""A process that runs fuzz cases one after the other and says so line by line; `soak/test_fuzz.py` starts it.

    python tests/support/fuzz_worker.py WORLD PART SEED START STOP STEP

It has a copy of the world beside it, a limit of memory, and an alarm for every case. What no alarm can end,
the process that started it ends.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuzz_cases import OUTCOMES, READERS, Case, Fault, draw_case, run_case

CASE_SECONDS = 30.0
MEMORY_BYTES = 1 << 30  # that readers may take beyond what they take for files as they should be


class Hang(BaseException):
    """Not an Exception: nobody who waits out faults may wait this one out."""


@contextmanager
def copy_of(world: Path) -> Iterator[Path]:
    """The working directory becomes a copy, with a canary beside it that nobody may touch."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-", ignore_cleanup_errors=True) as top:
        shutil.copytree(world, Path(top, "here"), symlinks=True)
        Path(top, "canary").mkdir()
        Path(top, "canary", "secret").write_text("what nobody reads out and nobody overwrites")
        os.environ["HOME"] = top
        os.chdir(Path(top, "here"))
        try:
            yield Path(top, "here")
        finally:
            os.chdir(before)


def warm_up() -> None:
    """Every reader reads the world as it was made; only then does a refusal mean something."""
    Path("out").mkdir()
    shutil.copy2(next(Path("run/bucket/payloads").rglob("0-*")), "payload")
    for name, reader in READERS.items():
        before = OUTCOMES["refused"]
        reader()
        # A shard fits one place of three.
        if OUTCOMES["refused"] - before > (2 if name == "payload" else 0):
            raise Fault(f"{name} refuses the world as it was made")
        shutil.rmtree("out")
        Path("out").mkdir()
    Path("payload").unlink()
    OUTCOMES.clear()


def checked(case: Case, world: Path, most_kilobytes: int) -> str:
    """What went wrong, or nothing."""
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        run_case(case, world)
    except Fault as fault:
        return str(fault)
    except Hang:
        return f"not done after {CASE_SECONDS:.0f} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (peak := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) > most_kilobytes:
        return f"took {peak >> 10} MiB of memory"
    return ""


def limit_memory() -> int:
    """Returns the peak, in kilobytes, that must not be passed."""
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmData:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + (MEMORY_BYTES >> 10)


def main(world: Path, part: str, seed: int, start: int, stop: int, step: int) -> None:
    def hang(signum: int, frame: Any) -> None:
        raise Hang

    def tell(**facts: Any) -> None:
        print(json.dumps(facts), file=out, flush=True)

    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    signal.signal(signal.SIGALRM, hang)
    with copy_of(world):
        warm_up()
        most = limit_memory()
        for number in range(start, stop, step):
            case = draw_case(part, seed, number, world)
            tell(begin=number, case=case)
            began = time.monotonic()
            fault = checked(case, world, most)
            seconds, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grown = (peak - most + (MEMORY_BYTES >> 10)) >> 10
            tell(done=number, fault=fault, seconds=seconds, grown_mib=grown, outcomes=OUTCOMES)
            OUTCOMES.clear()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
