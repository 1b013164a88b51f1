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

from isthmus.errors import ConfigError, RunError, Unreachable
from isthmus.printing import guard_streams, visible
from isthmus.runtime.failure import PASSING_STATUS, told_in_one_line
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.process import LauncherConfig, die_with_parent, logger
from isthmus.runtime.versions import check_torch

if TYPE_CHECKING:
    from isthmus.config import Member, Recipe
    from isthmus.protocol.heartbeat import Heartbeat
    from isthmus.protocol.ledger import Ledger
    from isthmus.runtime.handshake import Credentials


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
    from isthmus.protocol.access import find_member, open_as, pin_warning
    from isthmus.runtime import agent
    from isthmus.runtime.checks import check_corpus, check_not_taken, check_start, check_trainable
    from isthmus.runtime.handshake import Credentials
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
    host, port = find_address(config, member)
    credentials = Credentials(run.run_id, ledger.signer)
    work = Path(config.work_dir or Path("work") / run.recipe.name / member.name).resolve()
    if leads:
        check_corpus(run)
        if not config.parent:
            check_not_taken(ledger, member.name, work)
    else:
        find_master(host, port, config.wait_seconds, credentials, config.stage or 0)
    store.probe(f"members/{member.name}/probe")  # may this machine's credentials write at all?
    stages = member.config.stages
    log(f'joining "{run.recipe.name}" as {member.config.kind} replica of {stages} stage{"s" * (stages > 1)}')
    config = replace(config, key=str(key.resolve()), work_dir=str(work))
    say = partial(_beat, ledger, key) if leads else None
    waiting = WaitingNotes(work, say, run.recipe.bucket.heartbeat_seconds)
    waiting.start()
    num_workers = max(stages, member.config.processes)
    return agent.run_agent(config, num_workers, host, port, log, waiting, credentials)


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
    from isthmus.runtime.fits import check_fits, device_memory
    from isthmus.simulator.picks import pick_device

    device, warning = pick_device(config.device), ""
    if device.type == "cuda":
        if device.index is None and member.config.processes > torch.cuda.device_count():
            raise ConfigError(
                f"replica {member.name} has {member.config.processes} processes, one for each CUDA device, "
                f"and this machine has {torch.cuda.device_count()}; join on another machine"
            )
        warning = check_fits(recipe, [member], *device_memory(device), config.stage)
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


def find_address(config: LauncherConfig, member: "Member") -> tuple[str, int]:
    """Host and port where the launchers of this replica meet; port 0: there is only this one."""
    from isthmus.replica.process_groups import check_private

    stages = member.config.stages
    if config.stage is None:
        if config.master:
            raise ConfigError("--master is for stages on several machines; give --stage too, or drop it")
        return "127.0.0.1", 0
    if not 0 <= config.stage < stages:
        raise ConfigError(
            f"replica {member.name} has the stages 0 to {stages - 1}; there is no stage {config.stage}"
        )
    if not config.master:
        raise ConfigError(
            "--stage needs --master HOST:PORT: the address of stage 0, for example 10.0.0.2:29500"
        )
    host, colon, port = config.master.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f'--master is "{config.master}"; write HOST:PORT, for example 10.0.0.2:29500')
    return check_private(host.strip("[]"), config.trust_network), int(port)


def find_master(host: str, port: int, timeout_seconds: float, credentials: "Credentials", stage: int) -> None:
    """A later stage looks for stage 0 before it starts anything."""
    from isthmus.runtime.gate import knock

    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            knock(host, port, credentials, stage)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"replica {credentials.signer.replica}: no stage 0 at {host}:{port} within "
                    f"{timeout_seconds:g} s ({error.strerror or 'no answer'}); start it there, or correct "
                    "--master"
                ) from None
            time.sleep(0.5)


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
