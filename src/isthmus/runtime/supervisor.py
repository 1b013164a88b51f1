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
from isthmus.errors import ConfigError
from isthmus.runtime.liveness import Watchdog, alive_stamp
from isthmus.runtime.process import LauncherConfig, describe_exit
from isthmus.runtime.rendezvous import free_port

START_SECONDS = 30.0  # for a launcher that has not written its alive file yet: Python itself is starting
REFUSED_SECONDS = 180.0  # for a launcher that was up and now refuses its input


class LocalLauncher:
    """One launcher on this machine: for a whole replica, or for one stage of it."""

    def __init__(
        self, member: Member, common: LauncherConfig, folder: Path, stage: int | None = None, master: str = ""
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
            master=master,
            parent=os.getpid(),
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.refused_since, self.refused_at = 0.0, float("-inf")
        self.not_before = 0.0

    @property
    def leads(self) -> bool:
        """Does the leader of its replica run here?"""
        return self.config.stage in (None, 0)

    def start(self) -> None:
        command = [sys.executable, "-m", "isthmus.runtime.launcher", self.config.to_json()]
        with open(self.log, "ab") as log:
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

    def was_up(self) -> bool:
        """Its input was right once: a launcher locks its folder after it has checked everything."""
        return any(self.work.glob("launcher*.lock"))

    def note(self, text: str) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%H:%M:%S')} [{self.name}] {text}\n")

    def last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return lines[-1].removeprefix("isthmus: ") if lines else ""
        return ""


class LocalSupervisor:
    """All launchers of a fleet, on this machine; a launcher that dies or hangs is started again.

    `common` is what their configs share. A replica in `apart` has a launcher for every stage, as if each
    stage were on a machine of its own.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, common: LauncherConfig, apart: Collection[str] = ()
    ) -> None:
        self.url, self.stall_seconds = common.url, common.stall_seconds
        self.restarts = 0
        self.leaving = False
        self.watchdog = Watchdog()
        self.num_workers = sum(max(m.config.stages, m.config.processes) for m in recipe.fleet())
        threads = common.num_threads or max(1, (os.cpu_count() or 1) // self.num_workers)
        common = replace(common, num_threads=threads)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.launchers: list[LocalLauncher] = []
        for member in recipe.fleet():
            if member.name in apart:
                master, stages = f"127.0.0.1:{free_port('127.0.0.1')}", range(member.config.stages)
                self.launchers += [LocalLauncher(member, common, folder, s, master) for s in stages]
            else:
                self.launchers.append(LocalLauncher(member, common, folder))

    def start_all(self) -> None:
        for launcher in self.launchers:
            launcher.start()

    def restart_dead(self) -> None:
        """Start again every launcher that died; kill those that hang, and start them again.

        A launcher that refuses its input raises ConfigError here, unless it was up before: then the store may
        be away, and it gets some minutes.
        """
        self.kill_hung()
        for launcher in self.launchers:
            status, now = launcher.status(), time.monotonic()
            if status in (None, 0, 130) or self.leaving or now < launcher.not_before:
                continue
            if status == 2:
                if now - launcher.refused_at > 60:  # it was up in between
                    launcher.refused_since = now
                launcher.refused_at = now
                if not launcher.was_up() or now - launcher.refused_since > REFUSED_SECONDS:
                    raise ConfigError(launcher.last_line() or f"replica {launcher.name} could not start")
            if status > 0:  # not killed: the next start may end the same way
                launcher.not_before = now + 5.0
            launcher.note(f"its launcher ended ({describe_exit(status)}); starting it again")
            self.restarts += 1
            launcher.start()

    def kill_hung(self) -> None:
        """A launcher that was stopped (SIGSTOP) does not watch its workers, and would never end."""
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
        """It ended and will not be started again. One that was killed has not left."""
        status = launcher.status()
        return status is not None and (self.leaving or status in (0, 130))

    def all_left(self) -> bool:
        return all(self.has_left(launcher) for launcher in self.launchers)

    def all_ended(self) -> bool:
        return all(launcher.process is None or launcher.status() is not None for launcher in self.launchers)

    def leave(self) -> None:
        """Ask all replicas to leave at the end of the round. From here on, an exit counts as leaving."""
        self.leaving = True
        for launcher in self.launchers:
            launcher.work.mkdir(parents=True, exist_ok=True)
            (launcher.work / "leave").touch()

    def finish(self, timeout_seconds: float = 60.0) -> None:
        """After the last round: wait for replicas that fell behind, and restart those that die even now."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self.all_left():
                return
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
