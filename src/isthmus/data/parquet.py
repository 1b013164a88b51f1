"""Texts of a parquet file, decoded by a process of its own whose memory is limited."""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from isthmus import reading
from isthmus.data.limits import MAX_DOCUMENT_BYTES, BadFile, NeedsPackage, missing_field
from isthmus.errors import ConfigError, RunError

WORKER = Path(__file__).with_name("parquet_worker.py")
MEMORY_BYTES = 768 << 20
MAX_ROWS_PER_BYTE = 64  # short and equal rows take less than a bit each; more is a bomb of rows
MAX_HEADER_BYTES = 1 << 20


class Worker:
    """One process for all files, one after another: to start it takes longer than to open a file."""

    def __init__(self) -> None:
        # -P: no module is taken from the folder that the user stands in. The system's allocator takes what it
        # needs; the library's own reserves 1 GiB at once.
        limits = (MEMORY_BYTES, MAX_DOCUMENT_BYTES, MAX_ROWS_PER_BYTE)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for us alone
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests: IO[bytes] = self.process.stdin
        self.answers: IO[bytes] = self.process.stdout
        self.current = 0  # the file that is open, counted
        self.absent = bool(self._answer().get("absent"))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.requests.write(json.dumps(request).encode() + b"\n")
            self.requests.flush()
        except OSError:
            return self._ended()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.answers.readline(MAX_HEADER_BYTES)
        if not line.endswith(b"\n"):
            return self._ended()
        found = json.loads(line)
        return found if isinstance(found, dict) else {"memory": True}

    def _ended(self) -> dict[str, Any]:
        """It ended without a word: somebody killed it, or the library crashed on the file."""
        with suppress(subprocess.TimeoutExpired):
            if -self.process.wait(10) in (signal.SIGKILL, signal.SIGTERM):
                return {"killed": True}
        return {"memory": True}

    def texts(self, sizes: list[int | None]) -> Iterator[str | None]:
        for size in sizes:
            if size is None:
                yield None
                continue
            if not 0 <= size <= MAX_DOCUMENT_BYTES:
                raise ValueError("it states a text of another size")
            data = self.answers.read(size)
            if len(data) != size:
                raise ValueError("it broke off")
            yield data.decode("utf-8")

    def stop(self) -> None:
        self.process.kill()
        for pipe in (self.requests, self.answers):
            with suppress(OSError):
                pipe.close()
        self.process.wait()


_worker: Worker | None = None


def _running() -> Worker:
    global _worker
    if _worker is None or _worker.process.poll() is not None:
        _stop()
        _worker = Worker()
    return _worker


@atexit.register
def _stop() -> None:
    global _worker
    if _worker is not None:
        _worker.stop()
        _worker = None


def parquet_texts(path: Path, field: str) -> Iterator[tuple[list[str | None], float]]:
    """Batches of texts, each with the share of the rows that have been read."""
    reading.stat_regular(path)
    if find_spec("pyarrow") is None or (worker := _running()).absent:
        raise NeedsPackage(f"reading {path} needs pyarrow: pip install pyarrow")
    about = _checked(worker.ask({"open": str(path.absolute()), "field": field}), path, field)
    worker.current = mine = worker.current + 1
    num_rows = max(1, int(about["num_rows"]))
    while True:
        assert worker.current == mine, "two parquet files are read at once"
        found = _checked(worker.ask({"next": True}), path, field)
        if found.get("end"):
            return
        try:
            texts = list(worker.texts(found["sizes"]))
        except UnicodeDecodeError as error:
            _stop()
            raise BadFile(f"{path} is not UTF-8 text ({error.reason}); convert it first") from None
        except (ValueError, TypeError, KeyError) as error:
            _stop()
            raise ConfigError(f"{path} cannot be read: {error}") from None
        yield texts, min(1.0, found["rows"] / num_rows)


def _checked(found: dict[str, Any], path: Path, field: str) -> dict[str, Any]:
    if found.get("killed"):
        raise RunError(f"the process that reads {path} was killed; the same command continues")
    if found.get("memory"):
        _stop()
        raise ConfigError(
            f"{path} takes more than {MEMORY_BYTES >> 20} MiB of memory to read, or breaks the library that "
            f"reads it; write it again in smaller row groups and pages, of texts of at most "
            f"{MAX_DOCUMENT_BYTES >> 20} MiB"
        )
    if "missing" in found:
        raise BadFile(missing_field(str(path), field, found["missing"]))
    if "damaged" in found:
        raise BadFile(f"{path} is not a whole parquet file ({found['damaged']})")
    if "error" in found:
        raise BadFile(f"{path}: {found['error']}")
    return found
