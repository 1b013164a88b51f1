"""A machine's worker processes, forked in 0.04 s from a server that has imported torch.

The server touches no device. It ends when the supervisor does, and its workers end with it. If forking is not
safe (on a Mac), each worker is a new process. Nothing but exit statuses, signals and one pipe to each worker
connects them with the supervisor.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Self

from isthmus.runtime.failure import Failure
from isthmus.runtime.process import History, JoinConfig

PRELOAD = [
    "isthmus.runtime.fork_server",  # first
    "torch",
    "isthmus.data.tokens",
    "isthmus.protocol.access",
    "isthmus.replica.evaluate",
    "isthmus.replica.full",
    "isthmus.replica.leader",
    "isthmus.replica.pipelined",
    "isthmus.runtime.held_out",
    "isthmus.runtime.rounds",
    "isthmus.runtime.stage_links",
    "isthmus.runtime.worker",
    "isthmus.store.objects",
]
FORKS = sys.platform == "linux"
LOST = 255  # multiprocessing's status for a worker whose server died, which takes its workers along


def prepare() -> None:
    """Start the fork server, which imports for seconds while we do other work. Call it in the main thread:
    the server ends with the thread that starts it."""
    if not FORKS:
        return
    # The server starts by `python -c`, which would put the working folder first in sys.path.
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ |= {
        "PYTHONSAFEPATH": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    try:
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the caller's script: multiprocessing would import it again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@dataclass(slots=True)
class Worker:
    """A running worker, from our side."""

    process: BaseProcess
    pipe: Connection
    heard_at: float
    failure: Failure | None = None

    @classmethod
    def start(cls, config: JoinConfig, history: History, place: Mapping[str, object], now: float) -> Self:
        """`place`: torchrun's variables."""
        from isthmus.runtime.worker import begin

        ours, theirs = Pipe()
        # Plain strings and our own pipe: multiprocessing pickles them, for our own process. The server has
        # the environment of its start, which may have changed.
        environment = dict(os.environ) | {name: str(value) for name, value in place.items()}
        told = config.to_json(), json.dumps(asdict(history)), environment, theirs
        fork, spawn = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        process = (fork if FORKS else spawn).Process(target=begin, args=told)
        with without_main():
            process.start()
        theirs.close()
        return cls(process, ours, now)

    def messages(self) -> Iterator[dict[str, Any]]:
        with suppress(EOFError, OSError):  # it has ended
            while self.pipe.poll():
                yield json.loads(self.pipe.recv_bytes())

    def tell(self, **order: Any) -> None:
        with suppress(OSError):
            self.pipe.send_bytes(json.dumps(order).encode())

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        found = self.process.exitcode
        return -signal.SIGKILL if found == LOST else found
