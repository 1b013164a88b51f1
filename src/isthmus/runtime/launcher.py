"""One machine's part of a fleet: check that it can take part, then run its workers.

`isthmus join` calls `launch`; for each part, `isthmus train` starts
`python -P -m isthmus.runtime.launcher JSON`.
"""

import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError, RunError
from isthmus.printing import guard_streams, visible
from isthmus.runtime.failure import PASSING_STATUS, told_in_one_line
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.process import NOTES, LauncherConfig, Log, die_with_parent, lock_file, logger
from isthmus.runtime.versions import check_torch
from isthmus.runtime.workers import prepare

if TYPE_CHECKING:
    from isthmus.config import Member, Recipe
    from isthmus.protocol.ledger import Ledger


def launch(config: LauncherConfig) -> int:
    """Take part in a run until it ends or we leave; return the exit status."""
    _prepare_environment()
    if config.parent:  # before the long imports: a launcher may hang in them too
        die_with_parent(config.parent)
        AliveFile(config.alive_file).start()
    check_torch()
    if config.parent:  # `train` has checked most of this
        prepare()
    with _told(config):
        from isthmus.runtime import agent
        from isthmus.runtime.waiting import WaitingNotes

        place = _Place.of(config)
        place.check()
        say = place.ledger.beat if place.leads else None
        waiting = WaitingNotes(place.work, say, place.ledger.run.recipe.bucket.heartbeat_seconds)
        waiting.start()
        return agent.run_agent(place.config, place.num_workers, place.log, waiting)


def launch_worker(config: LauncherConfig) -> int:
    """Run as one worker, which torchrun or the like starts and restarts; return the exit status."""
    from isthmus.runtime.build import Assignment
    from isthmus.runtime.crashes import count_end, count_start
    from isthmus.runtime.worker import work

    _prepare_environment()
    check_torch()
    at = Assignment.from_environment()
    with _told(config):
        if at.size > at.local_size:
            config = replace(config, stage=at.rank)
        place = _Place.of(config)
        if at.size != place.num_workers:
            raise ConfigError(
                f"replica {config.replica} has {place.num_workers} processes, and {at.size} were started; "
                f"start {place.num_workers}, for example by torchrun --nproc-per-node {place.num_workers}"
            )
        if config.stage is not None and place.member.config.kind == "full":
            raise ConfigError(
                f"the {at.size} processes of the full replica {config.replica} share one machine; start all "
                "of them there"
            )
        if at.local_rank:
            return work(place.config, supervised=False)
        place.check()
        with lock_file(place.work / f"{config.launcher_name}.lock"):
            count_start(place.work)
            # The process that restarts us also sent SIGTERM to earlier workers, if one had failed.
            for note in NOTES[:2] + NOTES[3:]:
                (place.work / note).unlink(missing_ok=True)
            status = work(place.config, supervised=False)
            if status == 0:
                count_end(place.work)
            return status


def _prepare_environment() -> None:
    # c10d would print C++ stack traces whenever a neighbour goes away; our own line names it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["PYTHONSAFEPATH"] = "1"  # see isthmus.__main__, which `isthmus.train()` does not run


@contextmanager
def _told(config: LauncherConfig) -> Iterator[None]:
    """Report in one line any error that ends us before a worker has started."""
    with told_in_one_line(f"replica {config.replica}: "):
        from isthmus.store.retry import StoreError

        try:
            yield
        except StoreError as error:
            raise error.at_start() from None


@dataclass(frozen=True, slots=True)
class _Place:
    """A machine's part of a replica."""

    config: LauncherConfig  # with the key's path and the work folder
    ledger: "Ledger"
    member: "Member"
    log: Log

    @classmethod
    def of(cls, config: LauncherConfig) -> "_Place":
        from isthmus.protocol.access import find_member, open_as
        from isthmus.runtime.checks import check_start, check_trainable
        from isthmus.store.objects import open_store

        ledger, key = open_as(open_store(config.url, create=False), config.replica, config.key)
        run, member = ledger.run, find_member(ledger.run, config.replica)
        check_trainable(run.recipe)
        check_start(ledger)
        work = Path(config.work_dir or Path("work") / run.recipe.name / member.name).resolve()
        config = replace(config, key=str(key.resolve()), work_dir=str(work))
        return cls(config, ledger, member, logger(member.name))

    @property
    def work(self) -> Path:
        return Path(self.config.work_dir)

    @property
    def leads(self) -> bool:
        return self.config.stage in (None, 0)

    @property
    def num_workers(self) -> int:
        """The number of workers on all machines of the replica."""
        return max(self.member.config.stages, self.member.config.processes)

    def check(self) -> None:
        """Check that this machine can take part; ConfigError, or a warning in the log."""
        from isthmus.planner.room import check_disk, replica_room
        from isthmus.runtime.checks import check_corpus, check_not_taken, wait_until_free
        from isthmus.runtime.stage_links import check_links

        config, ledger, member, work, log = self.config, self.ledger, self.member, self.work, self.log
        run = ledger.run
        if warning := check_device(config, run.recipe, member):
            log(warning)
        check_links(config, member)
        if self.leads:
            check_corpus(run, config.corpus)
            if config.grace_seconds:
                wait_until_free(ledger, member.name, work, log)
            elif not config.parent:
                check_not_taken(ledger, member.name, work)
        room = replica_room(run.recipe, member, config.stage)
        if warning := check_disk(work, room, "its private state", begun=any(work.glob("*/state"))):
            log(warning)
        ledger.store.probe(f"members/{member.name}/probe")  # do our credentials allow writing at all?
        stages = member.config.stages
        many = f"{stages} stage{'s' * (stages > 1)}"
        log(f'joining "{run.recipe.name}" as {member.config.kind} replica of {many}')
        if self.leads and not config.parent:
            log(time_left(ledger))
        work.mkdir(parents=True, exist_ok=True)


def time_left(ledger: "Ledger") -> str:
    """An estimate of the rest of the run, from its newest round."""
    from isthmus.runlog.words import duration

    last, rounds = ledger.last_round(), ledger.run.recipe.outer.rounds
    manifest = ledger.manifest(last) if last else None
    if manifest is None or not math.isfinite(manifest.seconds):
        return f"none of {rounds:,} rounds is settled yet; `isthmus plan` estimates how long they take"
    if last >= rounds:
        return f"all {rounds:,} rounds are settled"
    left = duration(manifest.seconds * (rounds - last))
    return f"rounds {last + 1:,} to {rounds:,}: about {left}, if each takes as long as round {last:,} did"


def check_device(config: LauncherConfig, recipe: "Recipe", member: "Member") -> str:
    """Check the device early: a worker that cannot compile or lacks room would fail at its first step.

    Return a warning if the room may be too small, or "".
    """
    import torch

    from isthmus import gpu
    from isthmus.replica.picks import as_picked, pick_device, precision_note
    from isthmus.runtime.fits import check_fits, device_memory, told_parts

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


def main(argv: list[str]) -> int:
    guard_streams()
    try:
        return launch(LauncherConfig.from_json(argv[0]))
    except (ConfigError, RunError) as error:
        print(f"isthmus: {visible(error)}", file=sys.stderr)
        # The supervisor will restart us, so a fault that can pass is waited out.
        return PASSING_STATUS if error.passes else 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
