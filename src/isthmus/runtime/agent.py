"""The workers of one machine, which start together and restart together."""

import os
import signal
import sys
import threading
from pathlib import Path

from isthmus.errors import RunError
from isthmus.files import overwrite_own
from isthmus.printing import visible
from isthmus.reading import read_note
from isthmus.runtime.crashes import count_end, count_start, note_error
from isthmus.runtime.failure import Failure, Final
from isthmus.runtime.liveness import Watchdog
from isthmus.runtime.parting import AGAIN_STATUS, Parting, count_signals
from isthmus.runtime.process import NOTES, LauncherConfig, Log, lock_file
from isthmus.runtime.restarts import Restarts
from isthmus.runtime.waiting import LinkNote, WaitingNotes
from isthmus.runtime.workers import Workers

POLL_SECONDS = 0.25
FATAL, FATAL_BYTES = "fatal", 1 << 16  # a worker's note: a restart would not help
LAST_WORD_SECONDS = 2.0  # to report in the bucket that our worker has ended, before we end too


def run_agent(config: LauncherConfig, num_workers: int, log: Log, waiting: WaitingNotes | None = None) -> int:
    """Run this machine's workers until the replica has finished or left; then return 0.

    Ctrl-C leaves at the end of the round, a second one immediately. Any number of SIGTERMs counts as one
    Ctrl-C; with `config.grace_seconds` the replica leaves within that time and returns AGAIN_STATUS.
    `num_workers` counts all machines of the replica. A fault that cannot pass raises RunError when it occurs
    a second time.
    """
    work = Path(config.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    interrupts: list[int] = []
    waiting = waiting or WaitingNotes(work, None, 60.0)
    with lock_file(work / f"{config.launcher_name}.lock"):
        count_start(work)
        # The previous launcher's workers ended with it.
        waiting.ended("the next start: its launcher was started again")
        # A leave request survives a restart by the supervisor, but a person who types `join` wants to join.
        for note in ("fatal",) if config.parent else NOTES:
            (work / note).unlink(missing_ok=True)
        parting = Parting(work)
        if threading.current_thread() is threading.main_thread():
            count_signals(interrupts)
        restarts = Restarts(config, num_workers, log, waiting)
        agent = _AgentThread(config, num_workers, restarts)
        agent.start()
        _watch(agent, work, interrupts, parting, log)
        if agent.final:
            waiting.flush(LAST_WORD_SECONDS)
            raise agent.final
        count_end(work)
        if parting.stands():
            log("left for now: start the same command again, and it goes on from here")
            return AGAIN_STATUS
        (work / "leave").unlink(missing_ok=True)
        if not agent.finished:  # it took part in no round
            log("left")
        return 0


def _part(agent: "_AgentThread", interrupts: list[int], parting: Parting, log: Log) -> None:
    """Handle a scheduler that takes this machine back: workers save and stop; late ones are killed."""
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
    alive = True
    while alive:
        agent.join(POLL_SECONDS)
        alive = agent.is_alive()  # look once more after its end
        _say_links(agent, work)
        _part(agent, interrupts, parting, log)
        if len(interrupts) == 1 and not (work / "leave").exists():
            overwrite_own(work / "leave")
            log("leaving at the end of this round; once more (Ctrl-C) leaves now")
        if len(interrupts) > 1:
            log("leaving now")
            if agent.config.parent:  # all replicas of `train` end, and --resume continues the round
                agent.workers.kill()
            else:
                agent.end_workers("it was told to leave at once")
            os._exit(130)
        if (work / "leave").exists():
            agent.leave()
        workers = {work / f"alive-{rank}": (rank, pid) for rank, pid in agent.workers.pids().items()}
        for path, seconds in watchdog.look({path: pid for path, (_, pid) in workers.items()}).items():
            if seconds > stall_seconds:
                rank, _ = workers[path]
                log(
                    f"{agent.restarts.worker_name(rank)} has made no progress for {seconds:.0f} s; killing it"
                )
                watchdog.forget(path)
                agent.workers.processes[rank].kill()
        if (work / FATAL).exists():
            status, _, text = (read_note(work / FATAL, FATAL_BYTES) or "").partition(" ")
            note_error(work, text)
            agent.end_workers(text)
            print(f"isthmus: {visible(text)}", file=sys.stderr, flush=True)
            os._exit(2 if status == "2" else 1)


def _say_links(agent: "_AgentThread", work: Path) -> None:
    """Report the neighbour that our workers wait for, in the bucket and in the work folder."""
    stage = agent.config.stage
    found = None if stage is None else LinkNote(work, stage).read()
    if found and found != agent.awaited:
        neighbour, why = found
        agent.restarts.waiting.wait_for(f"stage {neighbour}: {why}", missing=[neighbour])
    elif agent.awaited and not found:
        agent.restarts.waiting.over()
    agent.awaited = found


class _AgentThread(threading.Thread):
    """Starts the workers until they have finished, in a separate thread: signals go to the main thread."""

    def __init__(self, config: LauncherConfig, num_workers: int, restarts: Restarts) -> None:
        super().__init__(daemon=True, name="agent")
        self.config, self.num_workers, self.restarts = config, num_workers, restarts
        ranks = range(num_workers) if config.stage is None else [config.stage]
        self.workers = Workers(config, ranks, num_workers)
        self.awaited: tuple[int, str] | None = None  # (neighbour that our workers wait for, why)
        self.finished = False
        self.final: RunError | None = None

    def run(self) -> None:
        try:
            while not self.finished:
                self.restarts.starting()
                self.workers.start()
                while not (ended := self.workers.wait(POLL_SECONDS)):
                    if self.awaited and self.restarts.leaving.is_set():
                        self.workers.kill()  # a stage without links has not begun anything
                        return
                failed = {rank: status for rank, status in ended.items() if status}
                self.workers.kill()  # the others would only wait for the failed ones
                if failed and (self.restarts.work / FATAL).exists():
                    return
                if failed:
                    self.restarts.ended(failed)
                self.finished = not failed
        except RunError as error:
            self.final = error
        except Exception as error:
            self.final = Final(f"replica {self.config.replica}: {Failure.of(error).text}")

    def leave(self) -> None:
        """End a wait for other stages or for the next start."""
        self.restarts.leaving.set()

    def end_workers(self, why: str) -> None:
        """Kill all workers as this launcher ends, and tell the closers so that they need not find out."""
        self.workers.kill()
        self.restarts.waiting.ended(why)
        self.restarts.waiting.flush(LAST_WORD_SECONDS)
