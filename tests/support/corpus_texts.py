"""Small texts in every input format."""

import gzip
import json
import random
from pathlib import Path

WORDS = "the river bends past a mill where naïve geese quarrel über 12 grains of rye — 漢字 and 🦆 too"


def make_texts(num_documents: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [
        f"{number}: " + " ".join(rng.choices(WORDS.split(), k=rng.randint(1, 60))) + "\n\nend."
        for number in range(num_documents)
    ]


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "n": n}) + "\n" for n, text in enumerate(texts)).encode()


def write_format(folder: Path, ending: str, texts: list[str], stem: str = "part") -> Path:
    """The texts as one file `stem + ending`, or as one small .txt each."""
    path = folder / f"{stem}{ending}"
    if ending.startswith((".txt", ".md")):
        path = folder / stem
        path.mkdir(parents=True)
        for number, text in enumerate(texts):
            (path / f"{number:05d}{ending}").write_bytes(pack(text.encode(), ending))
    elif ending == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"n": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        path.write_bytes(pack(json_lines(texts), ending))
    return path


def pack(data: bytes, ending: str) -> bytes:
    if ending.endswith(".gz"):
        return gzip.compress(data)
    if ending.endswith(".zst"):
        import pyarrow

        # Two frames: large collections are often concatenated.
        half = len(data) // 2
        return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))
    return data


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
