"""Files as streams of plain bytes: .gz and .zst are decompressed, and a cut-off file is noticed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import ConfigError

BUFFER_BYTES = 1 << 18


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (raw, plain): the file itself, whose tell() is the progress, and the decompressed stream.

    A damaged file ends as one line that names it, wherever in the stream the damage shows.
    """
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".gz":  # the standard library's, since machines without pyarrow read the sample
                yield raw, io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER_BYTES)
            elif path.suffix == ".zst":
                yield raw, open_zstd(raw)
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
    return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), BUFFER_BYTES)
