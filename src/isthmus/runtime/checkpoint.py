"""The state that one process of a replica restores after a kill: a checkpoint at any inner step.

It holds the anchor of the open round, the optimiser's moments, the error feedback and, inside a round, the
weights and the losses so far. Everything after it is repeated; for settled rounds the bucket has the
manifest. All processes of a replica agree on when to save, so the newest checkpoint that all have is recent.

It keeps two: the newest at the edge of a round (before its first inner step, or with its update in transit)
and the newest inside a round. It copies both to host memory at once, and a thread writes them. Each file
carries its hash (model/checkpoint.py).
"""

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.disk import is_full, shortage
from isthmus.errors import ConfigError, RunError
from isthmus.files import replace_file
from isthmus.model import checkpoint
from isthmus.reading import read_note
from isthmus.replica.control_group import ControlGroup, all_true, share_json, whole_numbers
from isthmus.runtime.outer_step import Files

LEAST_SECONDS = 5.0  # between two; a kill may cost this much work plus a start
SHARE = 10  # the pause, in multiples of the last write's duration
EDGE, INSIDE = "edge", "inside"  # folders
PARAMS, PLACE = "params", "place"  # files next to those of the state
STARTS, MOST_STARTS = "starts", 256
ASIDE = "state-diverged-"  # followed by a time stamp


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a checkpoint: the open round, and how many of its inner steps are done."""

    round: int
    losses: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  # one per step
    step_count: int = 0  # the optimiser's inner steps
    fresh_steps: int = 0  # inner steps among them that no update of ours has carried yet
    carried: bool = False  # the feedback is c = beta e + Delta of the whole round, whose update is in transit
    processes: int = 1  # of the replica
    told: Mapping[str, float] = field(default_factory=dict)  # the facts of the round's commit

    @property
    def num_steps(self) -> int:
        return len(self.losses)

    def number(self, inner_steps: int) -> int:
        """A number that grows with the position."""
        return (self.round - 1) * (inner_steps + 1) + self.num_steps

    def to_tensors(self) -> dict[str, Tensor]:
        counts = [self.round, self.step_count, self.fresh_steps, self.carried, self.processes]
        told = {f"told-{key}": torch.tensor(value, dtype=torch.float64) for key, value in self.told.items()}
        return {"counts": torch.tensor(counts), "losses": self.losses, **told}

    @classmethod
    def from_tensors(cls, named: Mapping[str, Tensor]) -> "Place":
        """Parse a position; ConfigError if the tensors are not one."""
        try:
            number, step_count, fresh, carried, processes = map(int, named["counts"])
            losses = named["losses"]
            if number < 1 or losses.dtype != torch.float64 or losses.dim() != 1:
                raise ValueError("its numbers are out of range")
            told = {key[5:]: float(value) for key, value in named.items() if key.startswith("told-")}
            return cls(number, losses, step_count, fresh, bool(carried), processes, told)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"it does not say where it stands ({error})") from None


def put_aside(work: Path, log: Callable[[str], None]) -> None:
    """Rename the states below a work folder, so that the next start joins from the bucket.

    No state is deleted by the rename, so it can be restored by hand. The oldest renamed state and the newest
    two are kept; the others are deleted.
    """
    for state in sorted(work.glob("*/state")):
        aside = state.with_name(f"{ASIDE}{time.time_ns()}")
        with suppress(OSError):  # another stage renamed it first
            state.rename(aside)
            log(f"its private state is put aside: {aside}")
        for between in sorted(state.parent.glob(f"{ASIDE}*"))[1:-2]:
            shutil.rmtree(between, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was loaded."""

    place: Place
    files: Files
    starts: Sequence[str]


class Checkpoint:
    """One process's checkpoint folder, and the thread that writes to it."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        inner_steps: int,
        log: Callable[[str], None],
        *,
        processes: int = 1,
        save_seconds: float = 60.0,
        least_seconds: float = LEAST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        at_once: bool = False,
    ) -> None:
        """The next checkpoint is due after `least_seconds` or ten times the last write's duration, but at
        most `save_seconds`. `at_once` writes in the calling thread, for tests that kill at an exact point."""
        self.folder, self.inner_steps, self.log, self.clock = folder, inner_steps, log, clock
        # With several processes, one may still be writing the newest: all have the one before it.
        self.keep, self.at_once = 1 if processes == 1 else 2, at_once
        self.save_seconds, self.least_seconds = save_seconds, least_seconds
        self.host = gpu.HostCopy(device)
        self.writer: threading.Thread | None = None
        self.reserving: threading.Thread | None = None
        self.fault: BaseException | None = None
        self.needs = 0  # bytes per checkpoint
        self.short = ""  # if the disk is full, why the last one was not saved
        self.write_seconds = 0.0  # duration of the last write
        self.edge_began, self.began = float("-inf"), clock()  # start of the last save at an edge; of any save
        self.edge: tuple[Place, Mapping[str, Tensor]] | None = None  # with its moments, while in host memory

    def reserve(self, num_bytes: int) -> None:
        """Set a checkpoint's size, and allocate host memory for its copy while the replica still compiles."""
        self.needs = num_bytes
        if self.host.stream:
            self.reserving = threading.Thread(target=self.host.reserve, args=(num_bytes,), daemon=True)
            self.reserving.start()

    # Starts

    def starts(self) -> list[str]:
        """Our incarnations that may have committed an update, oldest first."""
        return (read_note(self.folder / STARTS, 64 * MOST_STARTS) or "").split()

    def keep_starts(self, known: Collection[str]) -> None:
        """Record these starts on disk before returning, and forget the others, whose updates the state lacks.
        It is called before a start's first commit."""
        before = self.starts()
        kept = [start for start in before if start in known]
        kept += sorted(set(known) - set(kept))
        if kept == before:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / STARTS, "\n".join(kept[-MOST_STARTS:]))

    # Saving

    def is_due(self, edge: bool) -> bool:
        """Whether this process has time and room for another. At an edge it ignores checkpoints inside
        rounds, which are more frequent."""
        most, least, share = self.save_seconds, self.least_seconds, SHARE * self.write_seconds
        pause = min(most, max(least, share)) if edge else max(least, min(most, share))
        since = self.clock() - (self.edge_began if edge else self.began)
        return since >= pause and not self._busy() and self._has_room()

    def save(self, place: Place, files: Files) -> None:
        """Start to write a checkpoint; call `protect` before any tensor changes."""
        self.finish()
        self.began, copies = self.clock(), self._copy(files)
        edge = place.num_steps in (0, self.inner_steps)
        self.edge = (place, copies.get("optimiser", {})) if edge else None  # its memory is reused
        if edge:
            self.edge_began = self.began
        self._start(place, copies)

    def save_now(self, place: Place, files: Files) -> bool:
        """Save, and return once it is on disk; False if there is no room."""
        number = place.number(self.inner_steps)
        self.finish()
        if number not in self.numbers():
            self.save(place, files)
            self.protect()
            self.finish()
        return number in self.numbers()

    def protect(self) -> None:
        """Allow the tensors to change from here on; see `HostCopy.protect`."""
        self.host.protect()

    def finish(self) -> None:
        """Wait for the writer. A disk that cannot be written to stops the replica."""
        if self.writer is not None:
            self.writer.join()
        if self.fault is not None:
            fault, self.fault = self.fault, None
            if isinstance(fault, OSError):
                raise RunError(f"the private state in {self.folder} cannot be written: {fault}") from fault
            raise fault

    def _has_room(self) -> bool:
        """Whether there is room for one more. Without it training goes on: a kill then costs more, and the
        heartbeat and one log line say why."""
        self._say_short(shortage(self.folder, self.needs, "the state of a round"))
        return not self.short

    def _say_short(self, words: str) -> None:
        before, self.short = self.short, words
        if words and not before:
            self.log(f"{words}; training goes on, and a kill costs what is trained meanwhile")
        elif before and not words:
            self.log("there is room on the disk again: the state is saved as before")

    def _busy(self) -> bool:
        return self.writer is not None and self.writer.is_alive()

    def _copy(self, files: Files) -> dict[str, dict[str, Tensor]]:
        if self.reserving:
            self.reserving.join()
        flat = {f"{file}/{name}": t for file, named in files.items() for name, t in named.items()}
        copies: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.host.copy(flat).items():
            file, _, name = key.partition("/")
            copies.setdefault(file, {})[name] = tensor
        return copies

    def _start(self, place: Place, copies: Files) -> None:
        def run() -> None:
            try:
                self._write(place, copies)
            except BaseException as error:
                if is_full(error):  # another program used up the room
                    checkpoint.drop_parts(self.folder / EDGE, self.folder / INSIDE)
                    words = shortage(self.folder, self.needs, "the state of a round")
                    self._say_short(words or f"the disk of {self.folder} was full")
                elif self.at_once:
                    raise
                else:
                    self.fault = error

        if self.at_once:
            return run()
        self.writer = threading.Thread(target=run, daemon=True, name="checkpoint")
        self.writer.start()

    def _write(self, place: Place, copies: Files) -> None:
        started = self.clock()
        self.host.wait()
        number = place.number(self.inner_steps)
        files = {**copies, PLACE: place.to_tensors()}
        checkpoint.save(self._folder_of(number), number, files, self.keep)
        self.write_seconds = self.clock() - started

    # Reading

    def newest(self, control: ControlGroup, wanted: Files, params: Mapping[str, Tensor]) -> "Saved | None":
        """The newest checkpoint that all processes of the replica have complete. Others are removed, so that
        they cannot clash with what the replica saves from now on."""
        own: list[Any] = [sorted(self.numbers()), self.starts()]
        theirs = share_json(control, own, _numbers_and_starts)
        common = set.intersection(*(numbers for numbers, _ in theirs))
        self.drop(lambda number: number not in common)
        for number in sorted(common, reverse=True):
            found, why = None, "another process of this replica cannot read its part"
            try:
                found = self.load(number, wanted, params)
            except ConfigError as reason:
                why = str(reason)
            if all_true(control, found is not None) and found is not None:
                place, files = found
                if place.processes != control.size:
                    raise ConfigError(
                        f"{self.folder} was saved by a replica of {place.processes} processes, and this one "
                        f"has {control.size}; put their number back, or remove the folder to join from the "
                        "bucket"
                    )
                return Saved(place, files, sorted(set.intersection(*(starts for _, starts in theirs))))
            self.log(f"a checkpoint is lost: {why}")
            self.drop(lambda other, lost=number: other == lost)
        return None

    def numbers(self) -> set[int]:
        """The numbers of complete checkpoints; see `Place.number`."""
        return {n for kind in (EDGE, INSIDE) for n in checkpoint.saved_rounds(self.folder / kind)}

    def load(self, number: int, wanted: Files, params: Mapping[str, Tensor]) -> tuple[Place, Files]:
        """Load a checkpoint. It must have the files and shapes of `wanted`, and those of `params` if it
        contains them; ConfigError if it is damaged."""
        folder = self._folder_of(number)
        try:
            files = checkpoint.load_round(folder, number)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read ({checkpoint.first_line(error)})") from None
        place = Place.from_tensors(files.pop(PLACE, {}))
        if place.number(self.inner_steps) != number:
            raise ConfigError(f"{folder} is damaged: it stands elsewhere than its name says")
        if place.num_steps and not place.carried:
            wanted = {**wanted, PARAMS: params}
        for file, named in wanted.items():
            there = files.get(file, {})
            for name, tensor in named.items():
                if name not in there or there[name].shape != tensor.shape:
                    raise ConfigError(f"{folder} is damaged: {file} does not hold {name} in its shape")
        return place, files

    def last_edge(self) -> tuple[Place, Mapping[str, Tensor]] | None:
        """The newest checkpoint at an edge, with its moments: from host memory, or from disk."""
        if self.edge is not None:
            self.host.wait()
            return self.edge
        for number in sorted(checkpoint.saved_rounds(self.folder / EDGE), reverse=True):
            with suppress(ConfigError, OSError, KeyError):
                files = checkpoint.load_round(self.folder / EDGE, number)
                return Place.from_tensors(files[PLACE]), files["optimiser"]
        return None

    def drop(self, which: Callable[[int], bool]) -> None:
        """Delete checkpoints that must not be restored any more."""
        for number in filter(which, self.numbers()):
            checkpoint.drop_round(self._folder_of(number), number)

    def _folder_of(self, number: int) -> Path:
        at_edge = number % (self.inner_steps + 1) in (0, self.inner_steps)
        return self.folder / (EDGE if at_edge else INSIDE)


def _numbers_and_starts(value: Any) -> tuple[set[int], set[str]]:
    numbers, starts = value
    return set(whole_numbers(numbers)), {str(start) for start in starts}
