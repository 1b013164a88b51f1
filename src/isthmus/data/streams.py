"""Files as streams of plain bytes: .gz and .zst are opened on the way, and a cut-off file is noticed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from isthmus.errors import ConfigError

# libzstd's own limit for streams; C4 and DCLM need 8 MiB, the Isthmus corpus 32 MiB.
MAX_ZSTD_WINDOW_BYTES = 1 << 27


class ZstdStream(io.RawIOBase):
    """Decompress zstd frames one after another.

    zstandard's own stream_reader ends quietly where a download was cut off; this one checks that the last
    frame is whole, because a silently shorter corpus is a different experiment.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
        self._raw = raw
        self._frame = None
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target) -> int:
        while not self._plain:
            if not self._compressed:
                self._compressed = self._raw.read(1 << 14)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is cut off")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._plain = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed = self._frame.unused_data
                self._frame = None
        size = min(len(target), len(self._plain))
        target[:size] = self._plain[:size]
        self._plain = self._plain[size:]
        return size


def open_zstd(raw: BinaryIO) -> BinaryIO:
    """Whichever of the two zstd decoders this machine has."""
    try:
        return io.BufferedReader(ZstdStream(raw), 1 << 18)
    except ImportError:
        pass
    try:
        import pyarrow
    except ImportError:
        raise ConfigError("reading .zst needs a decoder: pip install zstandard (or pyarrow)") from None
    return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), 1 << 18)


def decoding_errors() -> tuple[type[Exception], ...]:
    """What a damaged file may raise while it is read, from the decoders that are installed."""
    errors: list[type[Exception]] = [EOFError, OSError, zlib.error]
    try:
        import zstandard

        errors.append(zstandard.ZstdError)
    except ImportError:
        pass
    return tuple(errors)


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (raw, plain): the file itself, whose tell() is the progress, and the decompressed stream.

    A damaged file ends as one line that names it, wherever in the stream the damage shows.
    """
    try:
        with open(path, "rb") as raw:
            if path.suffix == ".gz":
                yield raw, io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 18)
            elif path.suffix == ".zst":
                yield raw, open_zstd(raw)
            else:
                yield raw, raw
    except decoding_errors() as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read to its end ({reason}); fetch or write it again") from error
