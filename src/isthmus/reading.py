"""The one bounded reader: regular files of limited size.

A pipe, a device or an endless file raises a ConfigError of one line that names the file and the limit. An
absent file raises FileNotFoundError, as `open` does. Standard library only.
"""

import itertools
import json
import math
import os
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from isthmus.errors import PASSING_ERRNO, ConfigError, Unreachable

DOCUMENT_BYTES = 1 << 20  # a recipe, about.json, a small manifest
NOTE_BYTES = 4096
MOST_VALUES = 1_000_000  # in one JSON document: each may take 250 bytes of memory
PIECE_BYTES = 1 << 20
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | Path, *, follow: bool = True) -> FileIO:
    """Open a regular file to read without blocking; `follow`: also through a link.

    It checks the file before opening it, because opening a device may have an effect, and again afterwards,
    because the file may have been replaced. O_NONBLOCK: opening a pipe would wait for its writer.
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
    """Return the stat of a regular file, without opening it."""
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
    """Read the whole file or refuse a larger one; with `start`, read at most `max_bytes` from there."""
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if start is None and size > max_bytes:
            raise _too_large(path, size, max_bytes)
        try:
            file.seek(start or 0)
            data = _read(file, max_bytes + (start is None))
        except OSError as error:
            raise _in_words(error, path) from None
    if start is None and len(data) > max_bytes:  # it grew meanwhile, or reports no size, as in /proc
        raise _too_large(path, len(data), max_bytes)
    return data


def read_text(path: str | Path, max_bytes: int, *, follow: bool = True) -> str:
    try:
        return read_bytes(path, max_bytes, follow=follow).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def read_note(path: str | Path, max_bytes: int = NOTE_BYTES) -> str | None:
    """Read a short note that another process left; None if the file is absent or malformed."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8", "replace")
    except (FileNotFoundError, ConfigError):
        return None


def read_json(path: str | Path, max_bytes: int = DOCUMENT_BYTES, *, follow: bool = True) -> Any:
    return parse_json(read_bytes(path, max_bytes, follow=follow), str(path))


def parse_json(data: bytes | str, source: str, max_values: int = MOST_VALUES) -> Any:
    """Parse one JSON value of bounded depth and count. JSON has no NaN or infinity: they become null."""
    data = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    count = num_values(data)
    if count > max_values:
        raise ConfigError(f"{source} holds {count:,} JSON values; at most {max_values:,} are read")
    try:
        return json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be read as JSON") from None
    except ValueError:  # also: not UTF-8, or an integer of thousands of digits
        raise ConfigError(f"{source} is not JSON") from None


def num_values(data: bytes) -> int:
    """Return an upper bound on the values in a JSON text, without building any."""
    return data.count(b",") + data.count(b"[") + data.count(b"{") + 1


def read_lines(path: str | Path, max_line: int) -> Iterator[bytes]:
    """Yield lines, each with its newline; text after the last newline comes last, without one."""
    with BufferedReader(open_regular(path), PIECE_BYTES) as file:
        for number in itertools.count(1):
            try:
                line = file.readline(max_line + 1)
            except OSError as error:
                raise _in_words(error, path) from None
            if len(line) > max_line:
                raise ConfigError(
                    f"{path}, line {number:,} is longer than {max_line:,} bytes; it is not read"
                )
            if not line:
                return
            yield line


def list_folder(path: str | Path) -> list[str]:
    """Return the names in a folder, sorted. An absent folder raises FileNotFoundError."""
    try:
        return sorted(os.listdir(path))
    except (OSError, ValueError) as error:
        raise _in_words(error, path) from None


def _read(file: FileIO, most: int) -> bytes:
    """Read up to `most` bytes, or to the end. A single read may return fewer than requested."""
    pieces: list[bytes] = []
    while most > 0:
        piece = file.read(min(most, 64 << 20))
        if piece is None:  # no data yet, but more may come: no file on a disk does this
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


def _in_words(error: OSError | ValueError, path: str | Path) -> Exception:
    """Turn a system error into one line; absent files keep their class, and passing faults stay retryable."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(error.errno, error.strerror, str(path))
    words = (error.strerror or str(error)) if isinstance(error, OSError) else "its name is not one of a file"
    known = isinstance(error, OSError) and error.errno in PASSING_ERRNO
    return (Unreachable if known else ConfigError)(f"{path} cannot be read: {words}")
