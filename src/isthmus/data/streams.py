"""Files as streams of plain bytes: .gz and .zst are decompressed, and a cut-off file is noticed.

A few kilobytes may decompress to terabytes. So the stream ends with an error where it grows as no text does.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from isthmus import reading
from isthmus.data.limits import FREE_BYTES, MAX_EXPANSION
from isthmus.errors import ConfigError

BUFFER_BYTES = 1 << 18


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (raw, plain): the file itself, whose tell() is the progress, and the decompressed stream.

    A damaged file ends as one line that names it, wherever in the stream the damage shows.
    """
    try:
        with io.BufferedReader(reading.open_regular(path), BUFFER_BYTES) as raw:
            if path.suffix == ".gz":  # the standard library's, since machines without pyarrow read the sample
                yield raw, expanding(cast(BinaryIO, gzip.GzipFile(fileobj=raw)), raw, path)
            elif path.suffix == ".zst":
                yield raw, expanding(open_zstd(raw), raw, path)
            else:
                yield raw, raw
    except (EOFError, OSError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read to its end ({reason}); fetch or write it again") from error


def open_zstd(raw: BinaryIO) -> BinaryIO:
    """Frames one after another, with windows of up to 128 MiB; an unfinished last frame is an OSError."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError("reading .zst needs pyarrow: pip install pyarrow") from None
    return pyarrow.input_stream(raw, compression="zstd")


def expanding(plain: BinaryIO, raw: BinaryIO, path: Path) -> BinaryIO:
    return io.BufferedReader(Expanding(plain, raw, path), BUFFER_BYTES)


class Expanding(io.RawIOBase):
    """Counts what comes out of a decompressor, and compares it with what went in."""

    def __init__(self, plain: BinaryIO, raw: BinaryIO, path: Path) -> None:
        self.plain, self.raw, self.path, self.total = plain, raw, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.plain.read(len(buffer))
        self.total += len(data)
        if self.total > max(FREE_BYTES, MAX_EXPANSION * self.raw.tell()):
            raise ConfigError(
                f"{self.path} decompresses to more than {MAX_EXPANSION} times its size, which is no text; "
                "unpack it first if it is yours"
            )
        buffer[: len(data)] = data
        return len(data)
