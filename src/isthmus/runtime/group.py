"""The workers of one replica on this machine, which start together and restart together."""

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from isthmus.errors import ConfigError, RunError
from isthmus.files import overwrite_own
from isthmus.planner.rate import usable_cores
from isthmus.printing import visible
from isthmus.runtime.addresses import LOOPBACK, free_port
from isthmus.runtime.failure import KILLED, QUICK_SECONDS, Failure, Failures, Final
from isthmus.runtime.leaving import AGAIN_STATUS, Parting
from isthmus.runtime.process import (
    History,
    JoinConfig,
    Log,
    describe_exit,
    last_incarnation,
    lock_file,
    sign_lock,
)
from isthmus.runtime.redact import one_line
from isthmus.runtime.workers import Worker

if TYPE_CHECKING:
    from isthmus.config import Member
    from isthmus.runtime.heartbeat import WaitingNotes

LAST_WORD_SECONDS = 2.0  # to say in the bucket that our worker has ended, before we end too


class Group:
    """The workers of one replica on this machine, which start together and restart together."""

    def __init__(
        self, config: JoinConfig, member: "Member", log: Log, notes: "WaitingNotes | None" = None
    ) -> None:
        """`notes` writes to the bucket; None if another machine of the replica does."""
        stage, self.member, self.log, self.notes = config.stage, member, log, notes
        self.name = member.name if stage is None else f"{member.name}.{stage}"
        self.num_workers = max(member.config.stages, member.config.processes)  # on all machines
        self.ranks = range(self.num_workers) if stage is None else [stage]
        self.restarted = "it" if len(self.ranks) == 1 else "the replica's stages"
        if len(self.ranks) > 1 and not config.num_threads and not os.environ.get("OMP_NUM_THREADS"):
            config = replace(config, num_threads=max(1, usable_cores() // len(self.ranks)))
        self.config, self.work = config, Path(config.work_dir)
        self.workers: dict[int, Worker] = {}
        self.failures, self.history = Failures(), History()
        self.incarnation = ""  # of the workers that run or ran last, once their leader has said it
        self.waits, self.missing = "", list[int]()  # what it waits for; neighbours to which it has no link
        self.leaving, self.parting = False, Parting()
        self.num_starts, self.started_at, self.not_before = 0, 0.0, 0.0
        self.result: int | None = None  # the exit status, once no worker will start again
        self.error: ConfigError | RunError | None = None
        self.lock: BinaryIO | None = None

    def begin(self) -> None:
        """Take the work folder and start. The workers of an earlier supervisor ended with it."""
        self.lock = lock_file(self.config.lock)
        earlier = last_incarnation(self.config.lock)
        if self.notes and earlier:
            self.notes.wait_for("the next start: its supervisor was started again", History(earlier))
        stages = self.member.config.stages
        self.log(f"joining as {self.member.config.kind} replica of {stages} stage{'s' * (stages > 1)}")
        self.start()

    def start(self) -> None:
        """Start the workers with torchrun's variables, as another launcher would."""
        port = free_port() if len(self.ranks) > 1 else 0
        self.started_at = time.monotonic()
        for local, rank in enumerate(self.ranks):
            place = {
                "RANK": rank,
                "WORLD_SIZE": self.num_workers,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": len(self.ranks),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": port,
                "TORCHELASTIC_RESTART_COUNT": self.num_starts,
            }
            self.workers[rank] = Worker.start(self.config, self.history, place, self.started_at)
        self.num_starts += 1
        if self.leaving:
            self._tell(leave=True)

    def look(self, now: float, asleep: float = 0.0) -> None:
        """Read the pipes, kill silent workers, and restart the group when one has ended."""
        if self.result is not None:
            return
        for rank, worker in self.workers.items():
            worker.heard_at += asleep
            self._read(worker, now)
            if worker.status() is None and (silent := now - worker.heard_at) > self.config.stall_seconds:
                self.log(f"{self.worker_name(rank)} has made no progress for {silent:.0f} s; killing it")
                worker.process.kill()
                worker.heard_at = now
        if self.parting.is_over():
            self.log("the time is over: ending as it is; the next start goes on from what was saved last")
            self.end(AGAIN_STATUS, "its next start: its machine was taken back")
        elif self.leaving and self.missing:  # a stage without links has not begun anything
            self.log("left")
            self.end(AGAIN_STATUS if self.parting.asked() else 0)
        elif statuses := self._ended():
            self._judge(statuses, now)
        if not self.workers and self.result is None and time.monotonic() >= self.not_before:
            self.start()

    def leave(self, hint: str = "") -> None:
        """Ask the workers to leave at the end of the round. It shortens a pause, so that they can."""
        self.leaving = True
        self.log(f"leaving at the end of this round{hint}")
        self._tell(leave=True)
        self.not_before = min(self.not_before, time.monotonic() + 2.0)

    def part(self, seconds: float) -> None:
        """The machine is taken back: workers save and stop; late ones are killed."""
        self.parting.begin(seconds)
        self.leaving = True
        self._tell(part=seconds)
        if not self.workers:
            self.end(AGAIN_STATUS)

    def end(self, result: int, why: str = "") -> None:
        """Kill the workers, and start none again. `why` goes to the bucket, so that closers need not find
        out that they have ended."""
        self.kill()
        self.result = result
        if why:
            self._say_ended(why)
        if self.notes:
            self.notes.flush(LAST_WORD_SECONDS)
        if result == AGAIN_STATUS and not self.error:
            self.log("left for now: start the same command again, and it goes on from here")

    def kill(self) -> None:
        """Kill the workers: their state is on disk, and a stopped worker would not react to SIGTERM."""
        for worker in self.workers.values():
            worker.process.kill()
        for worker in self.workers.values():
            worker.process.join()
            worker.pipe.close()
        self.workers.clear()

    def stop(self) -> None:
        """Kill the workers and free the work folder, which this process may take again."""
        self.kill()
        if self.lock:
            self.lock.close()

    def worker_name(self, rank: int) -> str:
        return "the worker" if self.num_workers == 1 else f"stage {rank}"

    # What workers say

    def _tell(self, **order: Any) -> None:
        for worker in self.workers.values():
            worker.tell(**order)

    def _read(self, worker: Worker, now: float) -> None:
        for message in worker.messages():
            worker.heard_at = now
            if "settled" in message:
                self.failures.progress()
            if "failure" in message:
                worker.failure = Failure(**message["failure"])
            if "incarnation" in message:
                self.incarnation = message["incarnation"]
                self.history = replace(self.history, incarnation=self.incarnation)
                if self.lock:
                    sign_lock(self.lock, self.incarnation)
                self._wait_over()
            if "waits" in message:
                self._heed_wait(message["waits"], message["missing"])

    def _heed_wait(self, what: str, missing: Sequence[int]) -> None:
        if not what:
            self._wait_over()
            return
        if missing and self.config.stage is None:  # the others are here and start too
            return
        self.waits, self.missing = what, list(missing)
        if self.notes and missing:
            self.notes.wait_for(what, self.history, missing)

    def _wait_over(self) -> None:
        self.waits, self.missing = "", []
        if self.notes:
            self.notes.over()

    # When workers end

    def _ended(self) -> dict[int, int]:
        """The statuses of all that failed; once all ended well, of all; else nothing."""
        found = {rank: worker.status() for rank, worker in self.workers.items()}
        ended = {rank: status for rank, status in found.items() if status is not None}
        failed = {rank: status for rank, status in ended.items() if status}
        return failed or (ended if len(ended) == len(found) else {})

    def _judge(self, statuses: dict[int, int], now: float) -> None:
        """Decide what follows the end of some workers (rank -> exit status), and end the others."""
        for worker in self.workers.values():
            worker.process.kill()  # the others would only wait for the failed ones
            worker.process.join()
            self._read(worker, now)  # one that failed first may have been ending still
        found = {rank: worker.failure for rank, worker in self.workers.items() if worker.failure}
        parted = self.parting.asked() and set(statuses.values()) <= {0, AGAIN_STATUS}
        if not parted:
            found |= {r: Failure.of_exit(s) for r, s in statuses.items() if s and r not in found}
        self.kill()
        if not found:
            self.end(AGAIN_STATUS if any(statuses.values()) else 0)
            return
        rank = min(found, key=lambda rank: _blame(found[rank]))
        failure = found[rank]
        how = describe_exit(statuses[rank]) if rank in statuses else failure.kind
        missing = [] if self.num_workers == 1 else [rank]
        self.history = replace(
            self.history, error=one_line(self._named(rank, failure)), error_unix=time.time()
        )
        self._say_ended(f"the next start: its worker ended ({how})", missing)
        if lasting := self._lasting(list(found.values())):
            self.error = lasting
            self.end(2 if isinstance(lasting, ConfigError) else 1, visible(str(lasting)))
        elif self.parting.asked():
            self.end(AGAIN_STATUS)
        else:
            self._restart_after(failure, f"{self.worker_name(rank)} ended ({how})", missing)

    def _lasting(self, found: Collection[Failure]) -> ConfigError | RunError | None:
        """The error that ends the group: a wrong input, or a fault that was repeated."""
        for failure in found:
            if failure.status:
                return ConfigError(failure.text) if failure.status == 2 else Final(failure.text)
        who, final = f"replica {self.config.replica}", self.failures.final(found)
        if final is None:
            return None
        if final.kind == KILLED:
            times = f"{self.failures.num_killed} times without a round"
            memory = "the kernel does that when memory runs out (dmesg tells)"
            return Final(f"{who} was ended {times}: {final.text}; {memory}")
        return Final(f"{who} failed twice in the same way: {final.text}{self._kept(final)}")

    def _restart_after(self, failure: Failure, what: str, missing: Sequence[int]) -> None:
        if time.monotonic() - self.started_at > QUICK_SECONDS:
            self.failures.in_a_row = 1
        seconds = self.failures.pause_seconds()
        self.history = replace(self.history, restarts=self.history.restarts + 1)
        self.not_before = time.monotonic() + (min(seconds, 2.0) if self.leaving else seconds)
        self.log(f"{what}; starting {self.restarted} again")
        if seconds:
            self.log(
                f"that was {self.failures.in_a_row} times in a row; the next start is in {seconds:.0f} s"
            )
            self.waits = failure.text.removeprefix(f"replica {self.config.replica}: ")
            if self.notes:
                self.notes.wait_for(self.waits, self.history, missing, seconds)

    def _named(self, rank: int, failure: Failure) -> str:
        """Why a worker ended, with its stage."""
        text = failure.text.removeprefix(f"replica {self.config.replica}: ")
        return text if self.num_workers == 1 else f"stage {rank}: {text.removeprefix(f'stage {rank} ')}"

    def _kept(self, final: Failure) -> str:
        """Save the traceback, if there is one, and say where."""
        with suppress(OSError, ConfigError):
            if final.trace:
                overwrite_own(self.work / "failed.txt", final.trace)
                return f"; more in {self.work / 'failed.txt'}"
        return ""

    def _say_ended(self, why: str, missing: Sequence[int] = ()) -> None:
        """Say in the bucket at once that no worker runs, if one had spoken there."""
        if self.notes and self.history.incarnation:
            self.notes.wait_for(why, self.history, missing)


def _blame(failure: Failure) -> tuple[bool, bool]:
    """A sort key; the smallest is the cause: a fault that cannot pass, then a kill, last a lost neighbour."""
    return failure.passes, failure.kind != KILLED
