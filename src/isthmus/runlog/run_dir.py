"""A run directory: what a run records and its page reads. Standard library only.

recipe.toml      the resolved recipe; written once
    about.json       facts that hold for the whole run: versions, device, status
    metrics.jsonl    one row per outer round; row 0 is the evaluation before training
    report.html, model.safetensors, state/

A kill at any moment leaves a readable, resumable directory: each row is appended with one write and an fsync,
and all other files are replaced whole.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypedDict, cast

from isthmus.config import Recipe, dump_recipe, stored_recipe
from isthmus.errors import ConfigError
from isthmus.files import open_own, replace_file
from isthmus.layout.traffic import PURPOSES, REPLICA_PURPOSES, STAGE_PURPOSES
from isthmus.reading import (
    DOCUMENT_BYTES,
    parse_json,
    read_json,
    read_lines,
    read_text,
)
from isthmus.runlog.row import Row

LINE_BYTES = 64 << 20
TAIL_BYTES = 1 << 16

REAL = "real processes"  # a run of `train`; all other modes are simulated


class About(TypedDict, total=False):
    """about.json. Other versions may have other keys."""

    isthmus: str
    torch: str
    device: str
    device_type: str  # of a simulation; "cpu" or "cuda"
    device_used: str  # of real processes; such as "cuda:0"
    precision: str
    compiled: bool
    mode: str
    group: int  # replicas that a simulator stacks
    pieces: int  # micro-steps per batch
    parked: bool
    predicted_bytes: int
    peak_bytes: int
    reserved_bytes: int
    parameters: int
    auto: list[str]
    corpus: str
    corpus_sha256: str  # the fingerprint of the text
    tokenizer_sha256: str
    start_sha256: str
    started: str
    status: str  # running, finished, interrupted or failed
    error: str | None
    restarts: int
    run: str  # a bucket's run_id


class Totals(TypedDict):
    """Sums over a run."""

    rounds: int
    inner_steps: int
    tokens: int
    seconds: float
    fleet_seconds: float | None
    bytes: dict[str, int]  # by purpose
    link_bytes: dict[str, int]  # between stages, between replicas
    dense_bytes: dict[str, int]  # what dense methods would have sent


class RunDir:
    """One run on disk. `create` starts one and never overwrites; `open` reads or resumes one."""

    def __init__(self, path: str | Path, recipe: Recipe) -> None:
        self.path = Path(path)
        self.recipe = recipe
        self.recipe_path = self.path / "recipe.toml"
        self.about_path = self.path / "about.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.report_path = self.path / "report.html"
        self.model_path = self.path / "model.safetensors"
        self.state_path = self.path / "state"

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe, about: Mapping[str, Any]) -> Self:
        path = Path(path)
        if os.path.lexists(path):
            _refuse_occupied(path)
        run = cls(path, recipe)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # "x": if two processes create the same folder, only one succeeds
            with open(run.recipe_path, "x", encoding="utf-8") as file:
                file.write(dump_recipe(recipe))
                file.flush()
                os.fsync(file.fileno())
            replace_file(run.about_path, _json(dict(about), indent=2) + "\n")
            replace_file(run.metrics_path, "")
        except FileExistsError:
            _refuse_occupied(path)
            raise
        except OSError as error:
            raise ConfigError(f"cannot write the run {path}: {error.strerror}; give another folder") from None
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        path = Path(path)
        try:
            text = read_text(path / "recipe.toml", DOCUMENT_BYTES)
        except ConfigError as refusal:
            raise ConfigError(f"{path} is not a run: it holds no readable recipe.toml ({refusal})") from None
        except FileNotFoundError:
            what = "is not a run: it holds no readable recipe.toml" if path.is_dir() else "is not a folder"
            what = what if os.path.lexists(path) else "does not exist"
            raise ConfigError(f"{path} {what}; give the folder of a run, such as runs/demo") from None
        return cls(path, stored_recipe(text, str(path / "recipe.toml")))

    @property
    def about(self) -> About:
        """Read about.json anew each time: a running run changes its status."""
        try:
            about = read_json(self.about_path, DOCUMENT_BYTES)
        except FileNotFoundError:
            return {}
        except ConfigError as refusal:
            raise ConfigError(f"{refusal}; remove it, the run can be read without it") from None
        return cast(About, about)

    def update_about(self, **facts: Any) -> None:
        replace_file(self.about_path, _json({**self.about, **facts}, indent=2) + "\n")

    def continue_with(self, recipe: Recipe) -> None:
        """Replace the recipe by one with more rounds, and make the run resumable."""
        replace_file(self.recipe_path, dump_recipe(recipe))
        self.update_about(status="interrupted")

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row; once this returns, the row survives a kill and a power cut."""
        line = _json(dict(row)).encode() + b"\n"
        with open_own(self.metrics_path, append=True) as file:
            _cut_torn_tail(file)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """Return the rows in the order of rounds; if a round was repeated, its last row."""
        return [Row.from_dict(found) for found in self._stored()]

    def _stored(self) -> list[dict[str, Any]]:
        """Return rows as written, with all their keys."""
        rows: dict[int, dict[str, Any]] = {}
        bad = 0
        for number, line in enumerate(self._lines(), start=1):
            # A row counts once its newline is written; a kill cut short what follows the last one.
            if not line.endswith(b"\n") or not line.strip():
                continue
            if bad:  # a torn last line is no fault, but this one was not the last
                break
            row = self._row(line, number)
            if row is None:
                bad = number
                continue
            rows[row["round"]] = row
        else:
            bad = 0
        if bad:
            raise ConfigError(f"{self.metrics_path}, line {bad} is not a row of a run; remove that line")
        return [rows[key] for key in sorted(rows)]

    def _lines(self) -> Iterator[bytes]:
        with suppress(FileNotFoundError):
            yield from read_lines(self.metrics_path, LINE_BYTES)

    def _row(self, line: bytes, number: int) -> dict[str, Any] | None:
        """Parse the row in a line; None if it holds none."""
        try:
            row = parse_json(line, f"{self.metrics_path}, line {number}")
        except ConfigError:
            return None
        at = row.get("round") if isinstance(row, dict) else None
        return row if isinstance(at, int) and not isinstance(at, bool) and at >= 0 else None

    def amend(self, row: Mapping[str, Any]) -> None:
        """Replace the row of the same round by appending a new line.

        The old line stays until `tidy`. So an amendment in round 3,000 costs no more than in round 3, a
        reader that follows the file sees it, and a kill leaves the old row or the new one.
        """
        self.append(row)

    def tidy(self) -> None:
        """Rewrite the file with one line per round, in order, without replaced lines."""
        stored = self._stored()
        if sum(line.endswith(b"\n") for line in self._lines()) > len(stored):
            self._rewrite(stored)

    def truncate(self, round: int) -> None:
        """Remove the rows after `round`, so that a resumed run writes its own."""
        self._rewrite([row for row in self._stored() if row["round"] <= round])

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        replace_file(self.metrics_path, "".join(_json(row) + "\n" for row in rows))


def next_run_dir(base: str | Path, name: str) -> Path:
    """Return the first of base/name, base/name-2, base/name-3, ... that does not exist."""
    path, number = Path(base) / name, 2
    while os.path.lexists(path):
        path, number = Path(base) / f"{name}-{number}", number + 1
    return path


def _refuse_occupied(path: Path) -> None:
    """Raise ConfigError unless `path` is an empty folder."""
    if (path / "recipe.toml").exists():
        raise ConfigError(f"{path} already holds a run; give --run another folder, or go on with --resume")
    if not path.is_dir() or any(path.iterdir()):
        raise ConfigError(f"{path} is not an empty folder; give --run a new or an empty one")


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(finite(value), allow_nan=False, indent=indent)


def finite(value: Any) -> Any:
    """Replace NaN and infinity by null, because JSON has neither: a diverged loss still parses."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def _cut_torn_tail(file: BinaryIO) -> None:
    """Remove what follows the last newline, so that no row continues one that a kill cut short."""
    size = at = file.seek(0, os.SEEK_END)
    while at > 0:
        start = max(0, at - TAIL_BYTES)
        newline = os.pread(file.fileno(), at - start, start).rfind(b"\n")
        at = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    if at < size:
        file.truncate(at)


def totals(rows: Iterable[Row]) -> Totals:
    """Sum up a run: bytes by purpose and by kind of link, what dense methods would have sent, and time."""
    rows = list(rows)
    trained = [row for row in rows if row.round > 0]
    sent = {purpose: sum(row.bytes.get(purpose) or 0 for row in rows) for purpose in PURPOSES}
    fleet = [row.fleet_seconds for row in trained if row.fleet_seconds is not None]
    links = {"stages": STAGE_PURPOSES, "replicas": REPLICA_PURPOSES}
    return {
        "rounds": max((row.round for row in rows), default=0),
        "inner_steps": max((row.inner_steps for row in rows), default=0),
        "tokens": max((row.tokens for row in rows), default=0),
        "seconds": sum(row.seconds or 0.0 for row in trained),
        "fleet_seconds": sum(fleet) if fleet else None,
        "bytes": sent,
        "link_bytes": {link: sum(sent[purpose] for purpose in own) for link, own in links.items()},
        "dense_bytes": {link: sum(row.dense_bytes.get(link) or 0 for row in rows) for link in links},
    }
