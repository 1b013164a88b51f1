"""A whole fleet on this machine: a launcher process for each part, watched and restarted."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from isthmus.config import Member, Recipe
from isthmus.errors import ConfigError, RunError
from isthmus.files import open_own, overwrite_own
from isthmus.planner.rate import usable_cores
from isthmus.planner.room import fleet_room
from isthmus.printing import visible
from isthmus.reading import read_bytes, read_note, stat_regular
from isthmus.runtime import crashes, waiting
from isthmus.runtime.disk_watch import DiskWatch
from isthmus.runtime.failure import QUICK_SECONDS, Failure, Failures
from isthmus.runtime.liveness import Watchdog, alive_stamp
from isthmus.runtime.process import LauncherConfig, describe_exit

LAST_BYTES = 1 << 20  # at the end of a log, searched for its last line
START_SECONDS = 30.0  # for a launcher without an alive file yet, while Python starts
OURS = "isthmus: "  # starts the last line of a launcher that ended on purpose


class LocalLauncher:
    """One launcher on this machine: for a whole replica, or for one stage of it."""

    def __init__(
        self, member: Member, common: LauncherConfig, folder: Path, stage: int | None = None
    ) -> None:
        self.member = member
        self.name = member.name if stage is None else f"{member.name}.{stage}"
        self.work, self.log = folder / "work" / self.name, folder / "logs" / f"{self.name}.log"
        self.config = replace(
            common,
            replica=member.name,
            key=str(folder / "keys" / f"{member.name}.key"),
            work_dir=str(self.work),
            stage=stage,
            parent=os.getpid(),
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.failures = Failures()
        self.judged, self.lost = False, False  # its last end was judged; it will not be restarted
        self.started_at, self.not_before, self.log_from = 0.0, 0.0, 0
        self.waits_for, self.num_again = "", 0

    @property
    def leads(self) -> bool:
        """Whether it runs the leader of its replica."""
        return self.config.stage in (None, 0)

    def start(self) -> None:
        self.judged, self.waits_for, self.started_at = False, "", time.monotonic()
        if self.process is None:  # first start of this `train`; earlier crashes are counted already
            (self.work / crashes.NOTE).unlink(missing_ok=True)
        else:
            self.num_again += 1
        for note in self.work.glob("settled-*"):
            note.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "isthmus.runtime.launcher", self.config.to_json()]
        with open_own(self.log, append=True) as log:
            self.log_from = log.seek(0, os.SEEK_END)
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def status(self) -> int | None:
        """Its exit status; None while it runs, or before it was started."""
        return self.process.poll() if self.process else None

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def judge(self, status: int) -> None:
        """Set the time of the next start after this exit status, or raise if a restart is useless.

        A launcher reports a fault that cannot pass itself. One that crashed gets a second start.
        """
        last = self.last_line()
        ours, reason = last.startswith(OURS), last.removeprefix(OURS)
        if status == 2 or (status == 1 and ours):
            self.lost = True
            reason = reason or f"replica {self.name} could not start"
            raise ConfigError(reason) if status == 2 else RunError(reason)
        if any(self.work.glob("settled-*")):
            self.failures.progress()
        failure = Failure.of_exit(status)
        if final := self.failures.final([failure]):
            self.lost = True
            why = reason if status > 0 else final.text
            raise RunError(f"the launcher of replica {self.name} failed twice in the same way: {why}")
        if time.monotonic() - self.started_at > QUICK_SECONDS:
            self.failures.in_a_row = 1
        seconds = self.failures.pause_seconds()
        self.judged, self.not_before = True, time.monotonic() + seconds
        self.waits_for = reason if ours else ""
        soon = f" in {seconds:.0f} s" if seconds else ""
        self.note(f"its launcher ended ({describe_exit(status)}); starting it again{soon}")

    def waiting(self) -> str:
        """What it waits for, or ""."""
        if self.waits_for:
            return self.waits_for
        return read_note(self.work / waiting.NOTE) or ""

    def crashes(self) -> crashes.Crashes:
        """The crashes of its workers and of itself. A launcher that ends before its workers counts none."""
        found = crashes.Crashes.read(self.work)
        return replace(found, restarts=max(found.restarts, self.num_again))

    def note(self, text: str) -> None:
        with open_own(self.log, append=True) as log:
            log.write(f"{time.strftime('%H:%M:%S')} [{self.name}] {visible(text)}\n".encode())

    def last_line(self) -> str:
        """This start's last log line, preferably the reason for its end rather than a library's output."""
        with contextlib.suppress(OSError, ConfigError):
            start = max(self.log_from, stat_regular(self.log).st_size - LAST_BYTES)
            lines = read_bytes(self.log, LAST_BYTES, start=start).decode(errors="replace").splitlines()
            return next((line for line in reversed(lines) if line.startswith(OURS)), (lines or [""])[-1])
        return ""


class LocalSupervisor:
    """All launchers of a fleet on this machine; it restarts a launcher that dies or hangs.

    `common` is the shared part of their configs. A replica in `apart` has a launcher for every stage, as if
    each stage were on its own machine.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, common: LauncherConfig, apart: Collection[str] = ()
    ) -> None:
        self.url, self.stall_seconds = common.url, common.stall_seconds
        self.leaving = False
        self.told: dict[str, str] = {}  # launcher -> what it last waited for
        self.seen_restarts: dict[str, int] = {}  # launcher -> restarts reported so far
        here = "://" not in common.url
        self.disk = DiskWatch(folder, fleet_room(recipe, recipe.fleet(), here).round)
        self.watchdog = Watchdog()
        self.num_workers = sum(max(m.config.stages, m.config.processes) for m in recipe.fleet())
        threads = common.num_threads or max(1, usable_cores() // self.num_workers)
        common = replace(common, num_threads=threads)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.launchers: list[LocalLauncher] = []
        for member in recipe.fleet():
            if member.name in apart:
                stages = range(member.config.stages)
                self.launchers += [LocalLauncher(member, common, folder, stage) for stage in stages]
            else:
                self.launchers.append(LocalLauncher(member, common, folder))

    def start_all(self) -> None:
        for launcher in self.launchers:
            launcher.start()

    def restart_dead(self) -> None:
        """Restart every launcher that died; kill and restart those that hang.

        A fault that cannot pass raises ConfigError or RunError. One that can is waited out with growing
        pauses.
        """
        self.kill_hung()
        for launcher in self.launchers:
            status = launcher.status()
            if status in (None, 0, 130) or launcher.lost or self.leaving:
                continue
            if not launcher.judged:
                launcher.judge(status)
            if time.monotonic() >= launcher.not_before:
                launcher.start()

    def news(self) -> list[tuple[str, str]]:
        """(launcher, what it waits for) for launchers that started to wait, or wait for something else."""
        now = {launcher.name: text for launcher in self.launchers if (text := launcher.waiting())}
        before, self.told = self.told, now
        return [(name, text) for name, text in now.items() if before.get(name) != text]

    @property
    def restarts(self) -> int:
        """The restarts of workers and launchers since this `train` began."""
        return sum(launcher.crashes().restarts for launcher in self.launchers)

    def crash_news(self) -> list[str]:
        """Lines on the launchers restarted since the last look: how often and why."""
        said = []
        for launcher in self.launchers:
            found, before = launcher.crashes(), self.seen_restarts.get(launcher.name, 0)
            if found.restarts > before:
                self.seen_restarts[launcher.name] = found.restarts
                times = f" ({found.restarts} times so far)" if found.restarts > 1 else ""
                why = f": {found.error}" if found.error else ""
                said.append(f"{launcher.name} was started again{times}{why}")
        if words := self.disk.look():
            said.append(words)
        return said

    def kill_hung(self) -> None:
        """Kill stopped launchers (SIGSTOP), which do not watch their workers and would never end."""
        running = {
            launcher.config.alive_file: (launcher, launcher.process.pid)
            for launcher in self.launchers
            if launcher.process and launcher.status() is None
        }
        silent = self.watchdog.look({path: pid for path, (_, pid) in running.items()})
        for path, (launcher, pid) in running.items():
            if silent[path] > (self.stall_seconds if alive_stamp(path, pid) else START_SECONDS):
                launcher.note(f"its launcher has made no progress for {silent[path]:.0f} s; killing it")
                launcher.kill()

    def has_left(self, launcher: LocalLauncher) -> bool:
        """Whether it ended and will not be restarted. One that was killed has not left."""
        status = launcher.status()
        return status is not None and (self.leaving or launcher.lost or status in (0, 130))

    def all_left(self) -> bool:
        return all(self.has_left(launcher) for launcher in self.launchers)

    def all_ended(self) -> bool:
        return all(launcher.process is None or launcher.status() is not None for launcher in self.launchers)

    def leave(self) -> None:
        """Ask all replicas to leave at the end of the round. From then on, an exit counts as leaving."""
        self.leaving = True
        for launcher in self.launchers:
            launcher.work.mkdir(parents=True, exist_ok=True)
            overwrite_own(launcher.work / "leave")

    def finish(self, timeout_seconds: float = 60.0) -> None:
        """After the last round, wait for replicas that fell behind, and restart those that still die."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self.all_left():
                return
            with contextlib.suppress(ConfigError, RunError):  # the rounds are done, with or without it
                self.restart_dead()
            time.sleep(0.2)

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Wait for launchers that are ending, then kill what still runs."""
        deadline = time.monotonic() + timeout_seconds
        while not self.all_ended() and time.monotonic() < deadline:
            self.kill_hung()
            time.sleep(0.1)
        for launcher in self.launchers:
            launcher.kill()
