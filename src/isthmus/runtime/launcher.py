"""This machine's part of a replica: its stages under torch's elastic agent, started and restarted
together."""

import fcntl
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
from typing import IO, Any

from isthmus.errors import ConfigError
from isthmus.runtime.liveness import Watchdog
from isthmus.runtime.worker import WorkerConfig

STALL_SECONDS = 30.0  # a worker that has not stirred for so long is stopped, and killed
ENDLESS = 1_000_000  # restarts: a machine that keeps failing is the operator's to judge
POLL_SECONDS = 0.25
QUICK_SECONDS = 20.0  # a worker that ends sooner than this after its start was not helped by starting it
LONGEST_PAUSE_SECONDS = 30.0
NOTES = ("leave", "fatal", "incarnation")

Log = Callable[[str], None]


def run_replica(
    config: WorkerConfig,
    *,
    num_stages: int,
    stage: int | None,
    host: str,
    port: int,
    log: Log,
    stall_seconds: float = STALL_SECONDS,
    supervised: bool = False,
) -> int:
    """Run until the replica has finished or left; 0 then. Ctrl-C leaves at the round's edge, a second one
    now.

    `stage` None: all the stages (or the whole model) are on this machine. `supervised`: whoever started us
    starts us again when we die, and a wish to leave outlives that; typed by a person, `join` means join.
    """
    work = Path(config.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    lock = hold(work / f"{_own_name(stage)}.lock")
    for note in NOTES if not supervised else ("fatal",):
        (work / note).unlink(missing_ok=True)
    interrupts: list[int] = []

    def interrupted(signum: int, frame: object) -> None:
        interrupts.append(signum)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupted)
    config = replace(config, launcher=os.getpid())
    with lock:
        while True:
            agent = _AgentThread(config, num_stages, stage, host, port, log)
            agent.start()
            _tend(agent, work, interrupts, stall_seconds, log)
            if agent.status is not None:
                (work / "leave").unlink(missing_ok=True)
                return agent.status
            if (work / "leave").exists():  # it was not in any round
                (work / "leave").unlink(missing_ok=True)
                log("left")
                return 0
            log(f"{agent.error}; trying again in 2 s")
            time.sleep(2)


def _own_name(stage: int | None) -> str:
    return "launcher" if stage is None else f"launcher-{stage}"


def _tend(agent: "_AgentThread", work: Path, interrupts: list[int], stall_seconds: float, log: Log) -> None:
    """Until the agent ends: hear Ctrl-C, kill what does not stir, end when a worker says that all is lost."""
    watch = Watchdog()
    while agent.is_alive():
        agent.join(POLL_SECONDS)
        if interrupts and not (work / "leave").exists() and len(interrupts) == 1:
            (work / "leave").touch()
            log("leaving at the end of this round; once more (Ctrl-C) leaves now")
        if len(interrupts) > 1:
            log("leaving now")
            agent.kill_workers()
            os._exit(130)
        if (work / "leave").exists():
            agent.stop_meeting()
        pulses = {work / f"alive-{rank}": pid for rank, pid in agent.pids().items()}
        for path, seconds in watch.look(pulses).items():
            if seconds > stall_seconds:
                log(f"{agent.called(path)} has not stirred for {seconds:.0f} s; killing it")
                watch.seen.pop(path)
                _kill(pulses[path])
        if (work / "fatal").exists():
            status, _, text = (work / "fatal").read_text().partition(" ")
            agent.kill_workers()
            print(f"isthmus: {text}", file=sys.stderr, flush=True)
            os._exit(int(status or 1))


def hold(path: Path, timeout_seconds: float = 0.0) -> IO[str]:
    """This file's lock, which the kernel takes back when we die; ConfigError when another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+")  # noqa: SIM115 - held as long as the process lives
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise ConfigError(
                    f"{path.parent} is in use by process {holder}; stop it first, or give another --work"
                ) from None
            time.sleep(0.1)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


class _AgentThread(threading.Thread):
    """The elastic agent beside the main thread, which keeps the signals."""

    def __init__(
        self, config: WorkerConfig, num_stages: int, stage: int | None, host: str, port: int, log: Log
    ) -> None:
        super().__init__(daemon=True, name="agent")
        self.config, self.num_stages, self.stage, self.host, self.port = config, num_stages, stage, host, port
        self.log = log
        self.status: int | None = None
        self.error = f"replica {config.replica}: the elastic agent stopped"
        self.agent: Any = None
        self.meeting: Any = None

    def run(self) -> None:
        from torch.distributed.elastic.agent.server import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        from isthmus.runtime.rendezvous import StageRendezvous

        # Restarts are ours to tell, in our own words.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        here = self.num_stages if self.stage is None else 1
        machines = 1 if self.stage is None else self.num_stages
        meeting = StageRendezvous(
            self.config.replica, self.stage or 0, machines, self.host, self.port, log=self.log
        )
        self.meeting = meeting
        spec = WorkerSpec(
            role=self.config.replica,
            local_world_size=here,
            entrypoint=sys.executable,
            args=("-m", "isthmus.runtime.worker", self.config.to_json()),
            rdzv_handler=meeting,
            max_restarts=ENDLESS,
            monitor_interval=POLL_SECONDS,
        )
        # The agent keeps a folder for every start of every worker; they would pile up in the system's.
        aside = Path(self.config.work_dir) / f"{_own_name(self.stage)}.agent"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True, exist_ok=True)
        try:
            self.agent = _stage_agent(spec, DefaultLogsSpecs(log_dir=str(aside)), self.called_rank, self.log)
            result = self.agent.run()
            if result is not None and not result.is_failed():
                self.status = 0
        except Exception as error:
            self.error = (str(error).splitlines() or [type(error).__name__])[0]
            if self.config.replica not in self.error:
                self.error = f"replica {self.config.replica}: {self.error}"
        finally:
            meeting.shutdown()
            shutil.rmtree(aside, ignore_errors=True)

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

    def called_rank(self, rank: int) -> str:
        return "the worker" if self.num_stages == 1 else f"stage {rank}"

    def called(self, pulse: Path) -> str:
        return self.called_rank(int(pulse.name.removeprefix("alive-")))

    def kill_workers(self) -> None:
        for pid in self.pids().values():
            _kill(pid)

    def stop_meeting(self) -> None:
        """Who leaves while it waits for the other machines need not wait to the end."""
        if self.meeting is not None:
            self.meeting.set_closed()


def _stage_agent(spec: Any, logs: Any, called: Callable[[int], str], log: Log) -> Any:
    """torch's agent, which tells what it does in one line and does not nurse processes that can be killed.

    Made here because importing torch takes seconds, which `isthmus --help` does not have.
    """
    from torch.distributed.elastic.agent.server import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class StageAgent(LocalElasticAgent):
        started, quick = 0.0, 0

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            self.started = time.monotonic()
            return super()._start_workers(worker_group)

        def _monitor_workers(self, worker_group: Any) -> Any:
            processes = {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}
            fallen = {rank: proc.returncode for rank, proc in processes.items() if proc.poll()}
            if fallen:
                local = min(fallen)
                place = called(worker_group.workers[local].global_rank)
                log(f"{place} ended ({ending(fallen[local])}); starting {whom} again")
                for process in processes.values():
                    # The others only wait for it. Their state is on the disk, and a stopped one would not
                    # hear the SIGTERM that torch sends: no reason to ask nicely, and to wait 30 s.
                    if process.poll() is None:
                        process.kill()
                self._pause()
            return super()._monitor_workers(worker_group)

        def _pause(self) -> None:
            """A start that fails at once, again and again, is tried less and less often."""
            self.quick = self.quick + 1 if time.monotonic() - self.started < QUICK_SECONDS else 0
            if self.quick > 2:
                seconds = min(LONGEST_PAUSE_SECONDS, 2.0 ** (self.quick - 2))
                log(f"that was {self.quick} times in a row; the next start is in {seconds:.0f} s")
                time.sleep(seconds)

        def _stop_workers(self, worker_group: Any) -> None:
            self._shutdown(signal.SIGKILL, timeout=5)

        def _restart_workers(self, worker_group: Any) -> None:
            if worker_group.state == WorkerState.HEALTHY:
                log("another machine of this replica calls; starting our part again")
            super()._restart_workers(worker_group)

    whom = "it" if spec.local_world_size == 1 else "the replica's stages"
    return StageAgent(spec, logs, exit_barrier_timeout=30, shutdown_timeout=5)


def ending(status: int) -> str:
    return f"status {status}" if status >= 0 else f"killed by signal {-status}"


def _kill(pid: int) -> None:
    """Process ids are used again: only what is still a worker may be killed."""
    try:
        if pid > 0 and b"isthmus.runtime.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
