"""Changes of a run's membership under fire: closers are killed while they take up each of them.

    python bench/changing.py --rounds 60 --seed 0

The fleet of bench/kills.py, with one more replica that is invited and revoked, three times over, while
replicas replace their keys. After each command a closer's worker gets SIGKILL, at a random moment of the next
round or two. At the end every change must be in the chain, with one history that all replicas agree with.
At each write, one by one: bench/each_write.py, and in one process tests/protocol/test_membership.py.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import kills

from isthmus.protocol.access import open_ledger
from isthmus.protocol.ledger import Ledger

CLOSERS = ("rack-0", "rack-1")  # as `init` names them
LATEST_SECONDS = 3.0  # of a kill, after its command
TURNS = 3


class Owner(threading.Thread):
    """Types one change after another, each when the one before has come, and kills closers meanwhile."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(daemon=True, name="owner")
        self.folder, self.chance = folder, random.Random(seed)
        self.bucket, self.keys = folder / "bucket", folder / "keys"
        self.killed: list[str] = []
        self.done: list[str] = []
        self.fault = ""
        self.guest: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self.until(lambda ledger: ledger.last_round() >= 2)
            for turn in range(TURNS):
                name = f"guest-{turn}"
                self.admit(name)
                self.rotate(("rack-1", "edge", name)[turn])
                self.change(f"revocation of {name}", "revoke", name, key="run.owner.key")
                self.until(lambda ledger, name=name: name not in ledger.run.keys)
                self.wait_for_guest(1)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"

    def admit(self, name: str) -> None:
        token = self.type("invite", "--replica", name, "--like", "rack", key="run.owner.key")
        words = ["join", str(self.bucket), "--token", token, "--key", str(self.keys / f"{name}.key")]
        words += ["--work", str(self.folder / f"work-{name}"), "--device", "cpu", "--threads", "1"]
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            self.guest = subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.until(lambda ledger: any(self.bucket.glob("requests/*")) or name in ledger.run.keys)
        self.kill_closers()
        self.until(lambda ledger: name in ledger.run.keys)
        self.done.append(f"admission of {name}")

    def rotate(self, name: str) -> None:
        old = open_ledger(str(self.bucket)).run.keys[name]
        self.change(f"rotation of {name}", "rotate", name, key=f"{name}.key")
        self.until(lambda ledger: ledger.run.keys[name] != old)

    def change(self, what: str, *words: str, key: str) -> None:
        self.type(*words, key=key)
        self.kill_closers()
        self.done.append(what)

    def kill_closers(self) -> None:
        """The worker of one of them, soon."""
        time.sleep(self.chance.uniform(0.0, LATEST_SECONDS))
        name = self.chance.choice(CLOSERS)
        for process in kills.processes(self.folder):
            if process.role == "full" and process.replica == name:
                os.kill(process.pid, signal.SIGKILL)
                self.killed.append(name)

    def type(self, *words: str, key: str) -> str:
        command = [words[0], str(self.bucket), *words[1:], "--key", str(self.keys / key)]
        done = subprocess.run(
            [sys.executable, "-m", "isthmus.cli.main", *command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def until(self, holds) -> None:
        while not ((self.bucket / "run.json").exists() and holds(self.look())):
            time.sleep(0.2)

    def look(self) -> Ledger:
        return open_ledger(str(self.bucket))

    def wait_for_guest(self, status: int) -> None:
        assert self.guest
        if (ended := self.guest.wait(300)) != status:
            raise RuntimeError(f"the guest ended with status {ended}")

    def finish(self) -> list[str]:
        if self.guest and self.guest.poll() is None:
            self.guest.kill()
            self.guest.wait()
        wanted = 3 * TURNS
        if self.fault or len(self.done) < wanted:
            return [f"{len(self.done)} of {wanted} changes came; {self.fault or 'the run was too short'}"]
        return []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="isthmus-changing-")).resolve()
    folder.rmdir()  # `train` makes it
    owner = Owner(folder, args.seed)
    owner.start()
    outcome = kills.ordeal(
        folder, rounds=args.rounds, every_seconds=1e9, seed=args.seed, inner_steps=args.inner_steps
    )
    problems = [*outcome.problems, *owner.finish()]
    epochs = open_ledger(str(owner.bucket)).membership.newest.number
    print(f"{len(owner.done)} changes in {epochs} documents: {', '.join(owner.done)}")
    print(f"closers killed meanwhile: {len(owner.killed)}; {args.rounds} rounds in {outcome.seconds:.0f} s")
    print("\n".join(f"FAILED: {problem}" for problem in problems) or "one history, and ledger verify passes")
    if problems:
        print(f"the run directory is {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
