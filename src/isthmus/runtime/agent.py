"""The workers of one machine under torch's elastic agent: started together, and restarted together."""

import logging
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.files import overwrite_own
from isthmus.printing import visible
from isthmus.reading import read_note
from isthmus.runtime.crashes import count_end, count_restart, count_start, note_error
from isthmus.runtime.failure import Failure, Final
from isthmus.runtime.liveness import Watchdog
from isthmus.runtime.parting import AGAIN_STATUS, Parting, count_signals
from isthmus.runtime.parting import NOTE as PARTING
from isthmus.runtime.process import NOTES, LauncherConfig, Log, lock_file
from isthmus.runtime.restarts import Restarts
from isthmus.runtime.waiting import WaitingNotes

if TYPE_CHECKING:
    from isthmus.runtime.addresses import Places
    from isthmus.runtime.handshake import Credentials

MAX_RESTARTS = 1_000_000  # Failures decides when to stop, not torch
POLL_SECONDS = 0.25
FATAL_BYTES = 1 << 16
LAST_WORD_SECONDS = 2.0  # for the bucket to take it that our worker has ended, before we end too


def run_agent(
    config: LauncherConfig,
    num_workers: int,
    places: "Places",
    log: Log,
    waiting: WaitingNotes | None = None,
    credentials: "Credentials | None" = None,
) -> int:
    """Run this machine's workers until the replica has finished or left; then the status is 0.

    Ctrl-C leaves at the end of the round, a second one now. SIGTERM is one Ctrl-C, however often it comes;
    with `config.grace_seconds` it leaves within that time, and the status is AGAIN_STATUS.
    `num_workers` counts all machines of the replica. Where there are several, they meet at `places`, by their
    `credentials`. A fault that cannot pass ends it with a RunError, the second time that it comes.
    """
    work = Path(config.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    interrupts: list[int] = []
    waiting = waiting or WaitingNotes(work, None, 60.0)
    with lock_file(work / f"{config.launcher_name}.lock"):
        count_start(work)
        # The workers of the launcher before this one went with it.
        waiting.ended("the next start: its launcher was started again")
        # A request to leave outlives a restart by the supervisor. A person who types `join` wants to join.
        for note in ("fatal",) if config.parent else NOTES:
            (work / note).unlink(missing_ok=True)
        parting = Parting(work)
        if threading.current_thread() is threading.main_thread():
            count_signals(interrupts)
        restarts = Restarts(config, num_workers, log, waiting)
        last: tuple[Failure, float] | None = None
        while True:
            agent = _AgentThread(config, num_workers, places, credentials, restarts, last)
            agent.start()
            _watch(agent, work, interrupts, parting, log)
            leaving = (work / "leave").exists()
            if not agent.final and parting.stands():
                count_end(work)
                log("left for now: start the same command again, and it goes on from here")
                return AGAIN_STATUS
            if agent.finished or leaving:
                count_end(work)
                (work / "leave").unlink(missing_ok=True)
                if not agent.finished:  # it was not in any round
                    log("left")
                return 0
            if agent.final:
                waiting.flush(LAST_WORD_SECONDS)
                raise agent.final
            last = agent.failure, max(1.0, restarts.judge([agent.failure]))
            log(f"{agent.failure.text}; trying again in {last[1]:g} s")


def _part(agent: "_AgentThread", interrupts: list[int], parting: Parting, log: Log) -> None:
    """A scheduler takes this machine: the workers save and stop; those that do not in time are ended."""
    grace_seconds = agent.config.grace_seconds
    if grace_seconds and signal.SIGTERM in interrupts:
        interrupts.remove(signal.SIGTERM)
        if parting.by is None:
            parting.begin(grace_seconds)
            log(f"SIGTERM: saving, and leaving within {grace_seconds:g} s")
    if parting.by is not None:
        agent.leave()
    if parting.is_over():
        log("the time is over: ending as it is; the next start goes on from what was saved last")
        agent.end_workers("its next start: its machine was taken back")
        os._exit(AGAIN_STATUS)


def _watch(agent: "_AgentThread", work: Path, interrupts: list[int], parting: Parting, log: Log) -> None:
    """Until the agent ends: handle signals, kill workers that hang, exit on a worker's fatal error."""
    watchdog, stall_seconds = Watchdog(), agent.config.stall_seconds
    while agent.is_alive():
        agent.join(POLL_SECONDS)
        _part(agent, interrupts, parting, log)
        if len(interrupts) == 1 and not (work / "leave").exists():
            overwrite_own(work / "leave")
            log("leaving at the end of this round; once more (Ctrl-C) leaves now")
        if len(interrupts) > 1:
            log("leaving now")
            if agent.config.parent:  # all replicas of `train` end, and --resume takes the round up as it is
                agent.kill_workers()
            else:
                agent.end_workers("it was told to leave at once")
            os._exit(130)
        if (work / "leave").exists():
            agent.leave()
        workers = {work / f"alive-{rank}": (rank, pid) for rank, pid in agent.pids().items()}
        for path, seconds in watchdog.look({path: pid for path, (_, pid) in workers.items()}).items():
            if seconds > stall_seconds:
                rank, pid = workers[path]
                log(
                    f"{agent.restarts.worker_name(rank)} has made no progress for {seconds:.0f} s; killing it"
                )
                watchdog.forget(path)
                _kill(pid)
        if (work / "fatal").exists():
            status, _, text = (read_note(work / "fatal", FATAL_BYTES) or "").partition(" ")
            note_error(work, text)
            agent.end_workers(text)
            print(f"isthmus: {visible(text)}", file=sys.stderr, flush=True)
            os._exit(2 if status == "2" else 1)


class _AgentThread(threading.Thread):
    """The elastic agent in a thread of its own, since signals go to the main thread."""

    def __init__(
        self,
        config: LauncherConfig,
        num_workers: int,
        places: "Places",
        credentials: "Credentials | None",
        restarts: Restarts,
        last: tuple[Failure, float] | None = None,
    ) -> None:
        """`last`: why the agent before this one ended, and how long to wait before this one begins."""
        from isthmus.runtime.arrivals import Handover
        from isthmus.runtime.rendezvous import StageRendezvous

        super().__init__(daemon=True, name="agent")
        # All stages but the last have a gate, at which the next one comes.
        gated = config.secured and config.stage is not None and config.stage < num_workers - 1
        folder = Path(config.work_dir) / f"{config.launcher_name}.handover"
        handover = Handover(folder) if gated else None
        config = replace(config, handover=str(folder) if gated else "")
        self.config, self.num_workers, self.restarts = config, num_workers, restarts
        self.last = last
        num_machines = 1 if config.stage is None else num_workers
        self.rendezvous = StageRendezvous(
            config.replica,
            config.stage or 0,
            num_machines,
            places.master,
            credentials,
            log=restarts.log,
            waiting=restarts.waiting,
            own=places.own,
            handover=handover,
        )
        self.finished = False
        self.failure = Failure("stopped", f"replica {config.replica}: the elastic agent stopped", True)
        self.final: Final | None = None
        self.agent: Any = None

    def run(self) -> None:
        config = self.config
        if self.last:
            self.restarts.pause(*self.last)
            if self.restarts.leaving.is_set():
                self.rendezvous.shutdown()
                return
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we log restarts ourselves
        # The agent keeps a folder for every start of every worker; in the system's folder they would pile up.
        folder = Path(config.work_dir) / f"{config.launcher_name}.agent"
        try:
            from torch.distributed.elastic.agent.server.api import WorkerSpec
            from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            spec = WorkerSpec(
                role=config.replica,
                local_world_size=self.num_workers if config.stage is None else 1,
                entrypoint=sys.executable,
                args=("-m", "isthmus.runtime.worker", replace(config, parent=os.getpid()).to_json()),
                rdzv_handler=self.rendezvous,
                max_restarts=MAX_RESTARTS,
                monitor_interval=POLL_SECONDS,
            )
            self.agent = _stage_agent(spec, DefaultLogsSpecs(log_dir=str(folder)), self.restarts)
            result = self.agent.run()
            self.finished = result is not None and not result.is_failed()
        except Final as error:
            self.final = error
        except Exception as error:
            self.failure = Failure.of(error)
        finally:
            self.rendezvous.shutdown()
            shutil.rmtree(folder, ignore_errors=True)

    def leave(self) -> None:
        """A machine that waits, for the others or for its next start, need not wait to the end."""
        self.rendezvous.set_closed()
        self.restarts.leaving.set()

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

    def kill_workers(self) -> None:
        for pid in self.pids().values():
            _kill(pid)

    def end_workers(self, why: str) -> None:
        """This launcher ends: none of its workers runs from here on, and the others need not find out."""
        self.kill_workers()
        self.restarts.waiting.ended(why)
        self.restarts.waiting.flush(LAST_WORD_SECONDS)


def _stage_agent(spec: Any, logs: Any, restarts: Restarts) -> Any:
    """torch's agent, with a judgement before each restart, and SIGKILL in place of SIGTERM.

    The class is made here because importing torch takes seconds.
    """
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    base: Any = LocalElasticAgent  # its decorated methods have no types

    class StageAgent(base):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            restarts.starting()
            return super()._start_workers(worker_group)

        def _rendezvous(self, worker_group: Any) -> None:
            try:
                super()._rendezvous(worker_group)
            except (ValueError, KeyError, TypeError) as error:  # what torch read of another machine's
                raise RendezvousConnectionError(
                    f"replica {restarts.replica}: another machine left in the store what no launcher writes: "
                    f"{str(error)[:100]}"
                ) from None

        def _monitor_workers(self, worker_group: Any) -> Any:
            processes = {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            failed = {
                ranks[local]: process.returncode for local, process in processes.items() if process.poll()
            }
            if failed:
                for process in processes.values():  # the others only wait for it
                    if process.poll() is None:
                        process.kill()
                restarts.ended(failed)
            return super()._monitor_workers(worker_group)

        def _shutdown(self, *signal_and_timeout: Any, **named: Any) -> None:
            # Their state is on disk, and a worker that was stopped would not react to SIGTERM.
            super()._shutdown(signal.SIGKILL)

        def _exit_barrier(self) -> None:
            # A machine that is taken back has no time to wait for the others: their part is saved, too.
            if not (restarts.work / PARTING).exists():
                super()._exit_barrier()

        def _restart_workers(self, worker_group: Any) -> None:
            if worker_group.state == WorkerState.HEALTHY:
                count_restart(restarts.work)
                restarts.waiting.ended("another machine of this replica, which starts again")
                restarts.log("another machine of this replica starts again; starting our part again")
            super()._restart_workers(worker_group)

    return StageAgent(spec, logs, exit_barrier_timeout=30)


def _kill(pid: int) -> None:
    """Process ids are used again: kill it only if it is still a worker."""
    try:
        if pid > 0 and b"isthmus.runtime.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
