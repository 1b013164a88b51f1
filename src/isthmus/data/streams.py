"""Files as plain byte streams, decompressing .gz and .zst, and the errors of a bad input."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from isthmus import reading
from isthmus.errors import ConfigError

BUFFER_BYTES = 1 << 18


class BadFile(ConfigError):
    """A fault in a file's content: every reading meets it again, in the same place."""


class BadFiles(ConfigError):
    """Several unusable files: `reasons` has one line with a cure for each."""

    def __init__(self, reasons: Sequence[str], summary: str) -> None:
        super().__init__(summary)
        self.reasons = reasons


class NeedsPackage(ConfigError):
    """The package that reads this file is not installed; the file may be good."""


def missing_field(where: str, field: str, fields: list[str]) -> str:
    there = ", ".join(map(str, fields[:8])) or "none"
    return f"{where}: no field {field!r} (it has: {there:.400}); name the one with the text by --text-field"


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (raw, plain): the file itself, whose tell() is the progress, and the decompressed stream.

    A damaged file raises one line that names it, wherever in the stream the damage shows.
    """
    try:
        with io.BufferedReader(reading.open_regular(path), BUFFER_BYTES) as raw:
            if path.suffix == ".gz":  # uses the standard library: machines without pyarrow read the sample
                yield raw, cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            elif path.suffix == ".zst":
                yield raw, open_zstd(raw)
            else:
                yield raw, raw
    except (EOFError, OSError, zlib.error) as error:
        reason = " ".join(str(error).split())
        # A decompressor's errors have no errno; those of a disk do, and may pass.
        kind = ConfigError if isinstance(error, OSError) and error.errno else BadFile
        raise kind(f"{path} cannot be read to its end ({reason}); fetch or write it again") from error


def open_zstd(raw: BinaryIO) -> BinaryIO:
    """Read consecutive frames, with windows of up to 128 MiB; an unfinished last frame is an OSError."""
    try:
        import pyarrow
    except ImportError:
        raise NeedsPackage("reading .zst needs pyarrow: pip install pyarrow") from None
    return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), BUFFER_BYTES)


def not_utf8(path: Path, error: UnicodeDecodeError) -> BadFile:
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    likely = "utf-16" if error.object[:2] in marks else "cp1252"
    cure = f"convert it, for example with iconv -f {likely} -t utf-8"
    return BadFile(f"{path} is not UTF-8 text ({error.reason}); {cure}")
