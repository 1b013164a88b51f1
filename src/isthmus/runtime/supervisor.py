"""All the machines of a fleet on this one: a launcher for each, watched and started again."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.config import Member, Recipe
from isthmus.errors import ConfigError
from isthmus.runtime.launcher import STALL_SECONDS, ending
from isthmus.runtime.liveness import Watchdog, alive_stamp, launcher_alive_file
from isthmus.runtime.rendezvous import free_port

START_SECONDS = 30.0  # a launcher without a first beat: Python itself is starting
REFUSED_SECONDS = 180.0  # a launcher that was up and now refuses its input


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine runs: a whole replica, or one stage of it."""

    member: Member
    stage: int | None = None
    master: str = ""

    @property
    def name(self) -> str:
        return self.member.name if self.stage is None else f"{self.member.name}.{self.stage}"


class LocalSupervisor:
    """All the machines of a fleet on this one: a launcher for each, started again when it dies or stops.

    `extra` goes to every `isthmus join`. The replicas in `apart` have a launcher for every stage, as if each
    stage were on a machine of its own.
    """

    def __init__(
        self,
        recipe: Recipe,
        url: str,
        folder: Path,
        extra: Sequence[str] = (),
        *,
        apart: Collection[str] = (),
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.recipe, self.url, self.folder, self.extra = recipe, url, folder, tuple(extra)
        self.parts: list[Part] = []
        for member in recipe.fleet():
            if member.name in apart:
                master = f"127.0.0.1:{free_port('127.0.0.1')}"
                self.parts += [Part(member, stage, master) for stage in range(member.config.stages)]
            else:
                self.parts.append(Part(member))
        self.stall_seconds = stall_seconds
        self.processes: dict[str, subprocess.Popen] = {}
        self.restarts = 0
        self.leaving = False
        self.watch = Watchdog()
        self.refused: dict[str, tuple[float, float]] = {}  # part -> since when, and when last
        self.not_before: dict[str, float] = {}
        workers = sum(max(m.config.stages, m.config.processes) for m in recipe.fleet())
        self.threads = max(1, (os.cpu_count() or 1) // workers)
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def work(self, part: Part) -> Path:
        return self.folder / "work" / part.name

    def pulse(self, part: Part) -> Path:
        return self.work(part) / launcher_alive_file(part.stage)

    def was_up(self, part: Part) -> bool:
        """Its input was right once: a launcher takes its lock after it has checked everything."""
        return any(self.work(part).glob("launcher*.lock"))

    def command(self, part: Part) -> list[str]:
        options = {
            "--replica": part.member.name,
            "--key": self.folder / "keys" / f"{part.member.name}.key",
            "--work": self.work(part),
            "--threads": self.threads,
            "--supervised": os.getpid(),
        }
        if part.stage is not None:
            options |= {"--stage": part.stage, "--master": part.master}
        flat = [str(word) for pair in options.items() for word in pair]
        return [sys.executable, "-m", "isthmus.cli.main", "join", self.url, *flat, *self.extra]

    def log(self, part: Part) -> Path:
        return self.folder / "logs" / f"{part.name}.log"

    def start(self, part: Part) -> None:
        with open(self.log(part), "ab") as log:
            self.processes[part.name] = subprocess.Popen(
                self.command(part), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start_all(self) -> None:
        for part in self.parts:
            self.start(part)

    def tend(self) -> None:
        """Start again what died, kill and start again what does not stir.

        A launcher that refuses its input is no fault to heal but one to report; not, though, when it was up
        before, since then it may be the store that is away: it gets some minutes.
        """
        self.kill_silent()
        for part in self.parts:
            status, now = self.processes[part.name].poll(), time.monotonic()
            if status in (None, 0, 130) or self.leaving or now < self.not_before.get(part.name, 0.0):
                continue
            if status == 2:
                since, last = self.refused.get(part.name, (now, now))
                since = now if now - last > 60 else since  # it was up in between
                self.refused[part.name] = (since, now)
                if not self.was_up(part) or now - since > REFUSED_SECONDS:
                    raise ConfigError(self.last_line(part) or f"replica {part.name} could not start")
            if status > 0:  # not killed: the next start may end the same way
                self.not_before[part.name] = now + 5.0
            self.tell(part, f"its launcher ended ({ending(status)}); starting it again")
            self.restarts += 1
            self.start(part)

    def kill_silent(self) -> None:
        """A launcher that was stopped does not tend its workers, and would never end."""
        running = {part: self.processes[part.name] for part in self.parts if self._runs(part)}
        silent = self.watch.look({self.pulse(part): process.pid for part, process in running.items()})
        for part, process in running.items():
            seconds, beats = silent[self.pulse(part)], alive_stamp(self.pulse(part), process.pid)
            if seconds > (self.stall_seconds if beats else START_SECONDS):
                self.tell(part, f"its launcher has not stirred for {seconds:.0f} s; killing it")
                process.kill()
                process.wait()

    def tell(self, part: Part, text: str) -> None:
        with open(self.log(part), "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%H:%M:%S')} [{part.name}] {text}\n")

    def _runs(self, part: Part) -> bool:
        return self.processes[part.name].poll() is None

    def left(self, part: Part) -> bool:
        """It ended and is not to be started again; killed, it has not left."""
        status = self.processes[part.name].poll() if part.name in self.processes else None
        return status is not None and (self.leaving or status in (0, 130))

    def all_left(self) -> bool:
        return all(self.left(part) for part in self.parts)

    def all_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes.values())

    def last_line(self, part: Part) -> str:
        with contextlib.suppress(OSError):
            lines = self.log(part).read_text(errors="replace").splitlines()
            return lines[-1].removeprefix("isthmus: ") if lines else ""
        return ""

    def leave(self) -> None:
        """Everybody leaves at the round's edge; what dies from now on has left."""
        self.leaving = True
        for part in self.parts:
            self.work(part).mkdir(parents=True, exist_ok=True)
            (self.work(part) / "leave").touch()

    def finish(self, timeout_seconds: float = 60.0) -> None:
        """After the last round: who fell behind, or falls even now, still comes to its end."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self.all_left():
                return
            self.tend()
            time.sleep(0.2)

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End what is still running: politely, then not."""
        deadline = time.monotonic() + timeout_seconds
        while not self.all_ended() and time.monotonic() < deadline:
            self.kill_silent()
            time.sleep(0.1)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
