"""This machine's part of a replica: its stages under torch's elastic agent, started and restarted
together."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from isthmus.engine.worker import WorkerConfig

STALL_SECONDS = 30.0  # a worker that has not stirred for so long is stopped, and killed
ENDLESS = 1_000_000  # restarts: a machine that keeps failing is the operator's to judge
POLL_SECONDS = 0.25


def run_replica(
    config: WorkerConfig,
    *,
    num_stages: int,
    stage: int | None,
    host: str,
    port: int,
    log: Callable[[str], None],
    stall_seconds: float = STALL_SECONDS,
) -> int:
    """Run until the replica has finished or left; 0 then. Ctrl-C leaves at the round's edge, a second one
    now.

    `stage` None: all the stages (or the whole model) are on this machine.
    """
    work = Path(config.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    for note in ("leave", "fatal"):
        (work / note).unlink(missing_ok=True)
    interrupts: list[int] = []

    def interrupted(signum: int, frame: object) -> None:
        interrupts.append(signum)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupted)
    while True:
        agent = _AgentThread(config, num_stages, stage, host, port)
        agent.start()
        handled = 0
        while agent.is_alive():
            agent.join(POLL_SECONDS)
            if len(interrupts) > handled:
                handled = len(interrupts)
                if handled == 1:
                    (work / "leave").touch()
                    log("leaving at the end of this round; once more (Ctrl-C) leaves now")
                else:
                    log("leaving now")
                    kill_workers(work)
                    os._exit(130)
            kill_stalled(work, stall_seconds, log)
            if (work / "fatal").exists():
                status, _, text = (work / "fatal").read_text().partition(" ")
                kill_workers(work)
                print(f"isthmus: {text}", file=sys.stderr, flush=True)
                os._exit(int(status or 1))
        if agent.status is not None:
            return agent.status
        if interrupts:
            return 130
        log(f"{agent.error}; trying again in 2 s")
        time.sleep(2)


class _AgentThread(threading.Thread):
    """The elastic agent beside the main thread, which keeps the signals."""

    def __init__(
        self, config: WorkerConfig, num_stages: int, stage: int | None, host: str, port: int
    ) -> None:
        super().__init__(daemon=True, name="agent")
        self.config, self.num_stages, self.stage, self.host, self.port = config, num_stages, stage, host, port
        self.status: int | None = None
        self.error = "the elastic agent stopped"

    def run(self) -> None:
        from torch.distributed.elastic.agent.server import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        from isthmus.comm.rendezvous import StageRendezvous

        # Restarts are ours to tell, in our own words.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        here = self.num_stages if self.stage is None else 1
        machines = 1 if self.stage is None else self.num_stages
        meeting = StageRendezvous(self.config.replica, self.stage or 0, machines, self.host, self.port)
        spec = WorkerSpec(
            role=self.config.replica,
            local_world_size=here,
            entrypoint=sys.executable,
            args=("-m", "isthmus.engine.worker", self.config.to_json()),
            rdzv_handler=meeting,
            max_restarts=ENDLESS,
            monitor_interval=POLL_SECONDS,
        )
        try:
            agent = LocalElasticAgent(spec, DefaultLogsSpecs(), exit_barrier_timeout=30, shutdown_timeout=5)
            result = agent.run()
            if result is not None and not result.is_failed():
                self.status = 0
        except Exception as error:
            self.error = f"replica {self.config.replica}: {str(error).splitlines()[0]}"
        finally:
            meeting.shutdown()


def kill_stalled(work: Path, stall_seconds: float, log: Callable[[str], None]) -> None:
    """A worker that was stopped (SIGSTOP, a frozen device) is killed; the agent starts it anew."""
    for path in work.glob("alive-*"):
        try:
            age = time.time() - path.stat().st_mtime
            pid = int(path.read_text() or "0")
        except (OSError, ValueError):
            continue
        if age > stall_seconds and pid > 0:
            path.unlink(missing_ok=True)
            if is_worker(pid):
                log(f"worker {pid} has not stirred for {age:.0f} s; killing it")
                os.kill(pid, signal.SIGKILL)


def kill_workers(work: Path) -> None:
    for path in work.glob("alive-*"):
        try:
            pid = int(path.read_text() or "0")
            if pid > 0 and is_worker(pid):
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            continue


def is_worker(pid: int) -> bool:
    """Process ids are used again: only what is still a worker of ours may be killed."""
    try:
        return b"isthmus.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
