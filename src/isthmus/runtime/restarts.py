"""Between two starts of a machine's workers: judge why they ended, log it, wait."""

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.files import overwrite_own
from isthmus.runtime.crashes import count_restart, note_error
from isthmus.runtime.failure import QUICK_SECONDS, Failure, Failures, Final, failure_note, settled_note
from isthmus.runtime.process import LauncherConfig, Log, describe_exit
from isthmus.runtime.waiting import LinkNote, WaitingNotes


class Restarts:
    """The workers of one launcher, from one start to the next."""

    def __init__(self, config: LauncherConfig, num_workers: int, log: Log, waiting: WaitingNotes) -> None:
        self.replica, self.log, self.waiting = config.replica, log, waiting
        self.work, self.num_workers = Path(config.work_dir), num_workers
        self.ranks = range(num_workers) if config.stage is None else [config.stage]
        self.failures = Failures()
        self.started_at = 0.0
        self.leaving = threading.Event()

    def starting(self) -> None:
        """Remove the notes of the previous workers."""
        self.started_at = time.monotonic()
        for rank in self.ranks:
            failure_note(self.work, rank).unlink(missing_ok=True)
            settled_note(self.work, rank).unlink(missing_ok=True)
            LinkNote(self.work, rank).over()

    def ended(self, statuses: dict[int, int]) -> None:
        """Some workers (rank -> exit status) have failed: wait until the next start, or raise Final."""
        how = ", ".join(sorted({describe_exit(status) for status in statuses.values()}))
        notes = {rank: failure_note(self.work, rank) for rank in self.ranks}
        found = {rank: Failure.of_exit(status, notes[rank]) for rank, status in statuses.items()}
        for rank in notes.keys() - found:  # a worker that failed first may still be ending; its note exists
            if noted := Failure.read(notes[rank]):
                found[rank] = noted
        rank = min(found, key=lambda rank: _blame(found[rank]))
        note_error(self.work, self.named(rank, found[rank]))
        self.waiting.ended(f"the next start: its worker ended ({how})", self.missing(rank))
        seconds = self.judge(found.values())
        count_restart(self.work)
        how = describe_exit(statuses[rank]) if rank in statuses else found[rank].kind
        restarted = "it" if len(self.ranks) == 1 else "the replica's stages"
        self.log(f"{self.worker_name(rank)} ended ({how}); starting {restarted} again")
        if seconds:
            self.log(
                f"that was {self.failures.in_a_row} times in a row; the next start is in {seconds:.0f} s"
            )
        self.pause(found[rank], seconds, self.missing(rank))

    def named(self, rank: int, failure: Failure) -> str:
        """Why a worker ended, with its stage."""
        text = failure.text.removeprefix(f"replica {self.replica}: ")
        return text if self.num_workers == 1 else f"stage {rank}: {text.removeprefix(f'stage {rank} ')}"

    def missing(self, rank: int) -> tuple[int, ...]:
        """The failed stage: the others were stopped with it and are healthy."""
        return () if self.num_workers == 1 else (rank,)

    def judge(self, found: Collection[Failure]) -> float:
        """Return the seconds until the next start; raise Final for a repeated fault that cannot pass."""
        for rank in self.ranks:
            if settled_note(self.work, rank).exists():
                self.failures.progress()
                settled_note(self.work, rank).unlink()  # it counts once, even if no worker starts now
        if final := self.failures.final(found):
            raise Final(
                f"replica {self.replica} failed twice in the same way: {final.text}{self._kept(final)}"
            )
        if time.monotonic() - self.started_at > QUICK_SECONDS:
            self.failures.in_a_row = 1
        return self.failures.pause_seconds()

    def _kept(self, final: Failure) -> str:
        """Save the traceback, if there is one, and say where."""
        with suppress(OSError, ConfigError):
            if final.trace:
                overwrite_own(self.work / "failed.txt", final.trace)
                return f"; more in {self.work / 'failed.txt'}"
        return ""

    def pause(self, failure: Failure, seconds: float, missing: tuple[int, ...] = ()) -> None:
        """Wait, and report what for. A request to leave ends the first wait; later ones are short."""
        if seconds:
            self.waiting.wait_for(failure.text.removeprefix(f"replica {self.replica}: "), seconds, missing)
            if self.leaving.is_set():
                time.sleep(min(seconds, 2.0))
            self.leaving.wait(seconds)

    def worker_name(self, rank: int) -> str:
        return "the worker" if self.num_workers == 1 else f"stage {rank}"


def _blame(failure: Failure) -> tuple[bool, bool]:
    """A sort key; the smallest is the cause: a fault that cannot pass, then a kill, last a lost neighbour."""
    return failure.passes, failure.kind != "killed"
