"""Resume a run of `isthmus train` that ended before its last round: whether it may, and how its replicas find
each other."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Self

from isthmus.config import dump_recipe
from isthmus.errors import ConfigError
from isthmus.protocol.access import check_key, open_ledger
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.place import bucket_of
from isthmus.protocol.trust import load_signer
from isthmus.runlog import REAL, RunDir
from isthmus.runtime.group import Group
from isthmus.runtime.preflight import check_corpus, check_not_taken, check_start
from isthmus.runtime.process import is_running, lock_file, lock_owner
from isthmus.runtime.supervisor import Supervisor
from isthmus.store.retry import StoreError

TIMEOUT_SECONDS = 120.0  # a replica's time to start, after which the others continue without it


def keys_of(run: RunDir) -> Path:
    return run.path / "keys"


def lock_run(run: RunDir) -> BinaryIO:
    """Lock a run, so that only one process supervises its replicas."""
    path = run.path / "work" / "train.lock"
    try:
        return lock_file(path)
    except ConfigError:
        raise ConfigError(
            f"{run.path} still runs (process {lock_owner(path)}); Ctrl-C there ends it, "
            f"`isthmus status {run.path}` looks at it"
        ) from None


def check_resumable(run: RunDir) -> None:
    """Check, by the run directory alone, that the run can be resumed."""
    about, rounds = run.about, run.recipe.outer.rounds
    if about.get("mode") != REAL:
        hint = f"; go on with `isthmus simulate --resume {run.path}`" if run.state_path.exists() else ""
        raise ConfigError(f"{run.path} is not a run of `isthmus train`{hint}")
    if about.get("status") == "finished":
        words = f"`isthmus extend {run.path} --rounds N` adds some"
        raise ConfigError(f"{run.path} is finished: all of its {rounds} rounds are done; {words}")


def checked_ledger(run: RunDir, supervisor: Supervisor) -> Ledger:
    """The run's ledger, after checking that bucket, keys and text are this run's and no replica runs."""
    try:
        ledger = open_ledger(bucket_of(run))
    except ConfigError as error:
        raise ConfigError(f"{run.path} cannot be resumed: {error}") from None
    for name in dict.fromkeys(group.member.name for group in supervisor.groups):
        check_key(ledger.run, name, keys_of(run) / f"{name}.key")
    there = ledger.run.first or ledger.run  # others may have joined since, on their own machines
    if dump_recipe(replace(ledger.run.recipe, replicas=there.recipe.replicas)) != dump_recipe(run.recipe):
        raise ConfigError(
            f"{run.recipe_path} is not the recipe that {bucket_of(run)} has of this run; "
            "put it back as it was"
        )
    check_start(ledger)
    check_corpus(ledger.run)
    for group in supervisor.groups:
        if is_running(group.work):
            raise ConfigError(
                f"replica {group.name} of {run.path} still runs, in {group.work}; stop it first"
            )
        if group.config.leads:
            check_not_taken(ledger, group.member.name, group.config.lock)
    return ledger


class StartingHeartbeats(threading.Thread):
    """Heartbeats in the name of replicas that are still starting, signed with their own keys.

    Their last heartbeats say that they left, or are as old as the kill: the first replica to start would take
    the others for gone, and settle the open round without them. A worker that has told its incarnation sends
    its own heartbeats from then on. A replica that left before that gets none.
    """

    def __init__(
        self,
        ledger: Ledger,
        supervisor: Supervisor,
        keys: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(daemon=True, name="starting-heartbeats")
        self.supervisor, self.every = supervisor, ledger.run.recipe.bucket.heartbeat_seconds
        self.incarnation = "starting" + os.urandom(8).hex()
        self.clock, self.deadline = clock, clock() + TIMEOUT_SECONDS
        self.ended, self.num_beats = threading.Event(), 0
        self.starting: dict[Group, Ledger] = {}
        for group in supervisor.groups:
            if group.config.leads:
                name = group.member.name
                signer = load_signer(keys / f"{name}.key", name)
                self.starting[group] = Ledger(ledger.store, ledger.run, signer)

    def __enter__(self) -> Self:
        self.send()
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self.join(timeout=10)

    def run(self) -> None:
        while self.starting and self.clock() < self.deadline and not self.ended.wait(self.every):
            with contextlib.suppress(StoreError, OSError):  # the next one may succeed
                self.send()

    def send(self) -> None:
        self.num_beats += 1
        for group, ledger in list(self.starting.items()):
            if group.incarnation or group.result is not None:
                del self.starting[group]
                continue
            config = group.member.config
            ledger.beat(
                Heartbeat(
                    incarnation=self.incarnation,
                    beat=self.num_beats,
                    kind=config.kind,
                    stages=config.stages,
                    state="starting",
                    pid=os.getpid(),
                )
            )
