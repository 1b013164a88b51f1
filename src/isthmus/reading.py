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


def stat_regular(path: str | Path, *, follow: bool = True) -> os.stat_result:
    """Return the stat of a regular file, without opening it; `follow`: also through a link."""
    try:
        found = os.stat(path, follow_symlinks=follow)
    except (OSError, ValueError) as error:
        raise _in_words(error, path) from None
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "a symbolic link")
        raise ConfigError(f"{path} is {kind}, not a regular file; it is not read")
    return found


def open_regular(path: str | Path, *, follow: bool = True) -> FileIO:
    """Open a regular file to read. It checks the file first: opening a pipe would wait for its writer."""
    stat_regular(path, follow=follow)
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        return FileIO(os.open(path, flags), "r")
    except OSError as error:
        raise _in_words(error, path) from None


def read_bytes(path: str | Path, max_bytes: int, *, start: int | None = None, follow: bool = True) -> bytes:
    """Read the whole file or refuse a larger one; with `start`, read at most `max_bytes` from there."""
    with BufferedReader(open_regular(path, follow=follow)) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if start is None and size <= max_bytes:
                data = file.read(max_bytes + 1)  # it may grow meanwhile, or report no size, as in /proc
                size = len(data)
            elif start is not None:
                file.seek(start)
                return file.read(max_bytes)
        except OSError as error:
            raise _in_words(error, path) from None
    if size > max_bytes:
        raise ConfigError(f"{path} holds {size:,} bytes; at most {max_bytes:,} are read")
    return data


def read_text(path: str | Path, max_bytes: int) -> str:
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
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


def parse_json(data: bytes | str, source: str) -> Any:
    """Parse one JSON value of bounded depth and count. JSON has no NaN or infinity: they become null."""
    text = data if isinstance(data, bytes) else data.encode(errors="surrogatepass")
    if sum(map(text.count, (b",", b"[", b"{"))) >= MOST_VALUES:
        raise ConfigError(f"{source} holds more than {MOST_VALUES:,} JSON values; it is not read")
    try:
        return json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be read as JSON") from None
    except ValueError:  # also: not UTF-8, or an integer of thousands of digits
        raise ConfigError(f"{source} is not JSON") from None


def read_lines(path: str | Path, max_line: int) -> Iterator[bytes]:
    """Yield lines, each with its newline; text after the last newline comes last, without one."""
    with BufferedReader(open_regular(path), PIECE_BYTES) as file:
        for number in itertools.count(1):
            line = file.readline(max_line + 1)
            if len(line) > max_line:
                raise ConfigError(f"{path}, line {number:,} is longer than {max_line:,} bytes")
            if not line:
                return
            yield line


def list_folder(path: str | Path) -> list[str]:
    """Return the names in a folder, sorted. An absent folder raises FileNotFoundError."""
    try:
        return sorted(os.listdir(path))
    except (OSError, ValueError) as error:
        raise _in_words(error, path) from None


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _in_words(error: OSError | ValueError, path: str | Path) -> Exception:
    """Turn a system error into one line; absent files keep their class, and passing faults stay retryable."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(error.errno, error.strerror, str(path))
    words = (error.strerror or str(error)) if isinstance(error, OSError) else "its name is not one of a file"
    known = isinstance(error, OSError) and error.errno in PASSING_ERRNO
    return (Unreachable if known else ConfigError)(f"{path} cannot be read: {words}")
