"""Text files as documents: .txt and .md, JSON lines and parquet, streamed in a fixed order."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from isthmus import reading
from isthmus.data.limits import MAX_LINE_BYTES, MAX_LINE_VALUES, BadFile, check_document, missing_field
from isthmus.data.parquet import parquet_texts
from isthmus.data.streams import UTF_8, is_utf8, not_text, open_bytes, recoded

END_OF_TEXT = "<|endoftext|>"
# A longer .txt file is cut into documents of about this size, so that a part of it can be held out.
TEXT_DOCUMENT_CHARACTERS = 32_000
FORMATS = {
    f"{kind}{compression}": kind
    for kind in (".txt", ".jsonl", ".json")
    for compression in ("", ".gz", ".zst")
    if (kind, compression) != (".json", "")  # a bare .json is most often settings, or one big array
} | {".md": ".txt", ".parquet": ".parquet"}
PROBE_BYTES = 1 << 16
# So much of a file decides whether it is UTF-8, where another encoding is given for those that are not.
UTF_8_BYTES = {".txt": 64 << 20}
UTF_8_HEAD_BYTES = 1 << 20
MOST_BAD_ROWS = 100  # a file of JSON lines that begins with so many has another format
MOST_FAULTS = 10_000
BYTE_ORDER_MARK = "\ufeff"
# A text of JSON, also one that does not end: else each of its quotes would be tried as a beginning.
JSON_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
MARKS = (b",", b"[", b"{")  # one for each value, nfaults


class Source(Protocol):
    """Somewhere documents come from, in an order that never changes."""

    name: str  # as the manifest shows it, without the folders of this machine
    size: int  # bytes as stored; 0: not known
    consumed: int  # how many of them have been read so far

    def documents(self, field: str) -> Iterator[str]: ...

    def describe(self) -> dict: ...


class Skipped:
    """What --skip-bad leaves out of good files, counted once however often they are read."""

    def __init__(self) -> None:
        self.faults: dict[str, None] = {}  # in order

    def add(self, fault: BadFile) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults[str(fault)] = None


class TextFile:
    """One file; its format follows from its name. `other_encoding` is that of a file that is not UTF-8.

    With `skipped`, a bad line of JSON is left out, and of other files what follows the fault. Both are the
    same at every reading, so that a preparation that was killed still continues where it was.
    """

    def __init__(self, path: Path, name: str, other_encoding: str = UTF_8) -> None:
        self.path = path
        self.name = name
        self.other_encoding = other_encoding
        self.size = reading.stat_regular(path).st_size
        self.consumed = 0
        self.skipped: Skipped | None = None
        ending = format_of(path)
        assert ending is not None, path  # find_files leaves out the others
        self.kind = FORMATS[ending]

    @cached_property
    def encoding(self) -> str:
        if self.kind == ".parquet" or self.other_encoding == UTF_8:
            return UTF_8
        with open_bytes(self.path) as (_, plain):
            most = UTF_8_BYTES.get(self.kind, UTF_8_HEAD_BYTES)
            return UTF_8 if is_utf8(plain, most) else self.other_encoding

    def documents(self, field: str) -> Iterator[str]:
        read = {".txt": self._text, ".parquet": self._parquet}.get(self.kind, self._json_lines)
        self.consumed, number = 0, 0
        try:
            for text in read(field):
                if text:
                    number += 1
                    yield whole_characters(text)
                del text
        except BadFile as fault:
            if self.skipped is None or not number:
                raise
            self.skipped.add(fault)
        self.consumed = self.size

    def describe(self) -> dict:
        """Enough to notice another file under the same name, without reading all of a terabyte."""
        with reading.open_regular(self.path) as file:
            probe = hashlib.sha256(file.read(PROBE_BYTES))
            file.seek(max(0, self.size - PROBE_BYTES))
            probe.update(file.read(PROBE_BYTES))
        about = {"name": self.name, "bytes": self.size, "probe": probe.hexdigest()[:16]}
        # Only where it matters: what older versions made of other files is made again under the same name.
        if self.encoding != UTF_8:
            return about | {"encoding": self.encoding}
        return about | ({"mark": "left out"} if self._has_mark() else {})

    def _has_mark(self) -> bool:
        """A byte order mark: it is not text. In JSON lines the parser has always left it out."""
        if self.kind != ".txt":
            return False
        with open_bytes(self.path) as (_, plain):
            return plain.read(3) == BYTE_ORDER_MARK.encode()

    def _json_lines(self, field: str) -> Iterator[str | None]:
        with open_bytes(self.path) as (raw, plain):
            plain = recoded(plain, self.encoding, self.path)
            number, num_good = 0, 0
            faults: list[BadFile] = []  # since the last good line
            while line := plain.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{self.path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise BadFile(
                        f"{where}: longer than {MAX_LINE_BYTES:,} bytes; each line must be one JSON object"
                    )
                if line.isspace():
                    continue
                self.consumed = raw.tell()
                try:
                    text = text_of(parse_row(line, where), field, where)
                except BadFile as fault:
                    if self.skipped is None:
                        raise
                    faults.append(fault)
                    if not num_good and len(faults) == MOST_BAD_ROWS:
                        break
                    continue
                finally:
                    del line  # of long texts, one is held at a time
                num_good += 1
                self._skip(faults)
                yield text
                del text
            if faults and not num_good:
                raise faults[0]
            self._skip(faults)

    def _skip(self, faults: list[BadFile]) -> None:
        for fault in faults:
            assert self.skipped is not None
            self.skipped.add(fault)
        faults.clear()

    def _parquet(self, field: str) -> Iterator[str | None]:
        for texts, share in parquet_texts(self.path, field):
            self.consumed = int(self.size * share)  # read ahead, as of the other kinds
            yield from texts

    def _text(self, field: str) -> Iterator[str]:
        with open_bytes(self.path) as (raw, plain):
            reader = io.TextIOWrapper(recoded(plain, self.encoding, self.path), encoding=UTF_8, newline="")
            try:
                for document in split_text(without_mark(iter(lambda: reader.read(1 << 20), ""))):
                    self.consumed = raw.tell()
                    yield document
            except UnicodeDecodeError as error:
                raise not_text(self.path, UTF_8, error) from error
            finally:
                reader.detach()


def without_mark(chunks: Iterable[str]) -> Iterator[str]:
    for number, chunk in enumerate(chunks):
        yield chunk if number else chunk.removeprefix(BYTE_ORDER_MARK)


def split_text(chunks: Iterable[str]) -> Iterator[str]:
    """Documents of a .txt: split at each <|endoftext|>; long ones are cut at blank lines."""
    buffer, marked = "", False
    for chunk in chunks:
        *whole, buffer = (buffer + chunk).split(END_OF_TEXT)
        marked = marked or bool(whole)
        for part in whole:
            yield from cut(part.strip("\n"))
        # More than one document stays in the buffer, since a separator may straddle two chunks.
        while len(buffer) > 2 * TEXT_DOCUMENT_CHARACTERS:
            edge = cutting_point(buffer, TEXT_DOCUMENT_CHARACTERS)
            yield buffer[:edge]
            buffer = buffer[edge:]
    yield from cut(buffer.strip("\n") if marked else buffer)


def cut(text: str, limit: int = TEXT_DOCUMENT_CHARACTERS) -> Iterator[str]:
    """Consecutive pieces of at most `limit` characters that join to `text`."""
    start = 0
    while len(text) - start > limit:
        edge = start + cutting_point(text[start : start + limit], limit)
        yield text[start:edge]
        start = edge
    yield text[start:] if start else text


def cutting_point(text: str, limit: int) -> int:
    """The best cut within the first `limit` characters: after a paragraph, a line, or a word."""
    for mark, kept in (("\n\n", 2), ("\n", 1), (" ", 0)):
        edge = text.rfind(mark, limit // 2, limit)
        if edge > 0 and edge + kept <= limit:
            return edge + kept
    return limit


def whole_characters(text: str) -> str:
    """JSON may escape half of a surrogate pair; UTF-8 has no form for it, so it becomes U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_row(line: bytes, where: str) -> object:
    """One line of JSON, within bounds: a line of brackets takes twenty times its size in memory."""
    if sum(line.count(mark) for mark in MARKS) > MAX_LINE_VALUES and has_many_values(line):
        raise BadFile(f"{where}: more than {MAX_LINE_VALUES:,} JSON values in one line; it is not read")
    try:
        return json.loads(line)
    except RecursionError:
        raise BadFile(f"{where}: nested too deeply to be read as JSON") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise BadFile(f"{where}: not JSON ({reason}); each line must be one JSON object") from error


def has_many_values(line: bytes) -> bool:
    """Most of a long line is text, whose commas and brackets do not count."""
    count = start = 0
    for text in JSON_TEXT.finditer(line):
        count += 1 + sum(line.count(mark, start, text.start()) for mark in MARKS)
        start = text.end()
        if count > MAX_LINE_VALUES:
            return True
    return count + sum(line.count(mark, start) for mark in MARKS) > MAX_LINE_VALUES


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
    if text is not None:
        check_document(text, where)
    return text


def format_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((ending for ending in sorted(FORMATS, key=len, reverse=True) if name.endswith(ending)), None)
