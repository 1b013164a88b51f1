"""torchrun starts the workers: they join, lose one to SIGKILL, come back, and end as the simulator does."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from apart import ROUNDING, simulated_rounds
from deadlines import until
from faults import kills
from small_recipes import pipelined, recipe_text, replicas

from isthmus.config import parse_recipe
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.replay import Replay
from isthmus.runtime.create import create
from isthmus.store.objects import open_store

pytestmark = pytest.mark.soak

EXACT = {"inner": {"precision": "fp64"}, "outer": {"inner_steps": 4, "rounds": 5, "values": "fp64"}}
FLEETS = {
    "stages": pipelined("edge", stages=2, compression="1/4", wire="fp64"),
    "shards": replicas("edge", processes=2, sharding="full"),
}
LIMIT_SECONDS, STEP = 300.0, "first inner step after"


def words(folder: Path, num: int) -> list[str]:
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(num)]
    torchrun += ["--standalone", "--max-restarts", "3", "--no-python"]
    worker = [sys.executable, "-P", "-m", "isthmus.worker", str(folder / "bucket"), "--replica", "edge"]
    worker += ["--key", str(folder / "keys" / "edge.key"), "--work", str(folder / "work")]
    return [*torchrun, *worker, "--device", "cpu", "--threads", "1"]


@pytest.mark.parametrize("kind", FLEETS)
def test_workers_of_torchrun_come_back_after_a_kill_to_the_simulators_weights(kind: str, tmp_path: Path):
    text = recipe_text(FLEETS[kind], **EXACT)
    expected = simulated_rounds(text, tmp_path / "simulated")
    create(parse_recipe(text), str(tmp_path / "bucket"), tmp_path / "keys")
    manifests = tmp_path / "bucket" / "manifests"
    with open(tmp_path / "log", "ab") as log:
        process = subprocess.Popen(words(tmp_path, 2), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        until(lambda: len(list(manifests.glob("*.json"))) >= 1, "first round", LIMIT_SECONDS)
        before = said(tmp_path).count(STEP)
        os.kill(second_worker(), signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: said(tmp_path).count(STEP) > before, "first step of a new start", LIMIT_SECONDS)
        print(f"{kind}: the first inner step came {time.monotonic() - killed:.1f} s after the kill")
        assert process.wait(LIMIT_SECONDS) == 0, said(tmp_path)
    finally:
        process.kill()
        process.wait()
    store = open_store(str(tmp_path / "bucket"))
    replay, number = Replay(Ledger(store, read_run(store))), 0
    while replay.step() is not None:
        for name, tensor in expected[number].items():
            gap = (replay.anchor[name].double() - tensor.double()).norm() / tensor.double().norm()
            assert gap < ROUNDING
        number += 1
    assert number == len(expected)


def second_worker() -> int:
    """The process of rank 1 that torchrun has started for this test."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "comm").read_text() == "worker-1/2\n" and kills.parent_of(
                kills.parent_of(int(path.name))
            ) == os.getpid():
                return int(path.name)
    raise AssertionError("there is no second worker")


def said(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def test_another_number_of_processes_than_the_replicas_is_one_line(tmp_path: Path):
    create(parse_recipe(recipe_text(FLEETS["stages"], **EXACT)), str(tmp_path / "bucket"), tmp_path / "keys")
    worker = words(tmp_path, 1)[words(tmp_path, 1).index("--no-python") + 1 :]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(worker, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == (
        "isthmus: replica edge has 2 processes, and 1 were started; start 2, for example by torchrun "
        "--nproc-per-node 2\n"
    )
    assert not (tmp_path / "work").exists()
