"""Text files as documents: .txt and .md, JSON lines and parquet, streamed in a fixed order."""

import codecs
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from isthmus import reading
from isthmus.data.parquet import parquet_texts
from isthmus.data.streams import BadFile, missing_field, not_utf8, open_bytes

END_OF_TEXT = "<|endoftext|>"
# A longer .txt file is cut into documents of about this size, so that a part can be held out.
TEXT_DOCUMENT_CHARACTERS = 32_000
FORMATS = {
    f"{kind}{compression}": kind
    for kind in (".txt", ".jsonl", ".json")
    for compression in ("", ".gz", ".zst")
    if (kind, compression) != (".json", "")  # a bare .json is usually settings, or one big array
} | {".md": ".txt", ".parquet": ".parquet"}
PROBE_BYTES = 1 << 16
MOST_BAD_ROWS = 100  # a JSON lines file that begins with so many has another format


class Source(Protocol):
    """A source of documents in an order that never changes."""

    name: str  # in the manifest, without this machine's folders
    size: int  # stored bytes; 0: unknown
    consumed: int  # stored bytes read so far

    def documents(self, field: str) -> Iterator[str]: ...

    def describe(self) -> dict: ...


class TextFile:
    """One file; its name determines its format.

    `skipped` leaves out bad lines of JSON, and in other formats everything after a fault. Every reading skips
    the same, so a killed preparation continues where it was.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.size = reading.stat_regular(path).st_size
        self.consumed = 0
        self.skipped: dict[str, None] | None = None  # faults, listed once however often the file is read
        ending = format_of(path)
        assert ending is not None, path  # find_files skips the others
        self.kind = FORMATS[ending]

    def documents(self, field: str) -> Iterator[str]:
        read = {".txt": self._text, ".parquet": self._parquet}.get(self.kind, self._json_lines)
        self.consumed, number = 0, 0
        try:
            for text in read(field):
                if text:
                    number += 1
                    yield whole_characters(text)
        except BadFile as fault:
            if self.skipped is None or not number:
                raise
            self.skipped[str(fault)] = None
        self.consumed = self.size

    def describe(self) -> dict:
        """Return enough to notice another file of the same name, without reading a terabyte."""
        with reading.open_regular(self.path) as file:
            probe = hashlib.sha256(file.read(PROBE_BYTES))
            file.seek(max(0, self.size - PROBE_BYTES))
            probe.update(file.read(PROBE_BYTES))
        about = {"name": self.name, "bytes": self.size, "probe": probe.hexdigest()[:16]}
        # Only for files that it changes, so that other corpora of older versions keep their fingerprint.
        return about | ({"mark": "left out"} if self._has_mark() else {})

    def _has_mark(self) -> bool:
        """Return whether the text starts with a byte order mark. The JSON parser skips it by itself."""
        if self.kind != ".txt":
            return False
        with open_bytes(self.path) as (_, plain):
            return plain.read(3) == codecs.BOM_UTF8

    def _json_lines(self, field: str) -> Iterator[str | None]:
        with open_bytes(self.path) as (raw, plain):
            is_good = False  # whether any line was good so far
            faults: list[BadFile] = []  # before the first good line
            for number, line in enumerate(plain, 1):
                if line.isspace():
                    continue
                where, self.consumed = f"{self.path}, line {number}", raw.tell()
                try:
                    text = text_of(parse_row(line, where), field, where)
                except BadFile as fault:
                    if self.skipped is None or len(faults) == MOST_BAD_ROWS:
                        raise
                    if is_good:
                        self.skipped[str(fault)] = None
                    else:
                        faults.append(fault)
                    continue
                if self.skipped is not None and not is_good:
                    self.skipped |= dict.fromkeys(map(str, faults))
                    faults, is_good = [], True
                yield text
            if faults:
                raise faults[0]

    def _parquet(self, field: str) -> Iterator[str | None]:
        for texts, share in parquet_texts(self.path, field):
            self.consumed = int(self.size * share)  # counts what is read ahead, as in the other formats
            yield from texts

    def _text(self, field: str) -> Iterator[str]:
        with open_bytes(self.path) as (raw, plain):
            reader = io.TextIOWrapper(plain, "utf-8-sig", newline="")
            try:
                for document in split_text(iter(lambda: reader.read(1 << 20), "")):
                    self.consumed = raw.tell()
                    yield document
            except UnicodeDecodeError as error:
                raise not_utf8(self.path, error) from error
            finally:
                reader.detach()


def split_text(chunks: Iterable[str]) -> Iterator[str]:
    """Split a .txt into documents at each <|endoftext|>; cut long ones at blank lines."""
    buffer, marked = "", False
    for chunk in chunks:
        *whole, buffer = (buffer + chunk).split(END_OF_TEXT)
        marked = marked or bool(whole)
        for part in whole:
            yield from cut(part.strip("\n"))
        # Keep more than one document buffered, because a separator may straddle two chunks.
        while len(buffer) > 2 * TEXT_DOCUMENT_CHARACTERS:
            edge = cutting_point(buffer, TEXT_DOCUMENT_CHARACTERS)
            yield buffer[:edge]
            buffer = buffer[edge:]
    yield from cut(buffer.strip("\n") if marked else buffer)


def cut(text: str, limit: int = TEXT_DOCUMENT_CHARACTERS) -> Iterator[str]:
    """Yield consecutive pieces of at most `limit` characters that join to `text`."""
    start = 0
    while len(text) - start > limit:
        edge = start + cutting_point(text[start : start + limit], limit)
        yield text[start:edge]
        start = edge
    yield text[start:] if start else text


def cutting_point(text: str, limit: int) -> int:
    """Find the best cut within the first `limit` characters: after a paragraph, a line, or a word."""
    for mark, kept in (("\n\n", 2), ("\n", 1), (" ", 0)):
        edge = text.rfind(mark, limit // 2, limit)
        if edge > 0 and edge + kept <= limit:
            return edge + kept
    return limit


def whole_characters(text: str) -> str:
    """Replace half a surrogate pair by U+FFFD: JSON can escape it, UTF-8 cannot encode it."""
    if text.isascii():
        return text
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_row(line: bytes, where: str) -> object:
    try:
        return json.loads(line)
    except RecursionError:
        raise BadFile(f"{where}: nested too deeply to be read as JSON") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise BadFile(f"{where}: not JSON ({reason}); each line must be one JSON object") from error


def text_of(row: object, field: str, where: str) -> str | None:
    if not isinstance(row, dict):
        raise BadFile(
            f"{where}: not a JSON object; each document must look like {{{json.dumps(field)}: ...}}"
        )
    if field not in row:
        raise BadFile(missing_field(where, field, list(row)))
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise BadFile(f"{where}: field {field!r} holds {type(text).__name__}; it must hold text")
    return text


def format_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((ending for ending in sorted(FORMATS, key=len, reverse=True) if name.endswith(ending)), None)
