"""One machine's part of a fleet: check that it can take part, then run its workers.

`isthmus join` calls `launch`; `isthmus train` starts `python -m isthmus.runtime.launcher JSON` for each part.
"""

import os
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError, RunError
from isthmus.printing import guard_streams, visible
from isthmus.runtime.failure import PASSING_STATUS, told_in_one_line
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.process import LauncherConfig, die_with_parent, logger
from isthmus.runtime.versions import check_torch

if TYPE_CHECKING:
    from isthmus.config import Member, Recipe
    from isthmus.protocol.heartbeat import Heartbeat
    from isthmus.protocol.ledger import Ledger
    from isthmus.protocol.log_lines import LogLines


def launch(config: LauncherConfig) -> int:
    """Take part in a run until it ends or we leave; the exit status."""
    # c10d would print C++ stack traces whenever a neighbour goes away; our own line says which one it was.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if config.parent:  # before the long imports: a launcher that hangs in them is noticed too
        die_with_parent(config.parent)
        AliveFile(config.alive_file).start()
    check_torch()
    with told_in_one_line(f"replica {config.replica}: "):
        from isthmus.store.retry import StoreError

        try:
            return _launch(config)
        except StoreError as error:  # before any worker was started
            raise error.at_start() from None


def _launch(config: LauncherConfig) -> int:
    from isthmus.planner.room import check_disk, replica_room
    from isthmus.protocol.access import find_member, open_as, pin_warning
    from isthmus.runtime import agent
    from isthmus.runtime.checks import (
        check_corpus,
        check_not_taken,
        check_start,
        check_trainable,
        wait_until_free,
    )
    from isthmus.runtime.handshake import Credentials
    from isthmus.runtime.places import check_backend, find_master, find_places, secured_if_apart
    from isthmus.runtime.recent import Publisher, keep, recent_file
    from isthmus.runtime.waiting import WaitingNotes
    from isthmus.store.objects import open_store

    store = open_store(config.url, create=False)
    ledger, key = open_as(store, config.replica, config.key)
    run, member = ledger.run, find_member(ledger.run, config.replica)
    check_trainable(run.recipe)
    check_start(ledger)
    log, leads = logger(member.name), config.stage in (None, 0)
    for warning in (pin_warning(ledger.signer, key), check_device(config, run.recipe, member)):
        if warning:
            log(warning)
    credentials = Credentials(run.run_id, ledger.signer, key)
    places = find_places(config, member, credentials)
    config = secured_if_apart(config, places)
    check_backend(config, member)
    work = Path(config.work_dir or Path("work") / run.recipe.name / member.name).resolve()
    if leads:
        check_corpus(run, config.corpus)
        if config.grace_seconds:
            wait_until_free(ledger, member.name, work, log)
        elif not config.parent:
            check_not_taken(ledger, member.name, work)
    else:
        find_master(places.master, config.wait_seconds, credentials, config.stage or 0)
    room = replica_room(run.recipe, member, config.stage)
    if warning := check_disk(work, room, "its private state", begun=any(work.glob("*/state"))):
        log(warning)
    store.probe(f"members/{member.name}/probe")  # may this machine's credentials write at all?
    stages = member.config.stages
    log(f'joining "{run.recipe.name}" as {member.config.kind} replica of {stages} stage{"s" * (stages > 1)}')
    config = replace(config, key=str(key.resolve()), work_dir=str(work))
    work.mkdir(parents=True, exist_ok=True)
    log = logger(member.name, partial(keep, recent_file(work, config.launcher_name)))
    say = partial(_beat, ledger, key) if leads else None
    waiting = WaitingNotes(work, say, run.recipe.bucket.heartbeat_seconds)
    waiting.start()
    num_workers = max(stages, member.config.processes)
    here = range(num_workers) if config.stage is None else [config.stage]
    beat_seconds = run.recipe.bucket.heartbeat_seconds
    lines = Publisher(work, config.launcher_name, here, partial(_put_lines, ledger, key), beat_seconds)
    lines.start()
    try:
        return agent.run_agent(config, num_workers, places, log, waiting, credentials)
    except (ConfigError, RunError) as error:  # whoever called prints it
        keep(recent_file(work, config.launcher_name), f"{time.strftime('%H:%M:%S')} [{member.name}] {error}")
        raise
    finally:
        lines.finish()


def _put_lines(ledger: "Ledger", key: Path, lines: "LogLines") -> None:
    """With the key that the file has now, on a ledger of its own: another thread beats with the other."""
    from isthmus.protocol.ledger import Ledger
    from isthmus.protocol.log_lines import put_log
    from isthmus.protocol.trust import load_signer

    put_log(Ledger(ledger.store, ledger.run, load_signer(key, ledger.signer.replica)), lines)


def _beat(ledger: "Ledger", key: Path, heartbeat: "Heartbeat") -> None:
    """With the key that the file has now: a worker may have taken up another one."""
    from isthmus.protocol.trust import load_signer

    ledger.sign_as(load_signer(key, ledger.signer.replica))
    ledger.beat(heartbeat)


def check_device(config: LauncherConfig, recipe: "Recipe", member: "Member") -> str:
    """Before anything starts: a worker that cannot compile, or finds no room, would fail at its first step.

    A warning where the room may be too small, or nothing.
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
        # The supervisor has started us before, or will again: what can pass is waited out.
        return PASSING_STATUS if error.passes else 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
