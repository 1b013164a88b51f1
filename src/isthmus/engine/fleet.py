"""Starting real fleets: create a run, join it from this machine, or run all of it here."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from isthmus.comm.ledger import Ledger, RunInfo, create_run, read_run
from isthmus.comm.store import open_store
from isthmus.comm.trust import Signer, load_signer, new_secret, save_secret
from isthmus.config import Member, Recipe
from isthmus.errors import ConfigError

GONE = ("left", "finished")


def create(recipe: Recipe, url: str, keys_dir: Path, closers: Sequence[str] | None = None) -> RunInfo:
    """run.json in the bucket and one private key per replica on this disk."""
    check_trainable(recipe)
    names = [member.name for member in recipe.fleet()]
    for name in closers or ():
        if name not in names:
            raise ConfigError(f'closer "{name}" is no replica of this recipe; there is {", ".join(names)}')
    if keys_dir.exists() and any(keys_dir.iterdir()):
        raise ConfigError(f"{keys_dir} already holds keys; give --keys another folder")
    store = open_store(url)
    store.probe()
    secrets = {name: new_secret() for name in names}
    public = {name: Signer(name, secret).public_key for name, secret in secrets.items()}
    # Full replicas step in first: they read every payload anyway, so checking it costs them nothing.
    by_need = sorted(recipe.fleet(), key=lambda member: member.config.stages > 1)
    run = create_run(store, recipe, public, closers or [member.name for member in by_need])
    for name, secret in secrets.items():
        save_secret(keys_dir / f"{name}.key", secret)
    return run


def check_trainable(recipe: Recipe) -> None:
    if recipe.outer.method == "adamw":
        raise ConfigError('outer.method "adamw" averages every step; a fleet needs sparseloco or diloco')
    if recipe.subspace.grassmann_every:
        raise ConfigError("subspace.grassmann_every is for the simulator only; set 0")


def find_member(run: RunInfo, replica: str) -> Member:
    for member in run.recipe.fleet():
        if member.name == replica:
            return member
    names = ", ".join(member.name for member in run.recipe.fleet())
    raise ConfigError(f'there is no replica "{replica}" in this run; there is {names}')


def check_key(run: RunInfo, replica: str, key: Path) -> None:
    if load_signer(key, replica).public_key != run.keys.get(replica):
        raise ConfigError(f"{key} is not the key of replica {replica} in this run; copy the one `init` wrote")


def check_not_taken(ledger: Ledger, replica: str) -> None:
    """A name belongs to one machine at a time; by the store's clock, not by ours."""
    beat = ledger.heartbeat(replica)
    if beat is None or beat[0].get("state") in GONE:
        return
    age = ledger.store.now(f"members/{replica}/clock") - beat[1]
    if age < 5 * ledger.run.recipe.bucket.heartbeat_seconds:
        raise ConfigError(
            f"replica {replica} is live in this run (heartbeat {max(age, 0):.0f} s ago); stop it first, or "
            "join as another replica"
        )


def join_command(
    url: str, member: Member, key: Path, work: Path, threads: int, extra: Sequence[str]
) -> list[str]:
    command = [sys.executable, "-m", "isthmus.cli.main", "join", url, "--replica", member.name]
    return [
        *command,
        "--key",
        str(key),
        "--work",
        str(work),
        "--threads",
        str(threads),
        "--supervised",
        *extra,
    ]


class Machines:
    """All the machines of a fleet on this one: a launcher for each replica, started again when it dies."""

    def __init__(self, recipe: Recipe, url: str, folder: Path, extra: Sequence[str] = ()) -> None:
        self.recipe, self.url, self.folder, self.extra = recipe, url, folder, tuple(extra)
        self.processes: dict[str, subprocess.Popen] = {}
        self.restarts = 0
        workers = sum(member.config.stages for member in recipe.fleet())
        self.threads = max(1, (os.cpu_count() or 1) // workers)
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def start(self, member: Member) -> None:
        command = join_command(
            self.url,
            member,
            self.folder / "keys" / f"{member.name}.key",
            self.folder / "work" / member.name,
            self.threads,
            self.extra,
        )
        with open(self.folder / "logs" / f"{member.name}.log", "ab") as log:
            self.processes[member.name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start_all(self) -> None:
        for member in self.recipe.fleet():
            self.start(member)

    def tend(self) -> None:
        """Start again what died; a launcher that refuses its input is no fault to heal but one to report."""
        for member in self.recipe.fleet():
            process = self.processes[member.name]
            status = process.poll()
            if status == 2:
                raise ConfigError(self.last_line(member.name) or f"replica {member.name} could not start")
            if status not in (None, 0, 130):
                self.restarts += 1
                self.start(member)

    def all_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes.values())

    def last_line(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = (self.folder / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
            return lines[-1].removeprefix("isthmus: ") if lines else ""
        return ""

    def leave(self) -> None:
        for name in self.processes:
            (self.folder / "work" / name).mkdir(parents=True, exist_ok=True)
            (self.folder / "work" / name / "leave").touch()

    def stop(self, patience_seconds: float = 10.0) -> None:
        """End what is still running: politely, then not."""
        deadline = time.monotonic() + patience_seconds
        while not self.all_ended() and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def open_ledger(url: str) -> Ledger:
    store = open_store(url)
    return Ledger(store, read_run(store))
