"""The saved state of a run, replaced whole between rounds: a resumed run repeats the same losses.

Every file carries the CRC-32 of its own bytes in its safetensors metadata, computed on writing and compared
on reading. So a run detects flipped bits on a disk instead of training on them. It protects against damage,
not forgery (whoever can write here can write anything), so a fast checksum is enough.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.files import remove_folder, replace_file, replacing
from isthmus.reading import list_folder, read_json, stat_regular

POINTER = "latest.json"
POINTER_BYTES = 4096
# Sync piece by piece: with gigabytes still unwritten, another file's fsync would wait for them all.
PIECE_BYTES = 64 << 20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
METADATA, HASH = "__metadata__", "crc32"
BLANK = "0" * 8  # placeholder while the hash is computed


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file, complete on disk or absent.

    We write it ourselves, tensor by tensor, because a thread writes gigabytes of state while the GPU trains.
    The library would make a second copy of them all, and its older versions would block every other thread.
    The hash covers every byte of the file except itself; its place in the header is filled in last.
    """
    # Wide types first, so that every tensor starts at a multiple of its own width.
    largest_first = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in largest_first}
    header: dict[str, Any] = {METADATA: {HASH: BLANK, **(about or {})}}  # first, to find its place below
    at = 0
    for name, tensor in arrays.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    crc = zlib.crc32(head)
    with replacing(path) as file:
        file.write(head)
        for tensor in arrays.values():
            data = _bytes(tensor)
            for at in range(0, len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                crc = zlib.crc32(piece, crc)  # releases the GIL
                file.write(piece)
                if len(data) > PIECE_BYTES:
                    file.flush()
                    os.fdatasync(file.fileno())
        file.seek(head.index(BLANK.encode()))
        file.write(f"{crc:08x}".encode())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def save(directory: Path, rounds: int, files: Mapping[str, Mapping[str, Tensor]], keep: int = 1) -> None:
    """Write the state after `rounds` rounds next to earlier ones, point to it, then drop all but `keep`.

    A folder gets its name once it is completely on disk, and loses the name before anything is deleted. So a
    round saved again after a restart is also complete or absent.
    """
    name = f"round-{rounds:06d}"
    fresh = directory / f"part-{rounds:06d}"
    directory.mkdir(parents=True, exist_ok=True)
    remove_folder(fresh)
    fresh.mkdir()
    for file, tensors in files.items():
        if tensors:
            save_tensors(fresh / f"{file}.safetensors", tensors)
    drop_round(directory, rounds)
    os.replace(fresh, directory / name)
    replace_file(directory / POINTER, json.dumps({"round": rounds, "folder": name}))
    others = [number for number in _rounds(directory) if number != rounds]
    older = [number for number in others if number < rounds]
    kept = older[len(older) - (keep - 1) :] if keep > 1 else []
    for other in others:  # later rounds too: they come from a start that was rolled back
        if other not in kept:
            drop_round(directory, other)
    drop_parts(directory)


def drop_parts(*directories: Path) -> None:
    """Remove what a killed process, or one without disk space, left half done."""
    for directory in directories:
        for left in list_folder(directory) if directory.is_dir() else ():
            if re.fullmatch(r"(gone|part)-\d{6,9}", left):
                remove_folder(directory / left)


def drop_round(directory: Path, rounds: int) -> None:
    """Delete the state after `rounds` rounds, if it exists: it loses its name first."""
    folder, gone = directory / f"round-{rounds:06d}", directory / f"gone-{rounds:06d}"
    remove_folder(gone)
    with suppress(FileNotFoundError):
        os.replace(folder, gone)
    remove_folder(gone)


def saved_rounds(directory: Path) -> list[int]:
    """Return the rounds with a complete state, oldest first: a state is written before the pointer moves.

    A folder has its name only once it is completely on disk, so if the pointer is damaged, all count.
    """
    try:
        newest = _newest(directory)
    except OSError:
        return []
    except ConfigError:
        newest = 10**9
    try:
        return [number for number in _rounds(directory) if number <= newest]
    except (OSError, ConfigError):
        return []


def _rounds(directory: Path) -> list[int]:
    """Return the rounds that have a folder, oldest first."""
    names = list_folder(directory)
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"round-(\d{6,9})", name)))


def load_round(
    directory: Path, rounds: int, unchecked: Callable[[Path], None] = lambda path: None
) -> dict[str, dict[str, Tensor]]:
    """Return a state's tensors by file; `unchecked` as in `load_tensors`."""
    folder = directory / f"round-{rounds:06d}"
    names = [name for name in list_folder(folder) if name.endswith(".safetensors")]
    return {name.removesuffix(".safetensors"): load_tensors(folder / name, unchecked) for name in names}


def load(directory: Path) -> tuple[int, dict[str, dict[str, Tensor]]] | None:
    """Return (rounds done, tensors by file) of the newest complete state, or None if no round finished."""
    try:
        newest = _newest(directory)
        return newest, load_round(directory, newest)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"the saved state in {directory} cannot be read ({error}); start a new run"
        ) from None


def load_tensors(path: Path, unchecked: Callable[[Path], None] = lambda path: None) -> dict[str, Tensor]:
    """Read a safetensors file; a damaged or invalid one raises ConfigError, an absent one FileNotFoundError.

    `unchecked` is called for a file without a hash: version 0.2 or older wrote it, or another program.
    """
    stat_regular(path)  # the library would block on a pipe
    try:
        tensors = load_file(path)
        stated, found = _hashes(path, tensors)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)})") from None
    if stated is None:
        unchecked(path)
    elif stated != found:
        raise ConfigError(f"{path} is damaged: its bytes do not have the CRC-32 that it states")
    return tensors


def _hashes(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str | None, str]:
    """Return (the stated hash or None, the hash of the file's bytes). The library has checked the form:
    tensors follow the header without gaps. Hashing the loaded tensors reads the disk only once."""
    with open(path, "rb") as file:
        length = file.read(8)
        head = file.read(int.from_bytes(length, "little"))
    header = json.loads(head)
    metadata = header.pop(METADATA, None)
    if metadata is None or (HASH not in metadata and "format" in metadata):  # files of the library itself
        return None, ""
    stated = str(metadata.get(HASH, ""))  # metadata without it: it was there, and is damaged
    crc = zlib.crc32(length + head.replace(stated.encode(), BLANK.encode(), 1 if stated else 0))
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        crc = zlib.crc32(_bytes(tensors[name]), crc)
    return stated, f"{crc:08x}"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _newest(directory: Path) -> int:
    """Return the round that the pointer names."""
    found = read_json(directory / POINTER, POINTER_BYTES)
    number = found.get("round") if isinstance(found, dict) else None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 10**9:
        raise ConfigError(f"{directory / POINTER} does not name a round")
    if found.get("folder", name := f"round-{number:06d}") != name:
        raise ConfigError(f"{directory / POINTER} is damaged: it names two rounds")
    return number
