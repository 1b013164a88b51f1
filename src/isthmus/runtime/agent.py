"""The workers of one machine under torch's elastic agent: started together, and restarted together."""

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.runtime.liveness import Watchdog
from isthmus.runtime.process import NOTES, LauncherConfig, Log, describe_exit, lock_file

MAX_RESTARTS = 1_000_000  # whether to give up on a machine that keeps failing is for the operator to decide
POLL_SECONDS = 0.25
QUICK_SECONDS = 20.0  # a worker that ends sooner than this was not helped by the restart
LONGEST_PAUSE_SECONDS = 30.0


def run_agent(config: LauncherConfig, num_workers: int, host: str, port: int, log: Log) -> int:
    """Run this machine's workers until the replica has finished or left; then the status is 0.

    Ctrl-C leaves at the end of the round, a second one now. `num_workers` counts all machines of the replica.
    """
    work = Path(config.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    interrupts: list[int] = []
    with lock_file(work / f"{config.launcher_name}.lock"):
        # A request to leave outlives a restart by the supervisor. A person who types `join` wants to join.
        for note in ("fatal",) if config.parent else NOTES:
            (work / note).unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda signum, frame: interrupts.append(signum))
        while True:
            agent = _AgentThread(config, num_workers, host, port, log)
            agent.start()
            _watch(agent, work, interrupts, config.stall_seconds, log)
            leaving = (work / "leave").exists()
            if agent.finished or leaving:
                (work / "leave").unlink(missing_ok=True)
                if not agent.finished:  # it was not in any round
                    log("left")
                return 0
            log(f"{agent.error}; trying again in 2 s")
            time.sleep(2)


def _watch(agent: "_AgentThread", work: Path, interrupts: list[int], stall_seconds: float, log: Log) -> None:
    """Until the agent ends: handle Ctrl-C, kill workers that hang, exit on a worker's fatal error."""
    watchdog = Watchdog()
    while agent.is_alive():
        agent.join(POLL_SECONDS)
        if len(interrupts) == 1 and not (work / "leave").exists():
            (work / "leave").touch()
            log("leaving at the end of this round; once more (Ctrl-C) leaves now")
        if len(interrupts) > 1:
            log("leaving now")
            agent.kill_workers()
            os._exit(130)
        if (work / "leave").exists():
            agent.rendezvous.set_closed()  # a machine that waits for the others need not wait to the end
        workers = {work / f"alive-{rank}": (rank, pid) for rank, pid in agent.pids().items()}
        for path, seconds in watchdog.look({path: pid for path, (_, pid) in workers.items()}).items():
            if seconds > stall_seconds:
                rank, pid = workers[path]
                log(f"{agent.worker_name(rank)} has made no progress for {seconds:.0f} s; killing it")
                watchdog.forget(path)
                _kill(pid)
        if (work / "fatal").exists():
            status, _, text = (work / "fatal").read_text().partition(" ")
            agent.kill_workers()
            print(f"isthmus: {text}", file=sys.stderr, flush=True)
            os._exit(int(status or 1))


class _AgentThread(threading.Thread):
    """The elastic agent in a thread of its own, since signals go to the main thread."""

    def __init__(self, config: LauncherConfig, num_workers: int, host: str, port: int, log: Log) -> None:
        from isthmus.runtime.rendezvous import StageRendezvous

        super().__init__(daemon=True, name="agent")
        self.config, self.num_workers, self.log = config, num_workers, log
        num_machines = 1 if config.stage is None else num_workers
        self.rendezvous = StageRendezvous(
            config.replica, config.stage or 0, num_machines, host, port, log=log
        )
        self.finished = False
        self.error = f"replica {config.replica}: the elastic agent stopped"
        self.agent: Any = None

    def run(self) -> None:
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        config = self.config
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we log restarts ourselves
        spec = WorkerSpec(
            role=config.replica,
            local_world_size=self.num_workers if config.stage is None else 1,
            entrypoint=sys.executable,
            args=("-m", "isthmus.runtime.worker", replace(config, parent=os.getpid()).to_json()),
            rdzv_handler=self.rendezvous,
            max_restarts=MAX_RESTARTS,
            monitor_interval=POLL_SECONDS,
        )
        # The agent keeps a folder for every start of every worker; in the system's folder they would pile up.
        folder = Path(config.work_dir) / f"{config.launcher_name}.agent"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.agent = _stage_agent(spec, DefaultLogsSpecs(log_dir=str(folder)), self.worker_name, self.log)
            result = self.agent.run()
            self.finished = result is not None and not result.is_failed()
        except Exception as error:
            self.error = (str(error).splitlines() or [type(error).__name__])[0]
            if config.replica not in self.error:
                self.error = f"replica {config.replica}: {self.error}"
        finally:
            self.rendezvous.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

    def pids(self) -> dict[int, int]:
        """Rank -> process id of the workers that run here now."""
        context = getattr(self.agent, "_pcontext", None)
        if context is None:
            return {}
        ranks = {w.local_rank: w.global_rank for w in list(self.agent.get_worker_group().workers)}
        processes = {rank: handler.proc for rank, handler in list(context.subprocess_handlers.items())}
        return {
            ranks[local]: process.pid
            for local, process in processes.items()
            if local in ranks and process.returncode is None
        }

    def worker_name(self, rank: int) -> str:
        return "the worker" if self.num_workers == 1 else f"stage {rank}"

    def kill_workers(self) -> None:
        for pid in self.pids().values():
            _kill(pid)


def _stage_agent(spec: Any, logs: Any, worker_name: Callable[[int], str], log: Log) -> Any:
    """torch's agent, with one line in the log for each restart, and SIGKILL in place of SIGTERM.

    The class is made here because importing torch takes seconds.
    """
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    base: Any = LocalElasticAgent  # its decorated methods have no types

    class StageAgent(base):
        started_at, num_quick = 0.0, 0

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            self.started_at = time.monotonic()
            return super()._start_workers(worker_group)

        def _monitor_workers(self, worker_group: Any) -> Any:
            processes = {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}
            failed = {rank: proc.returncode for rank, proc in processes.items() if proc.poll()}
            if failed:
                local = min(failed)
                name = worker_name(worker_group.workers[local].global_rank)
                log(f"{name} ended ({describe_exit(failed[local])}); starting {restarted} again")
                for process in processes.values():  # the others only wait for it
                    if process.poll() is None:
                        process.kill()
                self._pause()
            return super()._monitor_workers(worker_group)

        def _pause(self) -> None:
            """Restart less and less often when workers fail right after each start."""
            quick = time.monotonic() - self.started_at < QUICK_SECONDS
            self.num_quick = self.num_quick + 1 if quick else 0
            if self.num_quick > 2:
                seconds = min(LONGEST_PAUSE_SECONDS, 2.0 ** (self.num_quick - 2))
                log(f"that was {self.num_quick} times in a row; the next start is in {seconds:.0f} s")
                time.sleep(seconds)

        def _shutdown(self, *signal_and_timeout: Any, **named: Any) -> None:
            # Their state is on disk, and a worker that was stopped would not react to SIGTERM.
            super()._shutdown(signal.SIGKILL)

        def _restart_workers(self, worker_group: Any) -> None:
            if worker_group.state == WorkerState.HEALTHY:
                log("another machine of this replica starts again; starting our part again")
            super()._restart_workers(worker_group)

    restarted = "it" if spec.local_world_size == 1 else "the replica's stages"
    return StageAgent(spec, logs, exit_barrier_timeout=30)


def _kill(pid: int) -> None:
    """Process ids are used again: kill it only if it is still a worker."""
    try:
        if pid > 0 and b"isthmus.runtime.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
