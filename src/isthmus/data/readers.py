"""Text files as documents: .txt, JSON lines and parquet, streamed in a fixed order."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from isthmus import reading
from isthmus.data.limits import MAX_LINE_BYTES, MAX_LINE_VALUES, check_document, missing_field
from isthmus.data.parquet import parquet_texts
from isthmus.data.streams import open_bytes
from isthmus.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
# A longer .txt file is cut into documents of about this size, so that a part of it can be held out.
TEXT_DOCUMENT_CHARACTERS = 32_000
FORMATS = {
    f"{kind}{compression}": kind
    for kind in (".txt", ".jsonl", ".json")
    for compression in ("", ".gz", ".zst")
    if (kind, compression) != (".json", "")  # a bare .json is most often settings, or one big array
} | {".parquet": ".parquet"}
PROBE_BYTES = 1 << 16
# A text of JSON, also one that does not end: else each of its quotes would be tried as a beginning.
JSON_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
MARKS = (b",", b"[", b"{")  # one for each value, nearly


class Source(Protocol):
    """Somewhere documents come from, in an order that never changes."""

    name: str  # as the manifest shows it, without the folders of this machine
    size: int  # bytes as stored; 0: not known
    consumed: int  # how many of them have been read so far

    def documents(self, field: str) -> Iterator[str]: ...

    def describe(self) -> dict: ...


class TextFile:
    """One file; its format follows from its name."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.size = reading.stat_regular(path).st_size
        self.consumed = 0
        ending = format_of(path)
        assert ending is not None, path  # find_files leaves out the others
        self.kind = FORMATS[ending]

    def documents(self, field: str) -> Iterator[str]:
        read = {".txt": self._text, ".parquet": self._parquet}.get(self.kind, self._json_lines)
        self.consumed = 0
        for text in read(field):
            if text:
                yield whole_characters(text)
            del text
        self.consumed = self.size

    def describe(self) -> dict:
        """Enough to notice another file under the same name, without reading all of a terabyte."""
        with reading.open_regular(self.path) as file:
            probe = hashlib.sha256(file.read(PROBE_BYTES))
            file.seek(max(0, self.size - PROBE_BYTES))
            probe.update(file.read(PROBE_BYTES))
        return {"name": self.name, "bytes": self.size, "probe": probe.hexdigest()[:16]}

    def _json_lines(self, field: str) -> Iterator[str | None]:
        with open_bytes(self.path) as (raw, plain):
            number = 0
            while line := plain.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{self.path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{where}: longer than {MAX_LINE_BYTES:,} bytes; each line must be one JSON object"
                    )
                if line.isspace():
                    continue
                self.consumed = raw.tell()
                text = text_of(parse_row(line, where), field, where)
                del line  # of long texts, one is held at a time
                yield text
                del text

    def _parquet(self, field: str) -> Iterator[str | None]:
        for texts, share in parquet_texts(self.path, field):
            yield from texts
            self.consumed = int(self.size * share)

    def _text(self, field: str) -> Iterator[str]:
        with open_bytes(self.path) as (raw, plain):
            reader = io.TextIOWrapper(plain, encoding="utf-8", newline="")
            try:
                for document in split_text(iter(lambda: reader.read(1 << 20), "")):
                    self.consumed = raw.tell()
                    yield document
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self.path} is not UTF-8 text ({error.reason}); convert it first"
                ) from error
            finally:
                reader.detach()


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
        raise ConfigError(f"{where}: more than {MAX_LINE_VALUES:,} JSON values in one line; it is not read")
    try:
        return json.loads(line)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be read as JSON") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: not JSON ({reason}); each line must be one JSON object") from error


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
        raise ConfigError(
            f"{where}: not a JSON object; each document must look like {{{json.dumps(field)}: ...}}"
        )
    if field not in row:
        raise ConfigError(missing_field(where, field, list(row)))
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{where}: field {field!r} holds {type(text).__name__}; it must hold text")
    if text is not None:
        check_document(text, where)
    return text


def format_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((ending for ending in sorted(FORMATS, key=len, reverse=True) if name.endswith(ending)), None)


def find_files(inputs: Iterable[str | Path], leave_out: Iterable["TextFile"] = ()) -> list[TextFile]:
    """The text files among `inputs`: files as given, folders walked in the order of their names."""
    skipped = {file.path.resolve() for file in leave_out}
    found: dict[Path, TextFile] = {}
    endings = " ".join(FORMATS)
    for given in map(Path, inputs):
        if given.is_dir():
            inside = sorted(path for path in given.rglob("*") if path.is_file() and format_of(path))
            if not inside:
                raise ConfigError(f"{given} holds no text files; expected names that end in {endings}")
            root = given.resolve()
            named = [(path, f"{root.name}/{path.relative_to(given).as_posix()}") for path in inside]
        elif not given.exists():
            raise ConfigError(f"{given} does not exist; give a folder, or a file that ends in {endings}")
        elif format_of(given) is None:
            raise ConfigError(f"{given} has an unknown ending; expected one of {endings}")
        else:
            named = [(given, given.name)]
        for path, name in named:
            resolved = path.resolve()
            if resolved in found:
                raise ConfigError(f"{path} is given twice; its documents would be seen twice")
            if resolved not in skipped:
                found[resolved] = TextFile(path, name)
    return list(found.values())
