"""Files as streams of plain bytes: .gz and .zst are decompressed, and a cut-off file is noticed.

A few kilobytes may decompress to terabytes. So the stream ends with an error where it grows as no text does.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from isthmus import reading
from isthmus.data.limits import FREE_BYTES, MAX_EXPANSION, BadFile, NeedsPackage
from isthmus.errors import ConfigError

BUFFER_BYTES = 1 << 18
UTF_8 = "utf-8"


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
        # A decompressor's errors have no number; those of a disk do, and another reading may not meet them.
        kind = ConfigError if isinstance(error, OSError) and error.errno else BadFile
        raise kind(f"{path} cannot be read to its end ({reason}); fetch or write it again") from error


def open_zstd(raw: BinaryIO) -> BinaryIO:
    """Frames one after another, with windows of up to 128 MiB; an unfinished last frame is an OSError."""
    try:
        import pyarrow
    except ImportError:
        raise NeedsPackage("reading .zst needs pyarrow: pip install pyarrow") from None
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
            raise BadFile(
                f"{self.path} decompresses to more than {MAX_EXPANSION} times its size, which is no text; "
                "unpack it first if it is yours"
            )
        buffer[: len(data)] = data
        return len(data)


class Recoded(io.RawIOBase):
    """Text in another encoding, as UTF-8."""

    def __init__(self, plain: BinaryIO, encoding: str, path: Path) -> None:
        self.plain, self.encoding, self.path = plain, encoding, path
        self.decoder, self.left, self.ended = codecs.getincrementaldecoder(encoding)(), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left and not self.ended:
            data = self.plain.read(BUFFER_BYTES)
            self.ended = not data
            try:
                self.left = self.decoder.decode(data, self.ended).encode(errors="replace")
            except UnicodeError as error:
                raise not_text(self.path, self.encoding, error) from None
        part, self.left = self.left[: len(buffer)], self.left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def recoded(plain: BinaryIO, encoding: str, path: Path) -> BinaryIO:
    if encoding == UTF_8:
        return plain
    return io.BufferedReader(Recoded(plain, encoding, path), BUFFER_BYTES)


def not_text(path: Path, encoding: str, error: UnicodeError) -> BadFile:
    reason = error.reason if isinstance(error, UnicodeDecodeError) else " ".join(str(error).split())[:100]
    if encoding != UTF_8:
        return BadFile(f"{path} is not {encoding} text ({reason}); convert it to UTF-8 first")
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    likely = "utf-16" if isinstance(error, UnicodeDecodeError) and error.object[:2] in marks else "cp1252"
    return BadFile(
        f"{path} is not UTF-8 text ({reason}); say what it is by --encoding, such as {likely}, or convert it"
    )


def checked_encoding(name: str) -> str:
    """The codec's own name for an encoding of text."""
    try:
        "".encode(name)
        codecs.getincrementaldecoder(name)()
        return codecs.lookup(name).name
    except (LookupError, UnicodeError, TypeError, ValueError):
        raise ConfigError(
            f"--encoding is {name!r:.40}; it must be one that Python knows, such as cp1252 or utf-16"
        ) from None


def is_utf8(plain: BinaryIO, most: int) -> bool:
    """Whether the first `most` bytes are UTF-8 text; a zero byte in them is a sign of UTF-16."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while most > 0 and (data := plain.read(min(most, BUFFER_BYTES))):
            most -= len(data)
            if b"\0" in data:
                return False
            decoder.decode(data)
        decoder.decode(b"", final=most > 0)
    except UnicodeDecodeError:
        return False
    return True
