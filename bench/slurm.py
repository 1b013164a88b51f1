"""A fleet as jobs of a Slurm that takes its machines back again and again; needs root, and Slurm installed.

A real Slurm of one node per replica runs on this machine. The same run goes through twice: undisturbed, and
with one running job requeued every few seconds (SIGTERM, then SIGKILL after KillWait). It prints how long
both took, what they counted, and how long a job took to leave and to train again. It checks that no round is
lost and that all replicas end with one digest.
"""

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import slurm_cluster
from slurm_cluster import Cluster

from isthmus.config import parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.runtime.create import create

RECIPE = """
name = "preempted"
[model]
preset = "nano"
[inner]
batch = 8
lr = 3e-3
warmup_steps = 20
[outer]
inner_steps = {steps}
rounds = {rounds}
keep = 128
values = "2bit"
[bucket]
heartbeat_seconds = 2
[[replicas]]
name = "rack"
count = {replicas}
"""


@dataclass
class Found:
    seconds: float
    requeues: int
    updates: int  # counted, of all replicas
    inner_steps: int  # behind them
    again: int  # rounds of which inner steps were trained twice
    leave_seconds: list[float]  # from SIGTERM to the job's end
    back_seconds: list[float]  # from the start of a job to its first inner step
    digest: str


def take_back(cluster: Cluster, tasks: list[str], every: float, rng: random.Random) -> Callable[[], int]:
    """Requeues one running job every so many seconds; says how many it was."""
    state = {"next": time.monotonic() + every, "count": 0}

    def look() -> int:
        for task in tasks:  # Slurm waits two minutes before a job starts again
            job = cluster.job(task)
            if job["JobState"] == "PENDING" and job.get("Reason") == "BeginTime":
                cluster.call("scontrol", "update", f"JobId={task}", "StartTime=now", check=False)
        if every and time.monotonic() >= state["next"]:
            state["next"] = time.monotonic() + every
            running = [task for task in tasks if cluster.running(task)]
            if running:
                cluster.call("scontrol", "requeue", rng.choice(running), check=False)
                state["count"] += 1
        return int(state["count"])

    return look


def one_run(args: argparse.Namespace, folder: Path, every: float) -> Found:
    recipe = parse_recipe(RECIPE.format(steps=args.steps, rounds=args.rounds, replicas=args.replicas))
    create(recipe, str(folder / "bucket"), folder / "keys" / recipe.name)
    with Cluster(args.replicas, kill_wait=args.kill_wait) as cluster:
        words = ["slurm", "bucket", "--array", "--cpus", "1", "--submit", "--join", "--device cpu"]
        how = {"cwd": folder, "env": cluster.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}}
        number = subprocess.run(
            [sys.executable, "-m", "isthmus", *words], **how, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        began, tasks = time.monotonic(), [f"{number}_{i}" for i in range(args.replicas)]
        look, requeues = take_back(cluster, tasks, every, random.Random(args.seed)), 0
        while not all(cluster.ended(task) for task in tasks):
            requeues = look()
            time.sleep(0.5)
        seconds = time.monotonic() - began
        states = {cluster.job(task)["JobState"] for task in tasks}
    logs = [path.read_text() for path in sorted(folder.glob("*.log"))]
    assert states == {"COMPLETED"}, (states, logs)
    return summed(recipe.outer.rounds, folder, logs, seconds, requeues)


def summed(rounds: int, folder: Path, logs: list[str], seconds: float, requeues: int) -> Found:
    ledger = open_ledger(str(folder / "bucket"))
    assert ledger.last_round() == rounds, "a round is lost"
    manifests = [ledger.manifest(t) for t in range(1, rounds + 1)]
    entries = [entry for manifest in manifests if manifest for entry in manifest.entries]
    digests = {digest for log in logs for digest in re.findall(rf"round {rounds}: anchor (\w+)", log)}
    assert len(digests) == 1, f"replicas end with {digests}"
    left, back = [], []
    for log in logs:
        asked = None
        for line in log.splitlines():
            at = re.match(r"(\d\d:\d\d:\d\d) \[", line)
            if at and "SIGTERM: saving" in line:
                asked = datetime.strptime(at[1], "%H:%M:%S")
            elif at and asked and "left for now" in line:
                left.append((datetime.strptime(at[1], "%H:%M:%S") - asked).total_seconds() % 86400)
                asked = None
        back += [float(found) for found in re.findall(r"first inner step after ([\d.]+) s", log)]
    steps = sum(int(entry.facts.measured.get("inner_steps", [0])[0]) for entry in entries)
    again = sum(len(re.findall(r"training round \d+ again", log)) for log in logs)
    return Found(seconds, requeues, len(entries), steps, again, left, back, digests.pop())


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="inner steps of a round")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two requeues")
    parser.add_argument("--kill-wait", type=int, default=30, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if reason := slurm_cluster.reason_to_skip():
        sys.exit(f"bench/slurm.py: {reason}")
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        found = {
            "undisturbed": one_run(args, Path(folder) / "still", 0.0),
            f"a job taken back every {args.every:g} s": one_run(args, Path(folder) / "taken", args.every),
        }
    print(
        "| | seconds | requeues | updates counted | inner steps in them | inner steps/s "
        "| rounds trained again | SIGTERM to end, s: median, most | start to first step, s: median, most |"
    )
    print("|---" * 9 + "|")
    for name, row in found.items():
        of = f"{row.updates} of {args.rounds * args.replicas}"
        print(
            f"| {name} | {row.seconds:.0f} | {row.requeues} | {of} | {row.inner_steps} "
            f"| {row.inner_steps / row.seconds:.1f} | {row.again} | {spread(row.leave_seconds)} "
            f"| {spread(row.back_seconds)} |"
        )
    still, taken = found.values()
    print(f"\nthroughput kept: {taken.inner_steps / taken.seconds / (still.inner_steps / still.seconds):.0%}")


if __name__ == "__main__":
    main()
