"""What each process of a fleet needs before it imports torch: its config, its parent, its log, its lock.

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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import ConfigError
from isthmus.files import open_own
from isthmus.printing import visible
from isthmus.reading import list_folder, open_regular, read_note

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """One machine's part of a replica: the options of `isthmus join`."""

    url: str
    replica: str
    key: str = ""  # default: keys/RUN/NAME.key
    work_dir: str = ""  # default: work/RUN/NAME
    log_file: str = ""  # where the workers write; default: our own stderr
    corpus: str = ""  # the run's text, if not where its recipe says
    device: str = "auto"
    num_threads: int = 0  # 0: torch's default
    compiled: bool | None = None  # None: on a GPU
    save_seconds: float = 60.0  # the most that state on disk lags, apart from the duration of a write
    stage: int | None = None  # None: all stages are on this machine
    advertise: str = ""  # HOST:PORT at which other machines reach this stage; "none": unreachable
    link_timeout_seconds: float = 60.0
    stall_seconds: float = 30.0  # without progress, after which a worker is killed
    relay: str = ""  # HOST:PORT of a relay for stages that cannot reach each other
    grace_seconds: float = 0.0  # from SIGTERM until the machine is taken; 0: SIGTERM acts as Ctrl-C
    scores: bool | None = None  # measure the held-out loss here; None: as the recipe says
    trust_network: bool = False  # links by gloo or NCCL, even between machines
    started: float = field(default_factory=time.time)  # wall clock; the log reports the duration

    @property
    def leads(self) -> bool:
        """Whether the replica's first process is here."""
        return self.stage in (None, 0)

    @property
    def lock(self) -> Path:
        name = "replica" if self.stage is None else f"stage-{self.stage}"
        return Path(self.work_dir) / f"{name}.lock"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "JoinConfig":
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class History:
    """What a worker's start knows of the starts before it."""

    incarnation: str = ""  # of the last one
    restarts: int = 0  # since the supervisor began
    error: str = ""  # why the last one failed, in one line
    error_unix: float = 0.0  # by this machine's clock


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux).

    The parent may have died before that call, so check afterwards whether it still runs.
    """
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if parent and os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name in `ps` and `top`: forked processes share a command line (Linux; 15 characters)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, name.encode()[:15] + b"\0")  # PR_SET_NAME


def logger(name: str, path: str = "") -> Log:
    """Write lines to a file or to stderr, with the time and a name."""

    def log(text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} [{name}] {visible(text)}\n"
        if path:
            with open_own(Path(path), append=True) as file:
                file.write(line.encode())
            return
        sys.stderr.write(line)  # a single write, since several processes share the file
        sys.stderr.flush()

    return log


def describe_exit(status: int) -> str:
    return f"status {status}" if status >= 0 else f"killed by signal {-status}"


def lock_file(path: Path) -> BinaryIO:
    """Lock a file until this process ends; ConfigError if another process has locked it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_own(path, append=True)  # open as long as the process lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = lock_owner(path)
        file.close()
        raise ConfigError(
            f"{path.parent} is in use by process {owner}; stop it first, or give another --work"
        ) from None
    sign_lock(file, last_incarnation(path))
    return file


def sign_lock(file: BinaryIO, incarnation: str) -> None:
    """Note the lock's owner, and the incarnation of its worker."""
    file.truncate(0)
    file.write(f"{os.getpid()} {incarnation}".encode())
    file.flush()


def lock_owner(path: Path) -> str:
    """The process that has locked a file, by its own note there."""
    pid = (read_note(path) or "").partition(" ")[0]
    return pid if pid.isdigit() and len(pid) < 20 else "unknown"


def last_incarnation(path: Path) -> str:
    """The last worker's incarnation, by the lock file of its work folder; "" if there was none."""
    incarnation = (read_note(path) or "").partition(" ")[2].strip()
    return incarnation if incarnation.isalnum() and len(incarnation) <= 64 else ""


def is_running(work: Path) -> bool:
    """Whether another process has locked this work folder."""
    for name in list_folder(work) if work.is_dir() else ():
        if not name.endswith(".lock"):
            continue
        with open_regular(work / name) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
    return False
