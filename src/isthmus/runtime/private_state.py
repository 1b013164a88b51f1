"""What one process of a replica must find again after a kill: its updates at once, all else in the
background.

`update-000009.safetensors` is the update of round 9, on disk before any of it is sent (MBs).
`round-000007/` is the state with which round 7 was delivered (GBs): anchor, optimiser, error feedback, and
that update once more. It is copied to host memory at the end of the round and written while the next rounds
train. So a kill can leave updates behind that are newer than the newest whole state: their rounds are trained
again (docs/protocol.md, Crash points). Each file carries its hash (model/checkpoint.py).
"""

import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.disk import is_full, shortage, told_when_full
from isthmus.errors import ConfigError, RunError
from isthmus.model import checkpoint
from isthmus.reading import list_folder
from isthmus.runtime.middle import ABOUT, FOLDER, Middle

MIDDLE_SECONDS = 5.0  # so much work, and that of a start, a kill may cost
SHARE = 10  # a state is written again after this many times as long as the last write took
ASIDE = "state-diverged-"  # and when
Files = Mapping[str, Mapping[str, Tensor]]  # by file, by name


@dataclass(frozen=True, slots=True)
class Update:
    """What a round sends, by shard, and what its commit reports: the same when it is made after a kill."""

    shards: dict[int, bytes]
    step_count: int  # inner steps that the optimiser had taken
    told: dict[str, float] = field(default_factory=dict)

    def to_tensors(self, round_number: int) -> dict[str, Tensor]:
        named = {
            f"shard-{i}": torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for i, data in self.shards.items()
        }
        named |= {"step_count": torch.tensor(self.step_count), "round": torch.tensor(round_number)}
        return named | {f"told-{k}": torch.tensor(v, dtype=torch.float64) for k, v in self.told.items()}

    @classmethod
    def from_tensors(cls, named: Mapping[str, Tensor]) -> "Update":
        """ConfigError where they are of another kind: files of 0.2 and before have no hash."""
        try:
            return cls(
                {int(key[6:]): bytes(t.numpy()) for key, t in named.items() if key.startswith("shard-")},
                int(named["step_count"]),
                {key[5:]: float(t) for key, t in named.items() if key.startswith("told-")},
            )
        except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"no update is in it ({type(error).__name__})") from None


def put_aside(work: Path, log: Callable[[str], None]) -> None:
    """Give the states below a work folder another name, so that the next start joins from the bucket.

    Nothing of a state is deleted with that: should it have been right, it can be put back by hand. The one
    put aside first is kept and the newest two; those between them make room.
    """
    for state in sorted(work.glob("*/state")):
        aside = state.with_name(f"{ASIDE}{time.time_ns()}")
        with suppress(OSError):  # another stage was faster
            state.rename(aside)
            log(f"its private state is put aside: {aside}")
        for between in sorted(state.parent.glob(f"{ASIDE}*"))[1:-2]:
            shutil.rmtree(between, ignore_errors=True)


class PrivateState:
    """The folder of one process, and the thread that writes into it."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        log: Callable[[str], None],
        save_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        at_once: bool = False,
        middle_seconds: float = MIDDLE_SECONDS,
    ) -> None:
        """A state is written when the last was begun `save_seconds` ago, or sooner where writing is quick.
        The middle of a round is written as often, but not sooner than `middle_seconds` after either.

        `at_once` writes each in the calling thread, for tests that put a kill exactly where it hurts.
        """
        self.folder, self.log, self.clock, self.at_once = folder, log, clock, at_once
        self.host = gpu.HostCopy(device)
        self.writer: threading.Thread | None = None
        self.reserving: threading.Thread | None = None
        self.fault: BaseException | None = None
        self.needs = 0  # bytes of a state, once that is known
        self.short = ""  # why the last one was not saved, where the disk is full
        self.save_seconds = self.pause_seconds = save_seconds
        self.middle_seconds, self.write_seconds = middle_seconds, 0.0  # the second: what the last one took
        self.began, self.any_began = float("-inf"), clock()  # a state of a round; any of both
        self.copied: tuple[int, Update, dict[str, dict[str, Tensor]]] | None = None  # of the last state begun

    def reserve(self, num_bytes: int) -> None:
        """So large is a state. Take the host memory for its copy while the replica is still compiling."""
        self.needs = num_bytes
        if self.host.stream:
            self.reserving = threading.Thread(target=self.host.reserve, args=(num_bytes,), daemon=True)
            self.reserving.start()

    # Updates

    def save_update(self, round_number: int, update: Update) -> None:
        """On disk when it returns; DiskFull where there is no room: no update is sent that is not saved."""
        size = sum(map(len, update.shards.values()))
        with told_when_full(self.folder, size, f"the update of round {round_number}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint.save_tensors(self._update_path(round_number), update.to_tensors(round_number))

    def updates(self) -> dict[int, Path]:
        names = list_folder(self.folder) if self.folder.is_dir() else []
        found = [match for name in names if (match := re.fullmatch(r"update-(\d{6,9})\.safetensors", name))]
        return {int(match[1]): self.folder / match[0] for match in found}

    def load_update(self, round_number: int, shards: tuple[int, ...]) -> Update | None:
        """The saved update of a round, or None where it is absent or of other shards; ConfigError where it is
        damaged."""
        path = self._update_path(round_number)
        try:
            named = checkpoint.load_tensors(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({checkpoint.first_line(error)})") from None
        try:
            update = Update.from_tensors(named)
        except ConfigError as reason:
            raise ConfigError(f"{path} is damaged: {reason}") from None
        return update if tuple(sorted(update.shards)) == shards else None

    def drop_updates(self, keep: Callable[[int], bool]) -> None:
        for number, path in self.updates().items():
            if not keep(number):
                path.unlink(missing_ok=True)

    def _update_path(self, round_number: int) -> Path:
        return self.folder / f"update-{round_number:06d}.safetensors"

    # States

    def save(self, round_number: int, files: Files, update: Update) -> bool:
        """Begin to write the state of a round, if it is time; False when it is not.

        Before any of the tensors changes, call `protect`.
        """
        self.raise_fault()
        if self.clock() - self.began < self.pause_seconds:
            return False
        if self._busy():
            self.log(f"the state of round {round_number} is not saved: an earlier one is still being written")
            return False
        if not self._has_room():
            return False
        self.began = self.any_began = self.clock()
        copies = self._copy(files)
        self.copied = round_number, update, copies
        self._start(lambda: self._write(round_number, copies, update))
        return True

    def middle_due(self) -> bool:
        """Is it time to save the middle of a round? States of whole rounds do not wait for those."""
        pause = max(self.middle_seconds, min(self.save_seconds, SHARE * self.write_seconds))
        return self.clock() - self.any_began >= pause and not self._busy() and self._has_room()

    def hurry(self) -> None:
        """The next state of a round is saved whenever the last was: it holds what no update does."""
        self.began = float("-inf")

    def save_middle(self, middle: Middle, files: Files) -> None:
        """Begin to write it; before any of the tensors changes, call `protect`."""
        self.any_began = self.clock()
        self.copied = None  # its memory is used again, and it is on disk
        copies = {**self._copy(files), ABOUT: middle.to_tensors()}
        self._start(lambda: self._write_middle(middle.step_count + middle.num_steps, copies))

    def _has_room(self) -> bool:
        """Is there room for one more state beside those that are kept? Training goes on without: a kill then
        costs more, and the heartbeat and one line say why."""
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

    def _start(self, write: Callable[[], None]) -> None:
        def run() -> None:
            try:
                write()
            except BaseException as error:
                if is_full(error):  # somebody else took the room that was there before
                    checkpoint.drop_parts(self.folder, self.folder / FOLDER)
                    words = shortage(self.folder, self.needs, "the state of a round")
                    self._say_short(words or f"the disk of {self.folder} was full")
                elif self.at_once:
                    raise
                else:
                    self.fault = error

        if self.at_once:
            return run()

        self.writer = threading.Thread(target=run, daemon=True, name="state")
        self.writer.start()

    def protect(self) -> None:
        """From here on the tensors may change; see `HostCopy.protect`."""
        self.host.protect()

    def _write(self, round_number: int, copies: Files, update: Update) -> None:
        started = self.clock()
        self.host.wait()
        pending = {"pending": update.to_tensors(round_number)}
        checkpoint.save(self.folder, round_number, {**copies, **pending}, keep=2)
        # The older of the two states needs the updates after it, should the newer be spoilt.
        oldest = min(checkpoint.saved_rounds(self.folder), default=0)
        self.drop_updates(lambda number: number > oldest)
        self._wrote(self.clock() - started)

    def _write_middle(self, number: int, copies: Files) -> None:
        started = self.clock()
        self.host.wait()
        checkpoint.save(self.folder / FOLDER, number, copies)
        self._wrote(self.clock() - started)

    def _wrote(self, seconds: float) -> None:
        self.write_seconds = seconds
        self.pause_seconds = min(self.save_seconds, SHARE * seconds)

    def load_middle(self) -> tuple[Middle, Mapping[str, Mapping[str, Tensor]]] | None:
        """The newest middle of a round, with its files, or None; ConfigError where it is damaged."""
        found = checkpoint.load(self.folder / FOLDER)
        return found and (Middle.from_tensors(found[1].get(ABOUT, {})), found[1])

    def drop_middle(self) -> None:
        """Other processes of the replica do not have it: it must not meet one that they save later."""
        for number in checkpoint.saved_rounds(self.folder / FOLDER):
            checkpoint.drop_round(self.folder / FOLDER, number)

    def finish(self) -> None:
        """Wait for the writer."""
        if self.writer is not None:
            self.writer.join()
        self.raise_fault()

    def raise_fault(self) -> None:
        """A disk that cannot be written stops the replica, at the edge of a round."""
        if self.fault is not None:
            fault, self.fault = self.fault, None
            if isinstance(fault, OSError):
                raise RunError(f"the private state in {self.folder} cannot be written: {fault}") from fault
            raise fault

    def rounds(self) -> list[int]:
        """Rounds with a whole state, oldest first."""
        return checkpoint.saved_rounds(self.folder)

    def load(self, round_number: int) -> dict[str, dict[str, Tensor]]:
        """A saved round's files; ConfigError, with the file's name, where one is damaged."""
        unchecked: list[Path] = []
        try:
            files = checkpoint.load_round(self.folder, round_number, unchecked.append)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be read ({checkpoint.first_line(error)})") from None
        if unchecked:
            self.log(
                f"the state of round {round_number} was saved by 0.2 or before, whose files have no hash: "
                "it is read as it is"
            )
        return files

    def drop_after(self, round_number: int) -> None:
        """Later states were saved by some processes of the replica and not by others."""
        for newer in self.rounds():
            if newer > round_number:
                checkpoint.drop_round(self.folder, newer)

    def last_optimiser(self) -> tuple[int, int, Mapping[str, Tensor]] | None:
        """(round, inner steps taken, moments) of the newest state: in host memory, or on disk."""
        if self.copied is not None:
            self.host.wait()
            number, update, copies = self.copied
            return number, update.step_count, copies["optimiser"]
        for number in reversed(self.rounds()):
            with suppress(ConfigError, KeyError):
                files = self.load(number)
                return number, Update.from_tensors(files["pending"]).step_count, files["optimiser"]
        return None
