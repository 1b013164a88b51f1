"""A storm on a real fleet: kills, stops, clock jumps, bad disks and store outages, then a check of all.

    .venv/bin/python bench/storm.py --minutes 3 --seed 0              a bucket in a folder
    .venv/bin/python bench/storm.py --minutes 30 --store seaweed      SeaweedFS on this machine; or moto

The fleet is that of bench/kills.py under `isthmus train`: two full replicas and two of two stages. Every few
seconds one of these happens, and several at once may last:

    kill      SIGKILL for any process of the fleet; sometimes for `isthmus train`, which is then resumed
    stop      SIGSTOP for up to 20 s
    clock     the wall clock of half of the processes jumps by up to an hour either way
    full      the disk with states, logs and a folder's bucket has no byte left (as root: a small tmpfs)
    readonly  that disk is mounted read-only (as root)
    outage    the store's server is killed, and started again later (--store seaweed or moto)

When the time is up all faults end, and every replica must count again. Then: no manifest that was ever seen
is gone or another; `ledger verify` passes; every batch that was read is one replica's share, and no place of
the order belongs to two; no payload is listed twice; every digest in every log is that of the replay.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import servers
from kills import check_log, recipe_for, stopped

from isthmus.config import dump_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.replay import Replay

STOP_SECONDS, DISK_SECONDS, OUTAGE_SECONDS, JUMP_SECONDS = 20.0, 8.0, 15.0, 3600.0
HEAL_SECONDS = 300.0
ROUNDS, INNER_STEPS = 100_000, 20
MANIFEST_BYTES = 1 << 24
WEIGHTS = {"kill": 8, "stop": 3, "clock": 2, "full": 1, "readonly": 1, "outage": 2}
# Python imports this first, in every process of the fleet.
SITE = """
import os, time
real, folder = time.time, os.environ["STORM"]
def jumped():
    try:
        parity, seconds = open(folder + "/clock").read().split()
        return real() + float(seconds) * (os.getpid() % 2 == int(parity))
    except (OSError, ValueError):
        return real()
time.time = jumped
if not os.environ.get("STORM_CHECKS"):
    import importlib.abc, importlib.machinery, sys
    class Reads(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "isthmus.data.tokens":
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            def execute(module):
                run(module)
                read = module.Batches._read
                lines = os.open(folder + "/reads", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                def noted(self, first, count):
                    log = os.path.basename(os.readlink("/proc/self/fd/2")).removesuffix(".log")
                    os.write(lines, f"{log} {first} {count}\\n".encode())
                    return read(self, first, count)
                module.Batches._read = noted
            spec.loader.exec_module = execute
            return spec
    sys.meta_path.insert(0, Reads())
"""


def family(root: int) -> list[int]:
    """The processes below `root`, by /proc."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children[int(fields[1])].append(int(entry.name))
    found, left = [], [root]
    while left:
        below = children.pop(left.pop(), [])
        found += below
        left += below
    return sorted(found)


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def born(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; "" if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


class Disk:
    """A tmpfs that can be filled and made read-only; without root, a plain folder that cannot."""

    def __init__(self, folder: Path, megabytes: int = 300) -> None:
        self.folder, self.ballast = folder, folder / "ballast"
        folder.mkdir()
        size = ["-o", f"size={megabytes}m", "tmpfs", str(folder)]
        self.small = (
            os.geteuid() == 0 and not subprocess.run(["mount", "-t", "tmpfs", *size], check=False).returncode
        )

    def fill(self) -> None:
        with contextlib.suppress(OSError), open(self.ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))

    def mount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.folder)], check=False, capture_output=True)

    def mend(self) -> None:
        if self.small:
            self.mount("rw")
            self.ballast.unlink(missing_ok=True)

    def remove(self) -> None:
        if self.small:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


class Storm:
    """One fleet, its faults, and what was seen of its history meanwhile."""

    def __init__(self, folder: Path, seed: int, store: str = "folder", every_seconds: float = 3.0) -> None:
        self.folder, self.chance, self.every = folder, random.Random(seed), every_seconds
        self.disk = Disk(folder / "disk")
        self.run_dir, self.server = self.disk.folder / "run", None
        self.environment = os.environ | {"STORM": str(folder), "OMP_NUM_THREADS": "1"}
        self.environment["PYTHONPATH"] = os.pathsep.join(
            [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self.url = str(self.run_dir / "bucket")
        if store != "folder":
            (folder / "server").mkdir()
            start = {"seaweed": servers.start_seaweed, "moto": servers.start_moto}[store]
            self.server = start(folder / "server")
            if isinstance(self.server, str):
                raise SystemExit(f"bench/storm.py: {self.server}")
            self.environment |= servers.admins_environment(self.server.endpoint)
            self.url = f"s3://{servers.BUCKET}/storm"
        os.environ.update({k: v for k, v in self.environment.items() if k.startswith("AWS")})
        (folder / "sitecustomize.py").write_text(SITE)
        recipe = recipe_for(ROUNDS, seed, self.url if self.server else "", INNER_STEPS)
        (folder / "recipe.toml").write_text(dump_recipe(recipe))
        self.names = [member.name for member in recipe.fleet()]
        # moto forgets everything when it is killed.
        self.kinds = [k for k in WEIGHTS if self.disk.small or k not in ("full", "readonly")]
        self.kinds = [k for k in self.kinds if store == "seaweed" or k != "outage"]
        self.faults: Counter[str] = Counter()
        self.starts, self.train = 0, None
        self.seen: dict[str, str] = {}  # manifest -> its bytes when it was first seen
        self.problems: list[str] = []

    def start(self) -> None:
        """`isthmus train`, or its --resume once there is a run."""
        self.starts += 1
        begun = (self.run_dir / "about.json").exists()
        words = ["--resume", str(self.run_dir)] if begun else ["recipe.toml", "--run", str(self.run_dir)]
        with open(self.folder / "train.log", "ab") as log:
            self.train = subprocess.Popen(
                [sys.executable, "-m", "isthmus", "train", *words, "--device", "cpu", "--quiet"],
                cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def watch(self) -> int:
        """Note every manifest that is there, start `train` again if it ended; the newest round."""
        if self.train is None or self.train.poll() is not None:
            self.start()
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # the store may be away
            for key, text in self.manifests():
                if self.seen.setdefault(key, text) != text:
                    self.problems.append(f"{key} is another than it was")
        return len(self.seen)

    def manifests(self) -> Iterator[tuple[str, str]]:
        store = open_ledger(self.url).store
        for key in store.list("manifests"):
            yield key, self.seen.get(key) or bytes(store.get(key, max_bytes=MANIFEST_BYTES)).hex()

    def strike(self) -> None:
        kind = self.chance.choices(self.kinds, [WEIGHTS[k] for k in self.kinds])[0]
        below = family(self.train.pid)
        if not below:
            return
        self.faults[kind] += 1
        if kind == "kill":
            victim = self.train.pid if self.chance.random() < 0.1 else self.chance.choice(below)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        elif kind == "stop":
            victim = self.chance.choice(below)
            self.for_a_while(STOP_SECONDS, victim, signal.SIGSTOP, signal.SIGCONT)
        elif kind == "clock":
            seconds = self.chance.uniform(-JUMP_SECONDS, JUMP_SECONDS)
            (self.folder / "clock").write_text(f"{self.chance.randrange(2)} {seconds}")
        elif kind == "outage":
            self.server.kill()
            threading.Timer(self.chance.uniform(1, OUTAGE_SECONDS), self.server.start).start()
        else:
            self.disk.fill() if kind == "full" else self.disk.mount("ro")
            threading.Timer(self.chance.uniform(1, DISK_SECONDS), self.disk.mend).start()

    def for_a_while(self, most: float, victim: int, first: int, then: int) -> None:
        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, then)

        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, first)
            threading.Timer(self.chance.uniform(1, most), end).start()

    def rage(self, minutes: float) -> None:
        """Faults at random until the time is up, from the first settled round on."""
        self.start()
        begin = time.monotonic()
        while not self.watch():
            if time.monotonic() - begin > HEAL_SECONDS:
                return self.problems.append(f"no round was settled within {HEAL_SECONDS:g} s")
            time.sleep(0.5)
        end, next_strike = time.monotonic() + 60 * minutes, 0.0
        while (now := time.monotonic()) < end:
            if now >= next_strike:
                self.strike()
                next_strike = now + self.every * self.chance.uniform(0.3, 1.7)
            self.watch()
            time.sleep(0.5)

    def heal(self) -> None:
        """End all faults, and wait until every replica counts in a round that began later."""
        time.sleep(STOP_SECONDS)
        (self.folder / "clock").unlink(missing_ok=True)
        self.disk.mend()
        for pid in family(self.train.pid) if self.train else ():
            if stopped(pid):
                os.kill(pid, signal.SIGCONT)
        after, counted = self.watch() + 1, set[str]()
        end = time.monotonic() + HEAL_SECONDS
        while counted < set(self.names) and time.monotonic() < end:
            newest = self.watch()
            for t in range(after + 1, newest + 1):
                counted |= {entry.replica for entry in open_ledger(self.url).manifest(t).entries}
            time.sleep(1)
        if left := sorted(set(self.names) - counted):
            self.problems.append(f"{HEAL_SECONDS:g} s after the storm these do not count again: {left}")

    def leave(self) -> None:
        below = {pid: born(pid) for pid in family(self.train.pid)}
        self.train.send_signal(signal.SIGINT)
        try:
            self.train.wait(120)
        except subprocess.TimeoutExpired:
            self.problems.append("`isthmus train` did not end within 120 s of Ctrl-C")
            self.train.kill()
        time.sleep(5)
        for pid, began in below.items():
            if began and born(pid) == began:
                self.problems.append(f"process {pid} was left behind: {command_of(pid)[:80]}")
                os.kill(pid, signal.SIGKILL)

    def check(self) -> None:
        ledger, found = open_ledger(self.url), dict(self.manifests())
        self.problems += [f"{key} was settled and is gone" for key in self.seen.keys() - found.keys()]
        rounds = sorted(int(Path(key).stem) for key in found)
        if rounds != list(range(1, len(rounds) + 1)):
            return self.problems.append(f"the manifests are {rounds}")
        replay, manifests = Replay(ledger), list[Manifest]()
        truth = {0: replay.digest()[:16]}
        while (manifest := replay.step()) is not None:
            truth[manifest.round] = replay.digest()[:16]
            manifests.append(manifest)
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            self.problems += [p for p in check_log(path, truth) if "came after" not in p]
        listed = Counter(
            (entry.replica, shard.index, shard.digest)
            for manifest in manifests for entry in manifest.entries for shard in entry.shards
        )  # fmt: skip
        self.problems += [f"a payload of {key[0]} is listed {n} times" for key, n in listed.items() if n > 1]
        self.problems += check_reads(ledger, len(manifests), self.folder / "reads")
        words = [sys.executable, "-m", "isthmus", "ledger", "verify", self.url]
        verified = subprocess.run(
            words, capture_output=True, text=True, env=self.environment | {"STORM_CHECKS": "1"}
        )
        if verified.returncode:
            self.problems.append(f"ledger verify: {verified.stderr.strip()}")

    def summary(self) -> str:
        struck = ", ".join(f"{kind} {count}" for kind, count in self.faults.most_common())
        rounds = f"{len(self.seen)} rounds; `train` was started {self.starts} times"
        good = "no round lost; history verified; no batch and no update twice; one digest a round"
        failed = [f"FAILED: {problem}" for problem in self.problems]
        return "\n".join([f"{self.faults.total()} faults ({struck}); {rounds}", *(failed or [good])])


def check_reads(ledger: Ledger, num_rounds: int, reads: Path) -> list[str]:
    """Every batch that was read is one replica's share of a step, and its own; no two shares overlap."""
    owner, problems, names = dict[tuple[int, int], str](), list[str](), set[str]()
    for t in range(1, num_rounds + 2):  # one more: it is open
        names |= ledger.at(t).keys.keys()
        for name in ledger.at(t).keys:
            if share := ledger.deal(t, name):
                for step in range(share.first_step, share.first_step + share.num_steps):
                    owner[share.place(step), share.batch] = name
    end = 0
    for (first, count), name in sorted(owner.items()):
        problems += [f"{name} is dealt sequences before {end} again"] * (first < end)
        end = first + count
    seen = set[str]()
    for line in set(reads.read_text().splitlines()):
        log, first, count = line.rsplit(" ", 2)
        name, place = re.sub(r"\.\d+$", "", log), (int(first), int(count))
        seen.add(name)
        if place not in owner:
            problems.append(f"{log} read {count} sequences from {first} on, which is nobody's share")
        elif name in names and owner[place] != name:
            problems.append(f"{log} read what was dealt to {owner[place]}: {count} sequences from {first} on")
    if missing := names - seen:  # the check would pass for lack of anything to look at
        problems.append(f"no batch of {', '.join(sorted(missing))} was seen")
    return problems


def storm(folder: Path, minutes: float, seed: int, store: str = "folder") -> Storm:
    """Let it rage, then look at what is left. The caller removes the folder."""
    one = Storm(folder, seed, store)
    try:
        one.rage(minutes)
        one.heal()
        one.leave()
        one.check()
    finally:
        for pid in [*family(one.train.pid), one.train.pid] if one.train else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if one.server:
            one.server.kill()
        with contextlib.suppress(OSError):
            shutil.copytree(one.run_dir / "logs", folder / "logs", dirs_exist_ok=True)
        one.disk.mend()
        one.disk.remove()
    return one


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("folder", "seaweed", "moto"), default="folder")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="isthmus-storm-")).resolve()
    one = storm(folder, args.minutes, args.seed, args.store)
    body = {"faults": one.faults, "rounds": len(one.seen), "problems": one.problems}
    print(json.dumps(body) if args.json else one.summary())
    if one.problems:
        print(f"the logs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return 1 if one.problems else 0


if __name__ == "__main__":
    sys.exit(main())
