"""Check every input before making anything of it: all bad files appear in one list.

Only the head of a large file is read. Later faults end the preparation when it meets them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.data.readers import Source, TextFile
from isthmus.data.streams import BadFiles, NeedsPackage
from isthmus.errors import ConfigError

HEAD_BYTES = 1 << 20  # of text; a smaller file is read whole
MOST_LINES = 100
SKIP = "--skip-bad goes on without"


@dataclass(slots=True)
class Survey:
    """The usable and the bad inputs, including the files of --validation-from."""

    inputs: list[Source] = field(default_factory=list)
    validation: list[Source] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)  # one line per file
    empty: list[str] = field(default_factory=list)  # names
    skipped: dict[str, None] | None = None  # faults in otherwise good files

    def notes(self, is_continued: bool = False) -> list[str]:
        """Return lines on what was left out, for the end of a preparation."""
        lines = []
        if self.bad:
            lines += [f"left out {counted(len(self.bad), 'file')} that cannot be read:", *shown(self.bad)]
        faults = list(self.skipped or ())
        if faults:
            since = " since it was continued" if is_continued else ""
            lines += [f"left out inside of files, {counted(len(faults), 'fault')}{since}:", *shown(faults)]
        if self.empty:
            names = ", ".join(self.empty[:4]) + (", ..." if len(self.empty) > 4 else "")
            lines.append(f"{counted(len(self.empty), 'file')} without any text: {names}")
        return lines


def survey(
    inputs: Sequence[Source], validation: Sequence[Source], text_field: str, skip_bad: bool = False
) -> Survey:
    """Read the head of every source. Bad ones raise an error that lists them; `skip_bad` leaves them out."""
    if not inputs:
        raise ConfigError("all files belong to --validation-from; give others to train on")
    found = Survey(skipped={} if skip_bad else None)
    for sources, good in ((validation, found.validation), (inputs, found.inputs)):
        for source in sources:
            look_at(source, good, text_field, found)
    total = len(inputs) + len(validation)
    if found.bad and not skip_bad:
        if total == 1:
            raise ConfigError(found.bad[0])
        if len(found.bad) == 1:
            raise ConfigError(f"{found.bad[0]} ({SKIP} it)")
        summary = f"{len(found.bad)} of {total:,} files cannot be read; mend them, or {SKIP} them"
        raise BadFiles(shown(found.bad), summary)
    if found.bad and not (found.inputs and bool(found.validation) == bool(validation)):
        kind = "of --validation-from" if found.inputs else "that were given"
        raise BadFiles(shown(found.bad), f"none of the files {kind} can be read")
    if len(found.empty) == total - len(found.bad):
        raise ConfigError("the given files hold no documents; they are empty")
    return found


def look_at(source: Source, good: list[Source], text_field: str, found: Survey) -> None:
    if isinstance(source, TextFile):
        source.skipped = found.skipped
    try:
        has_text = read_head(source, text_field)
    except ConfigError as error:
        if not isinstance(source, TextFile) or isinstance(error, NeedsPackage) or error.passes:
            raise
        found.bad.append(str(error))
        return
    good.append(source)
    if not has_text:
        found.empty.append(source.name)


def read_head(source: Source, text_field: str) -> bool:
    """Return whether the source holds any text. From a remote source it fetches only the first document."""
    most = HEAD_BYTES if isinstance(source, TextFile) else 1
    size, documents = 0, source.documents(text_field)
    for text in documents:
        size += len(text)
        if size >= most:
            break
    del documents
    return size > 0


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def shown(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return [f"  {line}" for line in lines[:MOST_LINES]] + ([f"  and {more:,} more"] if more > 0 else [])
