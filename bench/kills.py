"""A real fleet under fire: processes are killed and stopped at random, from a seed, while it trains.

    pytest -m soak tests/fleet/test_kills.py -k under_fire

Four replicas: two full, one pipelined of two stages, and one of two stages that restart apart, as if they
were on two machines. Every few seconds a stage or a full replica's worker gets SIGKILL, or SIGSTOP for good,
or SIGSTOP for a few seconds; once, all workers get SIGKILL.
At the end the run must have finished by itself, with one history that every replica, whenever it was there,
agrees with.
"""

import _thread
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.config import Recipe, parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.replay import Replay
from isthmus.runtime.train import train

RECIPE = """
name = "kills"
seed = {seed}
[model]
preset = "nano"
width = 32
heads = 2
ffn = 64
context = 32
[data]
corpus = "builtin:sample"
eval_batches = 1
eval_every = {rounds}
[inner]
batch = 4
micro_batches = 2
lr = 1e-3
warmup_steps = 5
precision = "fp32"
[outer]
inner_steps = {inner_steps}
rounds = {rounds}
keep = 16
values = "2bit"
[bucket]
url = "{url}"
heartbeat_seconds = 1.0
anchor_every = 5
[[replicas]]
name = "rack"
kind = "full"
count = 2
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/4"
[[replicas]]
name = "field"
kind = "pipelined"
stages = 2
compression = "1/4"
"""
APART = ("field",)
ROLES = ("stage", "full")
KINDS = ("SIGKILL", "SIGSTOP", "nap")
ANCHOR = re.compile(r"\[([\w-]+)(/\d+)?\] round (\d+): anchor ([0-9a-f]{16})")
NEW_START = re.compile(r"\] joining |; starting (it|the replica's stages) again")


def recipe_for(rounds: int, seed: int, url: str = "", inner_steps: int = 5) -> Recipe:
    return parse_recipe(RECIPE.format(rounds=rounds, seed=seed, url=url, inner_steps=inner_steps))


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the fleet, found by its command line."""

    pid: int
    role: str
    replica: str
    name: str  # what it is; the process that replaces it has the same name


def processes(folder: Path) -> Iterator[Process]:
    """The workers and the `join` commands of this folder, by /proc."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            own = (Path("/proc") / str(pid) / "comm").read_text().strip()
            if worker := re.fullmatch(r"worker-(\d+)/(\d+)", own):
                replica = replica_of(pid, folder)
                name = replica if worker[2] == "1" else f"{replica} stage {worker[1]}"
                if replica:
                    yield Process(pid, "full" if worker[2] == "1" else "stage", replica, name)
            elif replica := joined(command_of(pid), folder):
                words = command_of(pid)
                stage = f" stage {words[words.index('--stage') + 1]}" if "--stage" in words else ""
                yield Process(pid, "supervisor", replica, f"supervisor of {replica}{stage}")
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked


def joined(words: Sequence[str], folder: Path) -> str:
    """The replica of this `isthmus join`, if it is one of this folder."""
    ours = "isthmus.cli.main" in words and "join" in words and any(str(folder) in word for word in words)
    return words[words.index("--replica") + 1] if ours else ""


def replica_of(pid: int, folder: Path) -> str:
    """A worker's replica: by the log to which it writes, or by the `join` beyond its fork server."""
    log = Path(os.readlink(f"/proc/{pid}/fd/2"))
    if log.parent.name == "logs" and log.is_relative_to(folder):
        return log.stem.partition(".")[0]
    return joined(command_of(parent_of(parent_of(pid))), folder)


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


@dataclass
class Fault:
    at: float
    kind: str
    victim: Process
    round: int  # the last that the replica had applied
    gone_at: float | None = None  # when the victim was replaced, or ran again
    healed_at: float | None = None


NAP_SECONDS = 4.0


def script(seed: int, count: int = 1000) -> Iterator[tuple[str, str]]:
    """(role, kind) of one fault after another: every pair once, in a random order, then at random."""
    chance = random.Random(seed)
    first = [(role, kind) for role in ROLES for kind in KINDS[:2]] + [(chance.choice(ROLES), "nap")]
    chance.shuffle(first)
    yield from first
    yield "everybody", "SIGKILL"
    for _ in range(count):
        yield chance.choice(ROLES), chance.choice(KINDS)


class Saboteur(threading.Thread):
    """Strikes every few seconds, and watches until each wound has closed."""

    def __init__(
        self, folder: Path, rounds: int, every_seconds: float, seed: int, most: int, limit_seconds: float
    ) -> None:
        super().__init__(daemon=True, name="saboteur")
        self.folder, self.rounds, self.every, self.most = folder, rounds, every_seconds, most
        self.chance, self.script = random.Random(seed + 1), script(seed)
        self.faults: list[Fault] = []
        self.applied: dict[str, list[tuple[int, float]]] = defaultdict(list)  # replica -> (round, seen at)
        self.read: dict[Path, int] = {}
        self.began, self.limit = time.monotonic(), limit_seconds
        self.ended = threading.Event()
        self.complaint = ""

    def run(self) -> None:
        strike, warned = None, 0
        while not self.ended.wait(0.1):
            self.look()
            now = time.monotonic()
            if now - self.began > self.limit * (1 + 0.2 * warned):
                self.complaint = f"the run was not done within {self.limit:g} s"
                warned += 1
                _thread.interrupt_main()
            furthest = max((rounds[-1][0] for rounds in self.applied.values()), default=0)
            if furthest < 1 or furthest >= self.rounds - 2 or len(self.faults) >= self.most:
                continue
            strike = strike or now + self.every / 2
            if now >= strike:
                self.strike(now)
                strike = now + self.every * self.chance.uniform(0.7, 1.3)

    def strike(self, now: float) -> None:
        """A random process of the role that is next in the script; one that is well and truly there."""
        role, kind = next(self.script)
        if role == "everybody":
            for worker in sorted(processes(self.folder), key=lambda p: p.name):
                self.hit(worker, kind, now)
            return
        hurt = {fault.victim.pid for fault in self.faults}
        up = [p for p in processes(self.folder) if self.applied[p.replica]]
        there = [p for p in up if p.role == role and p.pid not in hurt]
        if not there:
            return
        self.hit(self.chance.choice(sorted(there, key=lambda p: p.name)), kind, now)

    def hit(self, victim: Process, kind: str, now: float) -> None:
        rounds = self.applied[victim.replica]
        try:
            os.kill(victim.pid, signal.SIGKILL if kind == "SIGKILL" else signal.SIGSTOP)
        except ProcessLookupError:
            return
        self.faults.append(Fault(now, kind, victim, rounds[-1][0] if rounds else 0))

    def look(self) -> None:
        """Read the logs' new lines; see which victims were replaced, and who has gone on since."""
        for path in (self.folder / "logs").glob("*.log"):
            with open(path, "rb") as file:
                file.seek(self.read.get(path, 0))
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self.read[path] = self.read.get(path, 0) + len(new)
            for found in ANCHOR.finditer(new.decode(errors="replace")):
                if found[2] in (None, "/0"):
                    self.applied[found[1]].append((int(found[3]), time.monotonic()))
        now = time.monotonic()
        for fault in self.faults:
            if fault.healed_at is not None:
                continue
            if fault.gone_at is None:
                if fault.kind == "nap" and now > fault.at + NAP_SECONDS and stopped(fault.victim.pid):
                    os.kill(fault.victim.pid, signal.SIGCONT)
                awake = fault.kind == "nap" and now > fault.at + NAP_SECONDS and not stopped(fault.victim.pid)
                fault.gone_at = now if awake or self.replaced(fault.victim) else None
            if fault.gone_at is not None:
                later = [at for r, at in self.applied[fault.victim.replica] if r > fault.round]
                fault.healed_at = next((at for at in later if at >= fault.gone_at), None)

    def replaced(self, victim: Process) -> bool:
        return any(p.name == victim.name and p.pid != victim.pid for p in processes(self.folder))

    def finish(self) -> None:
        """Who had finished before its wound was closed had nothing left to do."""
        self.ended.set()
        self.join()
        self.look()
        for fault in self.faults:
            rounds = self.applied[fault.victim.replica]
            if fault.healed_at is None and rounds and rounds[-1][0] == self.rounds:
                fault.healed_at = rounds[-1][1]


@dataclass
class Outcome:
    faults: list[Fault]
    problems: list[str]


def ordeal(
    folder: Path,
    *,
    rounds: int,
    every_seconds: float,
    seed: int,
    url: str = "",
    most: int = 1000,
    limit_seconds: float = 1800.0,
    inner_steps: int = 5,
) -> Outcome:
    """Train a fleet in `folder` while it is being shot at, then look at what it came to."""
    saboteur = Saboteur(folder, rounds, every_seconds, seed, most, limit_seconds)
    saboteur.start()
    problems: list[str] = []
    try:
        train(
            recipe_for(rounds, seed, url, inner_steps),
            folder,
            device="cpu",
            quiet=True,
            apart=APART,
            link_timeout_seconds=10.0,
            stall_seconds=8.0,
        )
    except (Exception, KeyboardInterrupt) as error:
        problems.append(saboteur.complaint or f"{type(error).__name__}: {error}")
    saboteur.finish()
    url = url or str(folder / "bucket")
    about = json.loads((folder / "about.json").read_text())
    if about["status"] != "finished":
        problems.append(f"the run is {about['status']}: {about.get('error')}")
    problems += [
        f"{fault.kind} of {fault.victim.name} was not healed"
        for fault in saboteur.faults
        if fault.healed_at is None
    ]
    problems += check_left_over(folder)
    problems += check_history(folder, url, rounds)
    return Outcome(saboteur.faults, problems)


def check_left_over(folder: Path, timeout_seconds: float = 5.0) -> list[str]:
    deadline = time.monotonic() + timeout_seconds
    while (left := [*processes(folder), *orphans(folder)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {process.pid} ({process.name}) was left behind" for process in left]


def orphans(folder: Path) -> Iterator[Process]:
    """Workers without a supervisor that write to a log in this folder."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            own = Path(f"/proc/{pid}/comm").read_text()
            ours = Path(os.readlink(f"/proc/{pid}/fd/2")).is_relative_to(folder)
            if own.startswith("worker-") and parent_of(pid) == 1 and ours:
                yield Process(pid, "orphan", "", own.strip())
        except (OSError, ValueError):
            continue


def check_history(folder: Path, url: str, rounds: int) -> list[str]:
    """One digest for each round in all the logs and in the replay; rounds in order; the ledger verifies."""
    problems: list[str] = []
    ledger = open_ledger(url)
    listed = [int(Path(key).stem) for key in ledger.store.list("manifests")]
    if listed != list(range(1, rounds + 1)):
        problems.append(f"the manifests are {listed}, not 1 to {rounds}")
        return problems
    replay = Replay(ledger)
    truth = {0: replay.digest()[:16]}
    while (manifest := replay.step()) is not None:
        truth[manifest.round] = replay.digest()[:16]
    for path in sorted((folder / "logs").glob("*.log")):
        problems += check_log(path, truth)
    for member in ledger.run.recipe.fleet():
        logs = [path.read_text() for path in (folder / "logs").glob(f"{member.name}*.log")]
        if not any("all rounds are done" in text for text in logs):
            problems.append(f"{member.name} did not finish")
    rows = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if rows != list(range(rounds + 1)):
        problems.append(f"metrics.jsonl has the rounds {rows}")
    words = [sys.executable, "-m", "isthmus.cli.main", "ledger", "verify", url]
    verified = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    if verified.returncode:
        problems.append(f"ledger verify: {verified.stderr.strip()}")
    return problems


def check_log(path: Path, truth: dict[int, str]) -> list[str]:
    """Every anchor that this replica ever said it holds is the history's, and it takes no round twice."""
    problems: list[str] = []
    last: dict[str | None, int] = {}  # by process
    for line in path.read_text(errors="replace").splitlines():
        if NEW_START.search(line):
            last.clear()
        if found := ANCHOR.search(line):
            who, t, digest = found[2], int(found[3]), found[4]
            if truth.get(t) != digest:
                problems.append(f"{path.stem}: round {t} has anchor {digest}, the ledger {truth.get(t)}")
            if who in last and t != last[who] + 1:
                problems.append(f"{path.stem}{who or ''}: round {t} came after round {last[who]}")
            last[who] = t
    return problems
