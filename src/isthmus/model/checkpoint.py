"""Everything a resumed run needs to give the same losses, replaced as a whole at a round's edge."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.errors import ConfigError

POINTER = "latest.json"


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, whole on disk or not there."""
    part = path.with_name(path.name + ".part")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part)
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def save(directory: Path, rounds: int, files: Mapping[str, Mapping[str, Tensor]], keep: int = 1) -> None:
    """Write the state after `rounds` rounds beside the ones before, point to it, then drop all but `keep`.

    A folder gets its name when all of it is on the disk and loses it before any of it goes: also a round that
    is saved for the second time, after a restart, is whole or not there.
    """
    name = f"round-{rounds:06d}"
    fresh = directory / f"part-{rounds:06d}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for file, tensors in files.items():
        if tensors:
            save_tensors(fresh / f"{file}.safetensors", tensors)
    drop_round(directory, rounds)
    os.replace(fresh, directory / name)
    part = directory / (POINTER + ".part")
    with open(part, "w", encoding="utf-8") as pointer:
        json.dump({"round": rounds, "folder": name}, pointer)
        pointer.flush()
        os.fsync(pointer.fileno())
    os.replace(part, directory / POINTER)
    others = sorted(path for path in directory.glob("round-*") if path.name != name)
    older = [path for path in others if path.name < name]
    kept = older[len(older) - (keep - 1) :] if keep > 1 else []
    for other in others:  # also rounds beyond us, of a start that came to nothing
        if other not in kept:
            drop_round(directory, int(other.name.removeprefix("round-")))
    for left in [*directory.glob("gone-*"), *directory.glob("part-*")]:  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)


def drop_round(directory: Path, rounds: int) -> None:
    """Forget the state after `rounds` rounds, if there is one: out of sight first, then off the disk."""
    folder, gone = directory / f"round-{rounds:06d}", directory / f"gone-{rounds:06d}"
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def saved_rounds(directory: Path) -> list[int]:
    """Rounds whose state is whole, oldest first: a state is written before the pointer moves to it."""
    try:
        newest = int(json.loads((directory / POINTER).read_text(encoding="utf-8"))["round"])
    except (OSError, ValueError, KeyError):
        return []
    rounds = [int(path.name.removeprefix("round-")) for path in directory.glob("round-*")]
    return sorted(number for number in rounds if number <= newest)


def load_round(directory: Path, rounds: int) -> dict[str, dict[str, Tensor]]:
    folder = directory / f"round-{rounds:06d}"
    return {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def load(directory: Path) -> tuple[int, dict[str, dict[str, Tensor]]] | None:
    """(rounds done, tensors by file) of the newest whole state, or None when no round was finished."""
    try:
        pointer = json.loads((directory / POINTER).read_text(encoding="utf-8"))
        return int(pointer["round"]), load_round(directory, int(pointer["round"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"the saved state in {directory} cannot be read ({error}); start a new run"
        ) from None
