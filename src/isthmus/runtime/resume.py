"""A run of `isthmus train` that ended before its last round: may it be taken up again, and how its replicas
find each other when they are."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import IO, Self

from isthmus.config import dump_recipe
from isthmus.errors import ConfigError
from isthmus.protocol.access import check_key, open_ledger
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import load_signer
from isthmus.runlog import RunDir
from isthmus.runtime.create import check_corpus, check_not_taken, check_start, held
from isthmus.runtime.launcher import NOTES, hold
from isthmus.runtime.supervisor import LocalSupervisor, Part
from isthmus.simulator.run import REAL
from isthmus.store.retry import StoreError

TIMEOUT_SECONDS = 120.0  # so long a replica may take to start; then the others go on without it


def keys_of(run: RunDir) -> Path:
    return run.path / "keys"


def hold_run(run: RunDir) -> IO[str]:
    """The lock of who tends this run's replicas, as long as it lives."""
    path = run.path / "work" / "train.lock"
    try:
        return hold(path)
    except ConfigError:
        raise ConfigError(
            f"{run.path} still runs (process {path.read_text().strip() or 'unknown'}); Ctrl-C there ends it, "
            f"`isthmus status {run.path}` looks at it"
        ) from None


def check_resumable(run: RunDir) -> None:
    """By the run directory alone."""
    about, rounds = run.about, run.recipe.outer.rounds
    if about.get("mode") != REAL:
        hint = f"; go on with `isthmus simulate --resume {run.path}`" if run.state_path.exists() else ""
        raise ConfigError(f"{run.path} is no run of `isthmus train`{hint}")
    if about.get("status") == "finished":
        raise ConfigError(f"{run.path} is finished: all of its {rounds} rounds are done")


def checked_ledger(run: RunDir, machines: LocalSupervisor) -> Ledger:
    """The run's ledger, once bucket, keys and text are this run's and none of its replicas is alive."""
    try:
        ledger = open_ledger(machines.url)
    except ConfigError as error:
        raise ConfigError(f"{run.path} cannot be taken up: {error}") from None
    if dump_recipe(ledger.run.recipe) != dump_recipe(run.recipe):
        raise ConfigError(
            f"{run.recipe_path} is not the recipe that {machines.url} has of this run; put it back as it was"
        )
    check_start(ledger)
    check_corpus(ledger.run)
    for part in machines.parts:
        name, work = part.member.name, machines.work(part)
        check_key(ledger.run, name, keys_of(run) / f"{name}.key")
        if held(work):
            raise ConfigError(f"replica {part.name} of {run.path} still runs, in {work}; stop it first")
        if part.stage in (None, 0):
            check_not_taken(ledger, name, work)
    return ledger


class StartingHeartbeats(threading.Thread):
    """Heartbeats in the name of replicas that are still starting, by their own keys.

    Their last ones say that they left, or are as old as the kill: whoever is up first would take them for
    gone, and settle the open round without them. A replica that writes down its incarnation speaks for
    itself from then on; for one that left before it was up nobody does.
    """

    def __init__(self, ledger: Ledger, machines: LocalSupervisor, keys: Path) -> None:
        super().__init__(daemon=True, name="voice")
        self.machines, self.every = machines, ledger.run.recipe.bucket.heartbeat_seconds
        self.incarnation = os.urandom(8).hex()
        self.ended = threading.Event()
        self.starting: dict[Part, Ledger] = {}
        for part in machines.parts:
            if part.stage in (None, 0):
                name = part.member.name
                signer = load_signer(keys / f"{name}.key", name)
                self.starting[part] = Ledger(ledger.store, ledger.run, signer)

    def __enter__(self) -> Self:
        for part in self.machines.parts:
            work = self.machines.work(part)
            work.mkdir(parents=True, exist_ok=True)
            for note in NOTES:  # a wish to leave was of the last time
                (work / note).unlink(missing_ok=True)
        for part in self.starting:
            (self.machines.work(part) / "incarnation").write_text(self.incarnation)
        self.speak()
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self.join(timeout=10)

    def run(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.starting and time.monotonic() < deadline and not self.ended.wait(self.every):
            with contextlib.suppress(StoreError, OSError):  # the next one may pass
                self.speak()

    def speak(self) -> None:
        for part, ledger in list(self.starting.items()):
            up = (self.machines.work(part) / "incarnation").read_text() != self.incarnation
            if up or self.machines.left(part):
                del self.starting[part]
                continue
            config = part.member.config
            ledger.beat(
                {
                    "incarnation": self.incarnation,
                    "kind": config.kind,
                    "stages": config.stages,
                    "state": "starting",
                    "pid": os.getpid(),
                }
            )
