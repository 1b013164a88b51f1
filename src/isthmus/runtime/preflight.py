"""Checks on a machine before it takes part in a run."""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from isthmus import gpu
from isthmus.config import Member, Recipe
from isthmus.config.model import NamedTensors
from isthmus.data.fingerprint import check_text
from isthmus.data.manifest import MANIFEST
from isthmus.errors import ConfigError
from isthmus.planner.room import check_disk, replica_room
from isthmus.protocol.access import find_member, open_as
from isthmus.protocol.heartbeat import silent_after
from isthmus.protocol.ledger import Ledger, RunInfo
from isthmus.replica.picks import as_picked, checked_corpus, pick_device, precision_note
from isthmus.runlog.words import duration
from isthmus.runtime.fits import check_fits, device_memory, told_parts
from isthmus.runtime.process import JoinConfig, Log, is_running, last_incarnation, logger
from isthmus.runtime.stage_links import check_links
from isthmus.store.objects import open_store
from isthmus.store.retry import StoreError
from isthmus.store.url import is_url


@dataclass(frozen=True, slots=True)
class Place:
    """A machine's part of a replica."""

    config: JoinConfig  # with the key's path and the work folder
    ledger: Ledger
    member: Member
    log: Log

    @classmethod
    def of(cls, config: JoinConfig) -> Self:
        """Find the run, the replica and its key; ConfigError if one is not there."""
        try:
            ledger, key = open_as(open_store(config.url, create=False), config.replica, config.key)
            run, member = ledger.run, find_member(ledger.run, config.replica)
            check_trainable(run.recipe)
            check_start(ledger)
        except StoreError as error:
            raise error.at_start() from None
        work = Path(config.work_dir or Path("work") / run.recipe.name / member.name).resolve()
        config = replace(config, key=str(key.resolve()), work_dir=str(work))
        return cls(config, ledger, member, logger(member.name))

    @classmethod
    def of_worker(cls, config: JoinConfig, rank: int, size: int, local_size: int) -> Self:
        """The part of one process of several that torchrun or the like has started."""
        if size > local_size:
            config = replace(config, stage=rank)
        place = cls.of(config)
        name, processes = config.replica, max(place.member.config.stages, place.member.config.processes)
        if size != processes:
            raise ConfigError(
                f"replica {name} has {processes} processes, and {size} were started; start {processes}, for "
                f"example by torchrun --nproc-per-node {processes}"
            )
        if config.stage is not None and place.member.config.kind == "full":
            raise ConfigError(
                f"the {size} processes of the full replica {name} share one machine; start all of them there"
            )
        return place

    @property
    def work(self) -> Path:
        return Path(self.config.work_dir)

    def check(self) -> None:
        """Check that this machine can take part; ConfigError, or a warning in the log."""
        config, ledger, member, log = self.config, self.ledger, self.member, self.log
        try:
            if warning := check_device(config, ledger.run.recipe, member):
                log(warning)
            check_links(config, member)
            if config.leads:
                check_corpus(ledger.run, config.corpus)
                if config.grace_seconds:
                    wait_until_free(ledger, member.name, config.lock, log)
                else:
                    check_not_taken(ledger, member.name, config.lock)
            room = replica_room(ledger.run.recipe, member, config.stage)
            begun = any(self.work.glob("*/state"))
            if warning := check_disk(self.work, room, "its private state", begun=begun):
                log(warning)
            ledger.store.probe(f"members/{member.name}/probe")  # do our credentials allow writing at all?
            if config.leads:
                log(time_left(ledger))
        except StoreError as error:
            raise error.at_start() from None


def check_trainable(recipe: Recipe) -> None:
    if isinstance(recipe.model, NamedTensors):
        raise ConfigError(
            "this run trains a model of its users' own programs: start yours with isthmus.OuterSync(model, "
            "key=...), docs/use.md"
        )
    if recipe.outer.method == "adamw":
        raise ConfigError('outer.method "adamw" averages every step; a fleet needs sparseloco or diloco')
    if recipe.subspace.grassmann_every:
        raise ConfigError("subspace.grassmann_every is for the simulator only; set 0")
    if recipe.model.start and not recipe.subspace.adaptation:
        raise ConfigError("model.start with subspace.adaptation = false is for the simulator only")


def check_start(ledger: Ledger) -> None:
    """Check that theta^(0) is there if the run starts from a folder: `init` may have been cut short."""
    if ledger.run.start and not ledger.has_anchor(0):
        raise ConfigError(
            "theta^(0) of this run is not in its bucket: its `isthmus init` was cut short; init again at "
            "another URL"
        )


def check_corpus(run: RunInfo, elsewhere: str = "") -> None:
    """Check that this machine's text fits the model and is the run's text. Fetch one at a URL."""
    spec = elsewhere or run.recipe.data.corpus
    known = f" of fingerprint {run.corpus}" if run.corpus else ""
    if not is_url(spec) and not spec.startswith("builtin:") and not Path(spec, MANIFEST).exists():
        raise ConfigError(
            f"there is no corpus in {spec} on this machine; this run's is the one{known}: copy its folder "
            "here, or give --corpus the folder or URL where it is"
        )
    corpus = checked_corpus(run.recipe, elsewhere)
    if run.corpus:
        check_text(corpus, spec, run.corpus)


class Taken(ConfigError):
    """Another start of this replica seems to be alive."""


def check_not_taken(ledger: Ledger, replica: str, lock: Path | None = None) -> None:
    """Check that no other machine uses this replica's name; ages are by the store's clock.

    After a crash the same command may be typed at once. Then the last heartbeat is that of the incarnation
    noted in the work folder's lock file, and the lock shows whether it still runs.
    """
    found = ledger.heartbeat(replica)
    if found is None or found[0].gone:
        return
    heartbeat, written_at = found
    if lock and not is_running(lock.parent) and last_incarnation(lock) == heartbeat.incarnation:
        return
    # Not the replica's own clock object: its age tells the closer how long the replica was away.
    age = ledger.store.now(f"members/{replica}/probe/clock") - written_at
    if age < silent_after(ledger.run.recipe, heartbeat):
        raise Taken(
            f"replica {replica} is live in this run (heartbeat {max(age, 0):.0f} s ago); stop it first, or "
            "join as another replica"
        )


LOOK_SECONDS, MOST_WAIT_SECONDS = 5.0, 900.0


def wait_until_free(
    ledger: Ledger,
    replica: str,
    lock: Path,
    log: Log,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the name is free, for jobs started by a scheduler: a job killed on another machine may still
    look alive, and no person is there to type the command again."""
    until, told = clock() + MOST_WAIT_SECONDS, False
    while True:
        try:
            return check_not_taken(ledger, replica, lock)
        except Taken as taken:
            if clock() >= until:
                raise
            if not told:
                log(f"{taken}. Waiting for it to fall silent: it may be the job before this one")
            told = True
        sleep(LOOK_SECONDS)


def check_device(config: JoinConfig, recipe: Recipe, member: Member) -> str:
    """Check the device early: a worker that cannot compile or lacks room would fail at its first step.

    Return a warning if the room may be too small, or "".
    """
    device, warning = pick_device(config.device), ""
    if device.type == "cuda":
        if device.index is None and member.config.processes > torch.cuda.device_count():
            raise ConfigError(
                f"replica {member.name} has {member.config.processes} processes, one for each CUDA device, "
                f"and this machine has {torch.cuda.device_count()}; join on another machine"
            )
        counted, room = as_picked(recipe, device), device_memory(device)
        warning = check_fits(counted, [member], *room, config.stage) or told_parts(counted, member, *room)
        warning = "; ".join(filter(None, [precision_note(recipe, device), warning]))
    if member.config.backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            f'replica {member.name} has backend "nccl", which needs a CUDA device on every stage'
        )
    if not config.compiled:
        return warning
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError("--compile needs a C++ compiler on a CPU; install g++, or leave --compile out")
    if device.type == "cuda" and not gpu.usable(device):
        raise ConfigError("--compile needs Triton on a GPU; install triton, or leave --compile out")
    return warning


def time_left(ledger: Ledger) -> str:
    """An estimate of the rest of the run, from its newest round."""
    last, rounds = ledger.last_round(), ledger.run.recipe.outer.rounds
    manifest = ledger.manifest(last) if last else None
    if manifest is None or not math.isfinite(manifest.seconds):
        return f"none of {rounds:,} rounds is settled yet; `isthmus plan` estimates how long they take"
    if last >= rounds:
        return f"all {rounds:,} rounds are settled"
    left = duration(manifest.seconds * (rounds - last))
    return f"rounds {last + 1:,} to {rounds:,}: about {left}, if each takes as long as round {last:,} did"
