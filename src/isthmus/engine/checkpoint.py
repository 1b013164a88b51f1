"""Everything a resumed run needs to give the same losses, replaced as a whole at a round's edge."""

import json
import os
import shutil
from collections.abc import Mapping
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


def save(directory: Path, rounds: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write the state after `rounds` rounds beside the one before, point to it, then drop the one before."""
    name = f"round-{rounds:06d}"
    folder = directory / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, tensors in files.items():
        if tensors:
            save_tensors(folder / f"{file}.safetensors", tensors)
    part = directory / (POINTER + ".part")
    with open(part, "w", encoding="utf-8") as pointer:
        json.dump({"round": rounds, "folder": name}, pointer)
        pointer.flush()
        os.fsync(pointer.fileno())
    os.replace(part, directory / POINTER)
    for other in directory.glob("round-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def load(directory: Path) -> tuple[int, dict[str, dict[str, Tensor]]] | None:
    """(rounds done, tensors by file) of the newest whole state, or None when no round was finished."""
    try:
        pointer = json.loads((directory / POINTER).read_text(encoding="utf-8"))
        folder = directory / Path(pointer["folder"]).name
        files = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        return int(pointer["round"]), files
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"the saved state in {directory} cannot be read ({error}); start a new run"
        ) from None
