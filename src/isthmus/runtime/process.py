"""What every process of a fleet needs before torch is imported: its config, its parent, its log, its lock.

Standard library only.
"""

import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import ConfigError
from isthmus.files import open_own
from isthmus.printing import visible
from isthmus.reading import list_folder, open_regular, read_note

NOTES = ("leave", "fatal", "incarnation", "parting")  # in a work folder, between a launcher and its workers

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """One machine's part of a replica; a launcher hands it on to its workers."""

    url: str
    replica: str
    key: str = ""  # default: keys/RUN/NAME.key
    work_dir: str = ""  # default: work/RUN/NAME
    corpus: str = ""  # the run's text, if not where its recipe says
    device: str = "auto"
    num_threads: int = 0  # 0: as many as torch takes
    compiled: bool | None = None  # None: on a GPU
    save_seconds: float = 60.0  # state on disk is at most so old, and the time of a write older
    stage: int | None = None  # None: all stages are on this machine
    master: str = ""  # HOST:PORT of stage 0, where stages are on several machines
    wait_seconds: float = 60.0  # for the master
    link_timeout_seconds: float = 60.0
    stall_seconds: float = 30.0  # a worker that makes no progress for so long is killed
    relay: str = ""  # HOST:PORT of a relay through which stages meet, in place of the master
    grace_seconds: float = 0.0  # after SIGTERM, until the machine is taken; 0: SIGTERM is as Ctrl-C
    scores: bool | None = None  # measure the held-out loss here; None: as the recipe says
    trust_network: bool = False  # links by gloo or NCCL between machines, too
    secured: bool = False  # links are made over TLS; the launcher finds out
    handover: str = ""  # where the launcher hands connections over to its worker
    started: float = field(default_factory=time.time)  # by the wall clock; the log says how long it took
    parent: int = 0  # the process that starts this one, and restarts it; 0: a person does

    @property
    def launcher_name(self) -> str:
        """Of the launcher's own files in the work folder."""
        return "launcher" if self.stage is None else f"launcher-{self.stage}"

    @property
    def alive_file(self) -> Path:
        return Path(self.work_dir) / f"{self.launcher_name}.alive"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LauncherConfig":
        return cls(**json.loads(text))


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux).

    The parent may have died before the kernel was asked, so this looks whether it is still there.
    """
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if parent and os.getppid() != parent:
        os._exit(1)


def logger(name: str, kept: Callable[[str], None] = lambda line: None) -> Log:
    """To stderr; `kept` gets each line, too."""

    def log(text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} [{name}] {visible(text)}"
        sys.stderr.write(f"{line}\n")  # in one write: several processes share the file
        sys.stderr.flush()
        kept(line)

    return log


def describe_exit(status: int) -> str:
    return f"status {status}" if status >= 0 else f"killed by signal {-status}"


def lock_file(path: Path) -> BinaryIO:
    """Lock a file until this process ends; ConfigError when another process has locked it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_own(path, append=True)  # as long as the process lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = lock_owner(path)
        file.close()
        raise ConfigError(
            f"{path.parent} is in use by process {owner}; stop it first, or give another --work"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def lock_owner(path: Path) -> str:
    """The process that has locked a file, as it noted itself there."""
    pid = (read_note(path) or "").strip()
    return pid if pid.isdigit() and len(pid) < 20 else "unknown"


def is_running(work: Path) -> bool:
    """Does a launcher run in this folder?"""
    names = list_folder(work) if work.is_dir() else ()
    for name in names:
        if not (name.startswith("launcher") and name.endswith(".lock")):
            continue
        with open_regular(work / name) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
    return False
