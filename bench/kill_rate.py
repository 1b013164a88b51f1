"""What kills cost a fleet: counted tokens a second while a random worker gets SIGKILL every 60 or 20 s.

    .venv/bin/python bench/kill_rate.py --cells 3:0 3:60 3:20 30:0 30:60 30:20

A cell is SECONDS_OF_A_ROUND:SECONDS_BETWEEN_KILLS, 0 for none. Each is one `isthmus train` of four full
replicas on this machine, in a bucket of its own. Its inner steps are paced: each lasts a stated time, most of
which the process sleeps, as one does whose GPU computes. So the cores of a replica that is dead do not make
the others faster, which on a machine with fewer cores than replicas would hide what a kill costs.

Columns. `tokens/s`: those of all inner steps behind the updates that manifests list, by their commits' facts;
with them are the inner steps of rounds that were settled without their replica, which the error feedback
brought into its next update. `share`: that against the cell of the same rounds without kills. `whole`: the
share if a replica counts for a round only where the round lists it. `rounds/s`: the share of rounds a second,
which is what those lose who were not killed. `back`: the median time from a kill to the next inner step.
The most that can be had is 1 - (restart + work since the last save) / (4 x seconds between kills).
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kills import processes

STEP_SECONDS = 0.25  # of a paced inner step
EDGE_SECONDS = 0.5  # about what a round takes beside its inner steps: to be as long as the cell says
CONTEXT = 32
RECIPE = """
name = "kill-rate"
seed = 1
[model]
preset = "nano"
width = 32
heads = 2
ffn = 64
context = {context}
[data]
corpus = "builtin:sample"
eval_batches = 1
eval_every = 100000
[inner]
batch = {batch}
lr = 1e-3
warmup_steps = 5
precision = "fp32"
[outer]
inner_steps = {steps}
rounds = 100000
keep = 16
values = "2bit"
[bucket]
heartbeat_seconds = {heartbeat}
anchor_every = 10
[[replicas]]
name = "rack"
kind = "full"
count = 4
"""
# Python imports it before anything else, in every process of the fleet.
PACE = '''
import importlib.util, os, sys, time
class Pace:
    """Wraps the inner step when its module is imported, and not sooner: torch takes seconds."""
    def find_spec(self, name, path=None, target=None):
        if name != "isthmus.replica.full":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            step, seconds = module.FullReplica.inner_step, float(os.environ["PACE_SECONDS"])
            def paced(self, number):
                until = time.monotonic() + seconds
                loss = step(self, number)
                time.sleep(max(0.0, until - time.monotonic()))
                return loss
            module.FullReplica.inner_step = paced
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Pace())
'''
FIRST_STEP = re.compile(r"first inner step after")


@dataclass
class Cell:
    round_seconds: float
    every: float  # seconds between kills; 0: none
    seconds: float = 0.0  # from the first to the last manifest that is looked at
    tokens: int = 0
    whole_tokens: int = 0  # if only whole rounds count
    lasted: list[float] = field(default_factory=list)  # each round, by the times of the manifests
    entries: list[int] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    kills: int = 0

    def row(self, plain: "Cell | None") -> str:
        def share(tokens: float, of: float) -> str:
            return f"{100 * tokens / self.seconds / (of / plain.seconds):.0f} %" if plain and of else "-"

        every = f"{self.every:g} s" if self.every else "never"
        cells = [
            f"{self.round_seconds:g} s",
            every,
            str(self.kills),
            f"{self.tokens / self.seconds:.0f}",
            share(self.tokens, plain.tokens if plain else 0),
            share(self.whole_tokens, plain.whole_tokens if plain else 0),
            share(len(self.lasted), len(plain.lasted) if plain else 0),
            f"{statistics.median(self.lasted):.1f} s",
            f"{sorted(self.lasted)[int(0.9 * len(self.lasted))]:.1f} s",
            f"{statistics.mean(self.entries):.2f}",
            f"{statistics.median(self.back):.1f} s" if self.back else "-",
        ]
        return f"| {' | '.join(cells)} |"


COLUMNS = (
    "rounds of | kills every | kills | tokens/s | share | whole | rounds/s | median | p90 | listed | back"
)
HEADER = f"| {COLUMNS} |\n{'|---' * len(COLUMNS.split('|'))}|"


class Killer(threading.Thread):
    """SIGKILL to a random worker, again and again; the logs say when it trained again."""

    def __init__(self, folder: Path, every: float, seed: int) -> None:
        super().__init__(daemon=True, name="killer")
        self.folder, self.every, self.chance = folder, every, random.Random(seed)
        self.ended, self.kills = threading.Event(), 0
        self.struck: dict[str, tuple[float, int]] = {}  # replica -> (when, first steps in its log by then)
        self.back: list[float] = []

    def run(self) -> None:
        strike = time.monotonic() + self.every
        while not self.ended.wait(0.05):
            for name, (at, before) in list(self.struck.items()):
                if self.first_steps(name) > before:
                    self.back.append(time.monotonic() - at)
                    del self.struck[name]
            if time.monotonic() < strike:
                continue
            strike += self.every
            workers = sorted((p for p in processes(self.folder) if p.role == "full"), key=lambda p: p.name)
            up = [p for p in workers if p.name not in self.struck]
            if not up:
                continue
            victim = self.chance.choice(up)
            self.struck[victim.name] = time.monotonic(), self.first_steps(victim.name)
            os.kill(victim.pid, signal.SIGKILL)
            self.kills += 1

    def first_steps(self, name: str) -> int:
        try:
            return len(FIRST_STEP.findall((self.folder / "logs" / f"{name}.log").read_text(errors="replace")))
        except OSError:
            return 0


def measure(cell: Cell, minutes: float, args: argparse.Namespace) -> None:
    """Train in a temporary folder, and count in the manifests what the minutes brought."""
    folder = Path(tempfile.mkdtemp(prefix="isthmus-kill-rate-")).resolve()
    batch, steps = 4, round((cell.round_seconds - EDGE_SECONDS) / args.step_seconds)
    (folder / "sitecustomize.py").write_text(PACE)
    recipe, run = folder / "recipe.toml", folder / "run"
    recipe.write_text(RECIPE.format(steps=steps, batch=batch, context=CONTEXT, heartbeat=args.heartbeat))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACE_SECONDS": str(args.step_seconds)}
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    words = [sys.executable, "-m", "isthmus.cli.main", "train", str(recipe), "--run", str(run)]
    with open(folder / "train.log", "wb") as log:
        words += ["--device", "cpu", "--quiet"]
        fleet = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    killer = Killer(run, cell.every, args.seed)
    try:
        first = next(t for t in settled(run, fleet) if t >= args.skip)
        if cell.every:
            killer.start()
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until and fleet.poll() is None:
            time.sleep(1.0)
        if fleet.poll() is not None:
            raise SystemExit(f"the fleet ended with status {fleet.returncode}; see {folder / 'train.log'}")
        killer.ended.set()
        count(cell, run, first, steps, batch * CONTEXT)
        cell.kills, cell.back = killer.kills, killer.back
    finally:
        killer.ended.set()
        stop(fleet, run)
    if args.keep:
        print(f"kept {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)


def settled(run: Path, fleet: subprocess.Popen[bytes]) -> Iterator[int]:
    """The newest manifest's round, as it grows."""
    while fleet.poll() is None:
        yield max((int(p.stem) for p in (run / "bucket" / "manifests").glob("*.json")), default=0)
        time.sleep(0.2)
    raise SystemExit(f"the fleet ended with status {fleet.returncode}; see {run.parent / 'train.log'}")


def count(cell: Cell, run: Path, first: int, steps: int, step_tokens: int) -> None:
    """From the manifest `first` to the newest."""
    paths = sorted(p for p in (run / "bucket" / "manifests").glob("*.json") if int(p.stem) >= first)
    times = [path.stat().st_mtime for path in paths]
    cell.seconds = times[-1] - times[0]
    cell.lasted = [after - before for before, after in pairwise(times)]
    for path in paths[1:]:
        entries = json.loads(path.read_text())["body"]["entries"]
        cell.entries.append(len(entries))
        cell.whole_tokens += steps * step_tokens * len(entries)
        for entry in entries:
            told = entry["facts"].get("measured", {}).get("inner_steps", [steps])
            cell.tokens += round(told[0]) * step_tokens


def stop(fleet: subprocess.Popen[bytes], run: Path) -> None:
    """Nothing of it is needed any more."""
    if fleet.poll() is None:
        fleet.kill()
    fleet.wait()
    deadline = time.monotonic() + 20
    while (left := list(processes(run))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["3:0", "3:60", "3:20", "30:0", "30:60", "30:20"]
    parser.add_argument("--cells", nargs="+", default=default, metavar="ROUND:EVERY", help=" ".join(default))
    parser.add_argument("--minutes", type=float, default=0.0, help="of a cell (default: 4, of long rounds 8)")
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="of a paced inner step")
    parser.add_argument("--heartbeat", type=float, default=3.0, help="bucket.heartbeat_seconds")
    parser.add_argument("--skip", type=int, default=2, help="rounds before the count begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    args = parser.parse_args(argv)
    print(HEADER, flush=True)
    plain: dict[float, Cell] = {}
    for text in args.cells:
        seconds, every = (float(part) for part in text.split(":"))
        cell = Cell(seconds, every)
        measure(cell, args.minutes or (8.0 if seconds > 10 else 4.0), args)
        if not every:
            plain[seconds] = cell
        print(cell.row(plain.get(seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
