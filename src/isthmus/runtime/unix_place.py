"""A stage's place on one machine: a Unix socket in a folder that only its owner may enter."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import ConfigError

BACKLOG = 16
MOST_PATH = 100  # characters of a socket's path; the kernel takes 107


@dataclass(frozen=True, slots=True)
class UnixPlace:
    """A socket in a folder of mode 0700."""

    folder: Path
    stage: int

    def __str__(self) -> str:
        return "this machine"

    def dial(self, seconds: float) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(seconds)
            with _ShortPath(self.folder) as folder:
                link.connect(f"{folder}/stage-{self.stage}")
        except BaseException:
            link.close()
            raise
        return link

    def listen(self) -> socket.socket:
        """Listen in place of any earlier start: the newest start holds the stage."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self.folder.stat()
        if mode.st_mode & 0o077 or mode.st_uid != os.geteuid():
            raise ConfigError(
                f"others can enter {self.folder}, where stages of this replica meet; chmod 700 it"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _ShortPath(self.folder) as folder:
            path = f"{folder}/stage-{self.stage}"
            fresh = f"{path}.{os.getpid()}"
            with suppress(FileNotFoundError):
                os.unlink(fresh)
            listener.bind(fresh)
            listener.listen(BACKLOG)
            os.replace(fresh, path)
        return listener


class _ShortPath:
    """A folder under a name that is short enough for a Unix socket."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.descriptor = folder, -1

    def __enter__(self) -> str:
        if len(str(self.folder)) <= MOST_PATH - len("/stage-99.1234567"):
            return str(self.folder)
        self.descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self.descriptor}"

    def __exit__(self, *fault: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
