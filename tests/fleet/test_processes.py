"""Several processes of one machine as one full replica: the same run as with one."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from faults import kills
from small_recipes import recipe_text, replicas

from isthmus import simulate, train
from isthmus.config import parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.replay import Replay

pytestmark = pytest.mark.soak

RECIPE = recipe_text(
    replicas("node", processes=2) + replicas("rack"),
    inner={"precision": "fp64"},
    outer={"inner_steps": 2, "rounds": 2, "values": "fp64"},
)


@pytest.mark.fleet_check
def test_two_processes_that_share_a_full_replica_train_what_one_would(tmp_path):
    recipe = parse_recipe(RECIPE)
    real = train(recipe, tmp_path / "real", device="cpu", quiet=True)
    simulated = simulate(recipe, tmp_path / "simulated", device="cpu", quiet=True)
    for ours, theirs in zip(real.rows, simulated.rows, strict=True):
        assert abs(ours["loss_full"] - theirs["loss_full"]) < 1e-9
    ledger = open_ledger(str(tmp_path / "real" / "bucket"))
    assert Replay(ledger, 0).recipe.replicas[0].processes == 2
    assert all(row.get("contributors") == ["node", "rack"] for row in real.rows[1:])
    log = (tmp_path / "real" / "logs" / "node.log").read_text()
    assert "all rounds are done" in log


SHARDED = recipe_text(
    replicas("node", processes=4, sharding="full") + replicas("rack"),
    inner={"precision": "fp64", "recompute": True},
    outer={"inner_steps": 4, "rounds": 5, "values": "fp64"},
    bucket={"quorum": 2, "anchor_every": 2},  # a round waits for who starts again
)
ANCHOR = re.compile(r"round (\d+): anchor (\w+)")


def said(run: Path) -> dict[int, set[str]]:
    """Round -> every digest that a process of either replica ever said of it."""
    found: dict[int, set[str]] = {}
    for path in (run / "logs").glob("*.log"):
        for number, digest in ANCHOR.findall(path.read_text()):
            found.setdefault(int(number), set()).add(digest)
    return found


def kill_a_shard(run: Path, killed: list[int]) -> None:
    """As soon as the first round is settled."""
    deadline = time.monotonic() + 300
    while not (run / "bucket" / "manifests" / "000001.json").exists():
        assert time.monotonic() < deadline, "the first round was never settled"
        time.sleep(0.01)
    pid = next(process.pid for process in kills.processes(run) if process.name == "node stage 2")
    os.kill(pid, signal.SIGKILL)
    killed.append(pid)


def test_a_sharded_replica_trains_what_one_process_would_and_heals_in_the_same_bits(tmp_path):
    recipe, killed = parse_recipe(SHARDED), []
    straight = train(recipe, tmp_path / "straight", device="cpu", quiet=True)
    simulated = simulate(recipe, tmp_path / "simulated", device="cpu", quiet=True)
    for ours, theirs in zip(straight.rows, simulated.rows, strict=True):
        assert abs(ours["loss_full"] - theirs["loss_full"]) < 1e-9
    killer = threading.Thread(target=kill_a_shard, args=(tmp_path / "killed", killed), daemon=True)
    killer.start()
    healed = train(recipe, tmp_path / "killed", device="cpu", quiet=True)
    killer.join(10)
    assert len(killed) == 1
    log = (tmp_path / "killed" / "logs" / "node.log").read_text()
    assert "killed by signal 9" in log
    assert "back in round" in log
    assert all(row.get("contributors") == ["node", "rack"] for row in healed.rows[1:])
    assert said(tmp_path / "killed") == said(tmp_path / "straight")
    assert all(len(digests) == 1 for digests in said(tmp_path / "straight").values())
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("killed", "straight")]
    assert weights[0] == weights[1]
    # Every process answers for its own part of the update: the embedding and four stages' worth of layers.
    assert len(open_ledger(str(tmp_path / "killed" / "bucket")).shards) == 5
    assert len(healed.rows[-1]["measured"]["node"]["peak_bytes"]) == 4
