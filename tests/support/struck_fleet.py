"""The fleet of `struck`: replicas that were there from the start, guests, and what its owner types."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from faults import kills
from servers import Server
from small_recipes import recipe_text, replicas
from struck import LIMIT_SECONDS, Strike, Watch, Wires

from isthmus.config import parse_recipe
from isthmus.protocol.access import OWNER_KEY, open_ledger
from isthmus.runtime.create import create

# Python imports this first: every batch that a worker reads is a line, with its place in the run's order.
READS = """
import os, sys
if "isthmus.runtime.worker" in sys.orig_argv:
    import json
    from isthmus.layout.deal import Deal
    replica = json.loads(sys.orig_argv[sys.orig_argv.index("isthmus.runtime.worker") + 1])["replica"]
    place, lines = Deal.place, os.open(os.environ["READS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def told(deal, inner_step):
        found = place(deal, inner_step)
        os.write(lines, f"{replica} {inner_step} {found} {deal.batch}\\n".encode())
        return found
    Deal.place = told
"""


class StruckFleet:
    """`num_full` replicas, rack-0 and on. The environment must be that of who may use the bucket."""

    def __init__(
        self,
        folder: Path,
        server: Server,
        url: str,
        num_full: int = 3,
        inner_steps: int = 3,
        closers: Sequence[str] | None = None,
    ) -> None:
        text = recipe_text(
            replicas("rack", count=num_full),
            model={"layers": 2},
            inner={"batch": 2, "precision": "fp32"},
            outer={"inner_steps": inner_steps, "rounds": 100_000, "keep": 8, "values": "2bit"},
            bucket={"heartbeat_seconds": 1, "anchor_every": 1},
        )
        self.folder, self.url, self.keys = folder, url, folder / "keys"
        (folder / "logs").mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(READS)
        run = create(parse_recipe(text), url, self.keys, closers)
        self.names, self.running = list(run.keys), dict[str, subprocess.Popen[bytes]]()
        self.watch = Watch(run.closers, url.rpartition("/")[2], self.kill)
        self.wires = Wires(server.port, self.watch)
        self.ledger, self.guest = open_ledger(url), ""
        for name in self.names:
            self.join(name, "--replica", name)

    def environment(self, who: str) -> dict[str, str]:
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        watched = {"AWS_ENDPOINT_URL": self.wires.endpoint(who)} if who not in self.names[2:] else {}
        reads = {"PYTHONPATH": os.pathsep.join(paths), "READS": str(self.folder / "reads")}
        return {**os.environ, **reads, **watched, "OMP_NUM_THREADS": "1"}

    def join(self, name: str, *words: str, who: str = "") -> None:
        """A launcher, with its worker; its log is logs/NAME.log."""
        options = ["--key", str(self.keys / f"{name}.key"), "--work", str(self.folder / "work" / name)]
        command = ["join", self.url, *words, *options, "--device", "cpu", "--threads", "1"]
        self.running[name] = self._start(who or name, command, self.folder / "logs" / f"{name}.log")

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()

    def _start(self, who: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", *words],
                stdout=subprocess.PIPE if who in COMMANDS else file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=self.environment(who),
            )

    def type(self, *words: str, key: str = OWNER_KEY) -> str:
        """A command, as its writer's proxy lets it live; typed again after a kill. What it printed last."""
        who = words[0]
        command = [who, self.url, *words[1:], "--key", str(self.keys / key)]
        while True:
            process = self.running[who] = self._start(who, command, self.folder / "commands.log")
            said = process.communicate(timeout=LIMIT_SECONDS)[0].decode().strip()
            if process.returncode == 0:
                return said
            strike = self.watch.strike
            if process.returncode != -signal.SIGKILL or not strike or strike.victim != who:
                tail = (self.folder / "commands.log").read_text()[-500:]
                raise RuntimeError(f"{' '.join(words)} ended with status {process.returncode}: {tail}")

    def kill(self, who: str) -> None:
        """SIGKILL to the command, or to the worker of a replica; the end of it is waited for."""
        if who in COMMANDS:
            return self.running[who].kill()
        replica = self.guest if who == "newcomer" else who
        for process in kills.processes(self.folder):
            if process.role == "full" and process.replica == replica:
                os.kill(process.pid, signal.SIGKILL)
                while _lives(process.pid):
                    time.sleep(0.001)

    def until(self, done: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := done()):
            if self.watch.fault or time.monotonic() > deadline:
                raise RuntimeError(f"no {what} after {LIMIT_SECONDS:g} s; {self.watch.fault}")
            ended = [n for n in self.names if self.running[n].poll() is not None]
            if ended:
                raise RuntimeError(f"{ended} ended; see {self.folder / 'logs'}")
            time.sleep(0.2)
        return found

    # What the owner and guests do

    def invite(self, name: str) -> str:
        return self.type("invite", "--replica", name, "--like", "rack")

    def admit(self, name: str, strike: Strike | None = None) -> None:
        if strike and strike.step.by == "invite":
            self.watch.begin(strike)
        token = self.invite(name)
        if not (strike and strike.step.by == "invite"):
            self.watch.begin(strike)
        self.guest = name
        self.join(name, "--token", token, who="newcomer")
        self.until(lambda: name in self.epoch().run.keys, f"admission of {name}")

    def revoke(self, name: str, strike: Strike | None = None) -> None:
        self.watch.begin(strike)
        self.type("revoke", name)
        self.until(lambda: name not in self.epoch().run.keys, f"revocation of {name}")

    def rotate(self, name: str, strike: Strike | None = None, in_line: str = "") -> None:
        old = self.epoch().run.keys[name]
        self.watch.begin(strike, in_line)
        self.type("rotate", name, key=f"{name}.key")
        self.until(lambda: self.epoch().run.keys[name] != old, f"new key of {name}")

    def extend(self, strike: Strike | None = None) -> None:
        rounds = self.epoch().run.recipe.outer.rounds
        self.watch.begin(strike)
        self.type("extend", "--rounds", "7")
        self.until(lambda: self.epoch().run.recipe.outer.rounds != rounds, "more rounds")

    # What it came to

    def epoch(self):
        return self.ledger.membership.look()

    def all_give(self, beyond: int = 0, but: Collection[str] = ()) -> int:
        """A round after `beyond`, in the newest epoch, to which everybody gave, counted or on probation."""

        def done() -> int:
            newest = self.ledger.last_round()
            for t in range(max(beyond + 1, newest - 3), newest + 1):
                manifest, epoch = self.ledger.manifest(t), self.epoch()
                if manifest is None or manifest.epoch != epoch.number:
                    continue
                given = {entry.replica for entry in manifest.entries} | dict(manifest.refused).keys()
                if given >= epoch.run.keys.keys() - set(but):
                    return t
            return 0

        return self.until(done, "round to which all give")

    def stop(self) -> dict[str, int]:
        """By Ctrl-C; everybody's status."""
        for name in self.names:
            self.running[name].send_signal(signal.SIGINT)
        return {name: self.running[name].wait(LIMIT_SECONDS) for name in self.names}

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self.wires.close()


COMMANDS = ("invite", "revoke", "rotate", "extend")


def _lives(pid: int) -> bool:
    try:
        return not re.search(r"\) [ZX] ", Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return False
