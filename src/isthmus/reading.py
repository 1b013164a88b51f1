"""The one bounded reader: regular files of a limited size, and folders of a limited length.

Whoever can put a file into a folder that we read may put a pipe, a device, a file without end or a million
entries there. All that Isthmus reads from a folder passes through here, so that such a thing is one line of
text: a ConfigError that names the file and the limit. A file that is absent is a FileNotFoundError, as
from `open`. Standard library only.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from isthmus.errors import PASSING_ERRNO, ConfigError, Unreachable

DOCUMENT_BYTES = 1 << 20  # a recipe, about.json, a small manifest
NOTE_BYTES = 4096
MOST_VALUES = 1_000_000  # in one JSON document: each may take 250 bytes of memory
MOST_ENTRIES = 100_000  # of a folder
PIECE_BYTES = 1 << 20
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | Path, *, follow: bool = True) -> FileIO:
    """Open a regular file to read, without waiting for anybody; `follow`: also where a link leads to it.

    It is looked at before it is opened, because opening a device may do something, and once more
    afterwards, because it may have been replaced. O_NONBLOCK: to open a pipe would wait for its writer.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        _check_regular(os.stat(path, follow_symlinks=follow), path)
        file = FileIO(os.open(path, flags), "r")
    except (OSError, ValueError) as error:
        raise _in_words(error, path) from None
    try:
        _check_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def stat_regular(path: str | Path, *, follow: bool = True) -> os.stat_result:
    """Of a regular file, without opening it."""
    try:
        found = os.stat(path, follow_symlinks=follow)
        _check_regular(found, path)
    except (OSError, ValueError) as error:
        raise _in_words(error, path) from None
    return found


def is_regular(path: str | Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: str | Path, max_bytes: int, *, start: int | None = None, follow: bool = True) -> bytes:
    """The whole file, refused where it is larger; with `start`, at most `max_bytes` of it from there on."""
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if start is None and size > max_bytes:
            raise _too_large(path, size, max_bytes)
        try:
            file.seek(start or 0)
            data = _read(file, max_bytes + (start is None))
        except OSError as error:
            raise _in_words(error, path) from None
    if start is None and len(data) > max_bytes:  # it grew meanwhile, or does not tell its size, as in /proc
        raise _too_large(path, len(data), max_bytes)
    return data


def read_text(path: str | Path, max_bytes: int, *, follow: bool = True) -> str:
    try:
        return read_bytes(path, max_bytes, follow=follow).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def read_note(path: str | Path, max_bytes: int = NOTE_BYTES) -> str | None:
    """A few words that one process leaves for another; None where there is no such file, or an odd one."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8", "replace")
    except (FileNotFoundError, ConfigError):
        return None


def read_json(path: str | Path, max_bytes: int = DOCUMENT_BYTES, *, follow: bool = True) -> Any:
    return parse_json(read_bytes(path, max_bytes, follow=follow), str(path))


def parse_json(data: bytes | str, source: str, max_values: int = MOST_VALUES) -> Any:
    """One JSON value of a bounded depth and count. JSON has no NaN and no infinity: they are read as null."""
    data = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    count = num_values(data)
    if count > max_values:
        raise ConfigError(f"{source} holds {count:,} JSON values; at most {max_values:,} are read")
    try:
        return json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be read as JSON") from None
    except ValueError:  # also: not UTF-8, an integer of thousands of digits
        raise ConfigError(f"{source} is not JSON") from None


def num_values(data: bytes) -> int:
    """The most values that a JSON text can hold, without building one of them."""
    return data.count(b",") + data.count(b"[") + data.count(b"{") + 1


def read_lines(
    path: str | Path, max_line: int, *, max_bytes: int | None = None, max_lines: int | None = None
) -> Iterator[bytes]:
    """Line after line, each with its newline; what follows the last newline comes last, without one."""
    with open_regular(path) as file:
        if max_bytes is not None and (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise _too_large(path, size, max_bytes)
        left, number, total = b"", 0, 0
        while True:
            try:
                piece = _read(file, PIECE_BYTES)
            except OSError as error:
                raise _in_words(error, path) from None
            total += len(piece)
            if max_bytes is not None and total > max_bytes:
                raise _too_large(path, total, max_bytes)
            lines = _cut(left + piece)
            left = lines.pop()
            if not piece and left:
                lines, left = [left], b""
            for line in lines:
                number += 1
                if max_lines is not None and number > max_lines:
                    raise ConfigError(f"{path} has more than {max_lines:,} lines; at most that many are read")
                if len(line) > max_line:
                    raise _long_line(path, number, max_line)
                yield line
            if len(left) > max_line:
                raise _long_line(path, number + 1, max_line)
            if not piece:
                return


def list_folder(path: str | Path, max_entries: int = MOST_ENTRIES) -> list[str]:
    """The names in a folder, sorted; refused where they are more. An absent one is a FileNotFoundError."""
    names: list[str] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if len(names) == max_entries:
                    raise ConfigError(f"{path} holds more than {max_entries:,} entries; it is not read")
                names.append(entry.name)
    except (OSError, ValueError) as error:
        raise _in_words(error, path) from None
    return sorted(names)


def _cut(data: bytes) -> list[bytes]:
    """Lines with their newlines, and last what follows them."""
    *lines, rest = data.split(b"\n")
    return [*(line + b"\n" for line in lines), rest]


def _read(file: FileIO, most: int) -> bytes:
    """Up to `most` bytes, or to the end. A read may give fewer than it was asked for."""
    pieces: list[bytes] = []
    while most > 0:
        piece = file.read(min(most, 64 << 20))
        if piece is None:  # nothing there yet, and more may come: no file on a disk does so
            raise BlockingIOError("it is not a file on a disk")
        if not piece:
            break
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _check_regular(found: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "a symbolic link")
        raise ConfigError(f"{path} is {kind}, not a regular file; it is not read")


def _too_large(path: str | Path, size: int, most: int) -> ConfigError:
    return ConfigError(f"{path} holds {size:,} bytes; at most {most:,} are read")


def _long_line(path: str | Path, number: int, most: int) -> ConfigError:
    return ConfigError(f"{path}, line {number:,} is longer than {most:,} bytes; such a line is not read")


def _in_words(error: OSError | ValueError, path: str | Path) -> Exception:
    """A fault of the system as one line; absent files keep their class, and faults that pass may pass."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(error.errno, error.strerror, str(path))
    words = (error.strerror or str(error)) if isinstance(error, OSError) else "its name is not one of a file"
    known = isinstance(error, OSError) and error.errno in PASSING_ERRNO
    return (Unreachable if known else ConfigError)(f"{path} cannot be read: {words}")
