"""The workers of one machine, forked in 0.04 s from a server that has imported torch.

The server touches no device. It ends when the launcher does, and its workers end with it. If forking is not
safe (on a Mac), each worker is a new process.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from isthmus.planner.rate import usable_cores
from isthmus.runtime.addresses import LOOPBACK, free_port
from isthmus.runtime.process import LauncherConfig

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
    """Start the server, which imports for seconds while the launcher does other work. Call it in the main
    thread: the server ends with the thread that starts it."""
    if FORKS:
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


class Workers:
    """The running workers, by rank."""

    def __init__(self, config: LauncherConfig, ranks: Sequence[int], num_workers: int) -> None:
        """`num_workers` counts the workers on all machines of the replica."""
        self.ranks, self.num_workers = ranks, num_workers
        if len(ranks) > 1 and not config.num_threads and not os.environ.get("OMP_NUM_THREADS"):
            config = replace(config, num_threads=max(1, usable_cores() // len(ranks)))
        self.config = config.to_json()
        fork, spawn = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
        self.context = fork if FORKS else spawn
        prepare()
        self.processes: dict[int, BaseProcess] = {}
        self.num_starts = 0

    def start(self) -> None:
        """Start the workers with torchrun's variables, as another launcher would."""
        from isthmus.runtime.worker import begin

        port = free_port() if len(self.ranks) > 1 else 0
        for local, rank in enumerate(self.ranks):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.num_workers),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(self.ranks)),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(self.num_starts),
            }
            # Plain strings: multiprocessing pickles them, for our own process.
            process = self.context.Process(target=begin, args=(self.config, environment))
            process.start()
            self.processes[rank] = process
        self.num_starts += 1

    def wait(self, seconds: float) -> dict[int, int]:
        """Wait until one ends. Return the statuses of all that failed; once all ended well, of all."""
        wait([each.sentinel for each in self.processes.values() if each.is_alive()], seconds)
        statuses = {rank: each.exitcode for rank, each in self.processes.items()}
        ended = {
            rank: -signal.SIGKILL if status == LOST else status
            for rank, status in statuses.items()
            if status is not None
        }
        failed = {rank: status for rank, status in ended.items() if status}
        return failed or (ended if len(ended) == len(self.processes) else {})

    def pids(self) -> dict[int, int]:
        """The process ids of the running workers."""
        return {r: each.pid for r, each in list(self.processes.items()) if each.pid and each.exitcode is None}

    def kill(self) -> None:
        """Kill the workers: their state is on disk, and a stopped worker would not react to SIGTERM."""
        for process in list(self.processes.values()):
            if process.exitcode is None:
                process.kill()
