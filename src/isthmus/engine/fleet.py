"""Starting real fleets: create a run, join it from this machine, or run all of it here."""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isthmus.comm.digest import anchor_digest, shard_digest
from isthmus.comm.ledger import Ledger, RunInfo, create_run
from isthmus.comm.rendezvous import free_port
from isthmus.comm.store import open_store
from isthmus.comm.trust import Signer, new_secret, save_secret
from isthmus.config import Member, Recipe
from isthmus.data.corpus import open_corpus
from isthmus.engine.first import checked_first
from isthmus.engine.launcher import STALL_SECONDS, ending
from isthmus.engine.pulse import Watch, launcher_pulse, pulse_of
from isthmus.engine.start import checked_corpus
from isthmus.errors import ConfigError
from isthmus.planner.auto import resolve
from isthmus.traffic import shards

GONE = ("left", "finished")
START_SECONDS = 30.0  # a launcher without a first beat: Python itself is starting
REFUSED_SECONDS = 180.0  # a launcher that was up and now refuses its input


def create(
    recipe: Recipe,
    url: str,
    keys_dir: Path,
    closers: Sequence[str] | None = None,
    first: Mapping[str, Tensor] | None = None,
) -> RunInfo:
    """run.json in the bucket and one private key per replica on this disk.

    Where the recipe starts from a folder (`first`: its weights, read already), theta^(0) goes into the bucket
    and its digest into run.json: who joins needs no folder, and cannot start from other weights.
    """
    recipe, _ = resolve(recipe)  # everybody who joins must find the same k/d
    check_trainable(recipe)
    names = [member.name for member in recipe.fleet()]
    for name in closers or ():
        if name not in names:
            raise ConfigError(f'closer "{name}" is no replica of this recipe; there is {", ".join(names)}')
    if keys_dir.exists() and any(keys_dir.iterdir()):
        raise ConfigError(f"{keys_dir} already holds keys; give --keys another folder")
    try:
        text = open_corpus(recipe.data.corpus)
    except ConfigError:  # the text need not be where `init` runs
        text = None
    first = first or checked_first(recipe, text)
    store = open_store(url)
    store.probe()
    secrets = {name: new_secret() for name in names}
    public = {name: Signer(name, secret).public_key for name, secret in secrets.items()}
    # Full replicas step in first: they read every payload anyway, so checking it costs them nothing.
    by_need = sorted(recipe.fleet(), key=lambda member: member.config.stages > 1)
    closers = closers or [member.name for member in by_need]
    start = _digests(recipe, first) if first else []
    run = create_run(
        store, recipe, public, closers, text.sha256 if text else "", anchor_digest(start) if start else ""
    )
    for name, secret in secrets.items():
        save_secret(keys_dir / f"{name}.key", secret)
    if first:
        ledger = Ledger(store, run, Signer(closers[0], secrets[closers[0]]))
        held = _wide(recipe, first)
        files = [
            ledger.put_anchor_shard(0, i, {name: held[name] for name in names})
            for i, names in enumerate(ledger.shards)
        ]
        ledger.complete_anchor(0, run.start, files)
    return run


def _wide(recipe: Recipe, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As replicas hold their anchor."""
    wide = torch.float64 if recipe.inner.precision == "fp64" else torch.float32
    return {name: tensor.to(wide) for name, tensor in params.items()}


def _digests(recipe: Recipe, params: Mapping[str, Tensor]) -> list[str]:
    held = _wide(recipe, params)
    return [shard_digest(held, names) for names in shards(recipe)]


def check_start(ledger: Ledger) -> None:
    """A run that starts from a folder has theta^(0) in its bucket, unless its `init` was cut short."""
    if ledger.run.start and 0 not in ledger.anchor_rounds():
        raise ConfigError(
            "theta^(0) of this run is not in its bucket: its `isthmus init` was cut short; init again at "
            "another URL"
        )


def check_trainable(recipe: Recipe) -> None:
    if recipe.outer.method == "adamw":
        raise ConfigError('outer.method "adamw" averages every step; a fleet needs sparseloco or diloco')
    if recipe.subspace.grassmann_every:
        raise ConfigError("subspace.grassmann_every is for the simulator only; set 0")
    if recipe.model.start and not recipe.subspace.adaptation:
        raise ConfigError("model.start with subspace.adaptation = false is for the simulator only")


def check_corpus(run: RunInfo) -> None:
    """This machine's text is the run's: fit for the model, and the same as everybody's."""
    corpus = checked_corpus(run.recipe)
    if run.corpus and corpus.sha256 != run.corpus:
        raise ConfigError(
            f"the corpus {run.recipe.data.corpus} here is not the one this run began with; copy that one, or "
            "prepare it again from the same files with the same options"
        )


def check_not_taken(ledger: Ledger, replica: str, work: Path | None = None) -> None:
    """A name belongs to one machine at a time; by the store's clock, not by ours.

    After a crash the same command may be typed at once: the last heartbeat is then that of the incarnation
    that `work` remembers, and the lock there tells whether it still runs.
    """
    beat = ledger.heartbeat(replica)
    if beat is None or beat[0].get("state") in GONE:
        return
    with contextlib.suppress(OSError):
        if work and not held(work) and (work / "incarnation").read_text() == beat[0].get("incarnation"):
            return
    # Not under the replica's own clock, whose age tells its closer how long it was away.
    age = ledger.store.now(f"members/{replica}/probe/clock") - beat[1]
    if age < 5 * ledger.run.recipe.bucket.heartbeat_seconds:
        raise ConfigError(
            f"replica {replica} is live in this run (heartbeat {max(age, 0):.0f} s ago); stop it first, or "
            "join as another replica"
        )


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine runs: a whole replica, or one stage of it."""

    member: Member
    stage: int | None = None
    master: str = ""

    @property
    def name(self) -> str:
        return self.member.name if self.stage is None else f"{self.member.name}.{self.stage}"


class Machines:
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
        self.watch = Watch()
        self.refused: dict[str, tuple[float, float]] = {}  # part -> since when, and when last
        self.not_before: dict[str, float] = {}
        workers = sum(max(m.config.stages, m.config.processes) for m in recipe.fleet())
        self.threads = max(1, (os.cpu_count() or 1) // workers)
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def work(self, part: Part) -> Path:
        return self.folder / "work" / part.name

    def pulse(self, part: Part) -> Path:
        return self.work(part) / launcher_pulse(part.stage)

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
            seconds, beats = silent[self.pulse(part)], pulse_of(self.pulse(part), process.pid)
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

    def finish(self, patience_seconds: float = 60.0) -> None:
        """After the last round: who fell behind, or falls even now, still comes to its end."""
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            if self.all_left():
                return
            self.tend()
            time.sleep(0.2)

    def stop(self, patience_seconds: float = 10.0) -> None:
        """End what is still running: politely, then not."""
        deadline = time.monotonic() + patience_seconds
        while not self.all_ended() and time.monotonic() < deadline:
            self.kill_silent()
            time.sleep(0.1)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def held(work: Path) -> bool:
    """Does a launcher run in this folder?"""
    for path in work.glob("launcher*.lock"):
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
    return False
