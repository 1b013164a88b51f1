"""The supervisor of a machine: it starts the workers of its replicas, and starts them again when they end.

`isthmus join` has one replica's workers, or one stage's; `isthmus train` has those of all replicas.
"""

import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from isthmus.errors import ConfigError, RunError
from isthmus.runtime.failure import Failure, Final
from isthmus.runtime.group import Group
from isthmus.runtime.process import JoinConfig, Log
from isthmus.runtime.workers import prepare

POLL_SECONDS = 0.25


class Supervisor:
    """Runs groups of workers until each has finished, left, or failed for good."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.leaving, self.stopping = False, False  # wishes of another thread
        self.thread: threading.Thread | None = None
        self.looked = time.monotonic()
        self.fault: RunError | None = None  # of our own

    @property
    def error(self) -> ConfigError | RunError | None:
        """Why a group cannot go on."""
        return self.fault or next((group.error for group in self.groups if group.error), None)

    @property
    def restarts(self) -> int:
        return sum(group.history.restarts for group in self.groups)

    def all_left(self) -> bool:
        return all(group.result is not None for group in self.groups)

    def all_ended(self) -> bool:
        return not any(group.workers for group in self.groups)

    def start(self) -> None:
        """Supervise in a thread of this process."""
        for group in self.groups:
            group.begin()
        self.thread = threading.Thread(target=self._loop, daemon=True, name="supervisor")
        self.thread.start()

    def _loop(self) -> None:
        try:
            while not self.stopping and not self.all_left():
                self.look()
        except Exception as error:
            self.fault = Final(f"the supervisor failed: {Failure.of(error).text}")
        for group in self.groups:
            group.stop()

    def leave(self) -> None:
        self.leaving = True

    def finish(self, timeout_seconds: float = 60.0) -> None:
        """After the last round, wait for replicas that fell behind."""
        deadline = time.monotonic() + timeout_seconds
        while not self.all_left() and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop(self) -> None:
        """End all workers now."""
        self.stopping = True
        if self.thread:
            self.thread.join()

    def look(self, seconds: float = POLL_SECONDS) -> None:
        """Wait for news for so long, and act on it."""
        running = [w for group in self.groups for w in group.workers.values() if w.status() is None]
        wait([handle for worker in running for handle in (worker.process.sentinel, worker.pipe)], seconds)
        now = time.monotonic()
        # If this process was stopped or slept, so perhaps were the others.
        asleep, self.looked = now - self.looked, now
        for group in self.groups:
            if self.leaving and not group.leaving:
                group.leave()
            group.look(now, asleep if asleep > 5 else 0.0)

    def run(self, log: Log) -> int:
        """Supervise one group in the main thread, and heed signals; return the exit status or raise.

        Ctrl-C leaves at the end of the round, a second one immediately. Any number of SIGTERMs counts as one
        Ctrl-C; with `grace_seconds` the replica parts within that time and the status is AGAIN_STATUS.
        """
        (group,), signals = self.groups, list[int]()
        if threading.current_thread() is threading.main_thread():
            count_signals(signals)
        group.begin()
        while group.result is None:
            self.look()
            grace = group.config.grace_seconds
            if grace and signal.SIGTERM in signals:
                if not group.parting.asked():
                    log(f"SIGTERM: saving, and leaving within {grace:g} s")
                    group.part(grace)
                signals.remove(signal.SIGTERM)
            if len(signals) > 1:
                log("leaving now")
                group.end(130, "it was told to leave at once")
            elif signals and not group.leaving:
                group.leave("; once more (Ctrl-C) leaves now")
        if group.error:
            raise group.error
        return group.result


def count_signals(signals: list[int]) -> None:
    """Record signals. SIGTERM counts once: Slurm sends it to every process, and a script may pass it on."""

    def count(number: int, frame: object) -> None:
        if number != signal.SIGTERM or signal.SIGTERM not in signals:
            signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, count)


def join(config: JoinConfig) -> int:
    """Take part in a run until it ends or we leave; return the exit status."""
    from isthmus.runtime.failure import told_in_one_line
    from isthmus.runtime.versions import check_torch

    check_torch()
    prepare()
    with told_in_one_line(f"replica {config.replica}: "):
        from isthmus.runtime.heartbeat import WaitingNotes
        from isthmus.runtime.preflight import Place

        place = Place.of(config)
        place.check()
        notes = None
        if config.leads:
            every = place.ledger.run.recipe.bucket.heartbeat_seconds
            notes = WaitingNotes(place.work, place.ledger.beat, every)
            notes.start()
        group = Group(place.config, place.member, place.log, notes)
        return Supervisor([group]).run(place.log)
