"""Find the text files in given folders, and count what is left out, by kind."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from isthmus.data.readers import FORMATS, TextFile, format_of
from isthmus.data.streams import BadFiles
from isthmus.errors import ConfigError

HIDDEN = "hidden"
README = "README.md beside data"
LINKS = "link(s) to a folder, to nothing, or to text that is here already"
# How to make files of another kind usable.
CURES = {
    ending: cure
    for endings, cure in {
        (".csv", ".tsv"): "write them as .jsonl or .parquet",
        (".json",): "one object in each line: name them .jsonl",
        (".html", ".htm", ".xml", ".pdf", ".epub", ".docx"): "save their text as .txt",
        (".rst", ".tex", ".log", ".text"): "plain text: name them .txt",
        ("",): "if they are plain text, name them .txt",
        (".zip", ".tar", ".gz", ".zst", ".bz2", ".xz"): "unpack them",
    }.items()
    for ending in endings
}
MOST_KINDS = 8


class LeftOut:
    """How many files of a folder are skipped, by extension."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, path: Path) -> None:
        self.counts[path.suffix.lower()[:20]] += 1

    def __str__(self) -> str:
        """Return one line, the most frequent extension first."""
        ordered = sorted(self.counts.items(), key=lambda found: (-found[1], found[0]))
        parts = []
        for kind, count in ordered[:MOST_KINDS]:
            cure = f" ({CURES[kind]})" if kind in CURES else ""
            parts.append(f"{count:,} {kind or 'without an ending'}{cure}")
        more = sum(count for _, count in ordered[MOST_KINDS:])
        return ", ".join([*parts, *([f"{more:,} of other kinds"] if more else [])])


def find_files(
    inputs: Iterable[str | Path],
    leave_out: Iterable[TextFile] = (),
    left_out: LeftOut | None = None,
) -> list[TextFile]:
    """Find the text files among `inputs`: files as given, and folders in the order of their names.

    If several inputs are unusable, BadFiles lists them all.
    """
    skipped = {file.path.resolve() for file in leave_out}
    left_out = left_out or LeftOut()
    found: dict[Path, TextFile] = {}
    faults: list[str] = []
    for given in map(Path, inputs):
        try:
            for path, name in named_files(given, left_out):
                resolved = path.resolve()
                if resolved in found:
                    faults.append(f"{path} is given twice; its documents would be seen twice")
                elif resolved not in skipped:
                    found[resolved] = TextFile(path, name)
        except ConfigError as error:
            faults.append(str(error))
    if len(faults) > 1:
        raise BadFiles(faults, f"{len(faults)} of the given inputs cannot be taken; see the lines above")
    if faults:
        raise ConfigError(faults[0])
    return list(found.values())


def named_files(given: Path, left_out: LeftOut) -> list[tuple[Path, str]]:
    """Return (path, its name in the manifest) of one file, or of each text file in a folder."""
    endings = " ".join(FORMATS)
    if given.is_dir():
        here = LeftOut()
        inside = text_files(given, here)
        left_out.counts += here.counts
        if not inside:
            holds = f" (it holds {here})" if here.counts else ""
            raise ConfigError(f"{given} holds no text files{holds}; expected names that end in {endings}")
        root = given.resolve()
        return [(path, f"{root.name}/{path.relative_to(given).as_posix()}") for path in inside]
    if not given.exists():
        raise ConfigError(f"{given} does not exist; give a folder, or a file that ends in {endings}")
    if format_of(given) is None:
        cure = CURES.get(given.suffix.lower(), "")
        cure = f" ({cure.replace('them', 'it')})" if cure else ""
        raise ConfigError(f"{given} has an unknown ending{cure}; expected one of {endings}")
    return [(given, given.name)]


def text_files(folder: Path, left_out: LeftOut) -> list[Path]:
    """Return each text file once: the file itself rather than a link, or the first of several links."""
    here = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    seen = {path.resolve() for path in here if not path.is_symlink()}
    inside: list[Path] = []
    for path in here:
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            left_out.counts[HIDDEN] += 1
        elif path.is_symlink() and (not path.is_file() or path.resolve() in seen):
            left_out.counts[LINKS] += 1
        elif not path.is_file() or format_of(path) is None:
            left_out.add(path)
        else:
            seen.add(path.resolve())
            inside.append(path)
    # A README.md in a collection from the hub describes the data; it is not a document.
    if any(FORMATS[format_of(path) or ""] != ".txt" for path in inside):
        readmes = {path for path in inside if path.name.lower() == "readme.md"}
        left_out.counts[README] += len(readmes)
        left_out.counts += Counter()  # drops zeros
        inside = [path for path in inside if path not in readmes]
    return inside
