"""A run directory: what a run writes down, and what its page reads. Standard library only.

    recipe.toml      the resolved recipe; written once
    about.json       facts that hold for the whole run: versions, device, status
    metrics.jsonl    one row per outer round; row 0 is the evaluation before training
    report.html, model.safetensors, state/

A kill at any moment leaves a directory that can be read and resumed: a row is appended with one write and an
fsync, everything else is replaced as a whole.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypedDict

from isthmus.config import Recipe, dump_recipe, stored_recipe
from isthmus.errors import ConfigError
from isthmus.files import open_own, replace_file
from isthmus.layout.traffic import PURPOSES, REPLICA_PURPOSES, STAGE_PURPOSES
from isthmus.reading import (
    DOCUMENT_BYTES,
    list_folder,
    num_values,
    parse_json,
    read_json,
    read_lines,
    read_text,
)
from isthmus.runlog.clean import LAST_ROUND, About, clean_about, clean_row
from isthmus.runlog.row import Row

# What is read of metrics.jsonl: some 100,000 rounds of eight replicas, or 7,000 of a thousand.
METRICS_BYTES = 256 << 20
METRICS_LINES = 1_000_000
METRICS_VALUES = 8_000_000
LINE_BYTES = 8 << 20
TAIL_BYTES = 1 << 16

REAL = "real processes"  # the mode of a run of `train`; all others were simulated


class Totals(TypedDict):
    """A run in sums."""

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

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe, about: Mapping[str, Any]) -> Self:
        path = Path(path)
        if os.path.lexists(path):
            _refuse_occupied(path)
        run = cls(path, recipe)
        try:
            path.mkdir(parents=True, exist_ok=True)
            # "x": of two processes that were given the same folder, one gets it.
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
    def recipe_path(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def about_path(self) -> Path:
        return self.path / "about.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def state_path(self) -> Path:
        return self.path / "state"

    @property
    def about(self) -> About:
        """Read afresh each time: a run that is still going changes its status."""
        try:
            about = read_json(self.about_path, DOCUMENT_BYTES)
        except FileNotFoundError:
            return {}
        except ConfigError as refusal:
            raise ConfigError(f"{refusal}; remove it, the run can be read without it") from None
        if not isinstance(about, dict):
            raise ConfigError(
                f"{self.about_path} is not a JSON object; remove it, the run can be read without it"
            )
        return clean_about(about)

    def update_about(self, **facts: Any) -> None:
        replace_file(self.about_path, _json({**self.about, **facts}, indent=2) + "\n")

    def continue_with(self, recipe: Recipe) -> None:
        """The run has got more rounds: it can be resumed."""
        replace_file(self.recipe_path, dump_recipe(recipe))
        self.update_about(status="interrupted")

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; when this returns, the row survives a kill and a power cut."""
        line = _json(dict(row)).encode() + b"\n"
        with open_own(self.metrics_path, append=True) as file:
            _cut_torn_tail(file)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """The rows in the order of their rounds; of a round that was run again, the last."""
        return [clean_row(found, self.recipe) for found in self._stored()]

    def _stored(self) -> list[dict[str, Any]]:
        """Rows as they were written, with whatever keys they have."""
        rows: dict[int, dict[str, Any]] = {}
        sizes: dict[int, int] = {}  # JSON values of each row that is held
        held, bad = 0, 0
        for number, line in enumerate(self._lines(), start=1):
            # A row counts once its newline is written; what follows the last one was cut short by a kill.
            if not line.endswith(b"\n") or not line.strip():
                continue
            if bad:  # a torn last line is not a fault; this one was not the last
                break
            row = self._row(line, number)
            if row is None:
                bad = number
                continue
            at = row["round"]
            rows[at], size = row, num_values(line)
            held, sizes[at] = held + size - sizes.get(at, 0), size
            if held > METRICS_VALUES:
                raise ConfigError(
                    f"{self.metrics_path} holds more than {METRICS_VALUES:,} values; so many are not read"
                )
        else:
            bad = 0
        if bad:
            raise ConfigError(f"{self.metrics_path}, line {bad} is not a row of a run; remove that line")
        return [rows[key] for key in sorted(rows)]

    def _lines(self) -> Iterator[bytes]:
        with suppress(FileNotFoundError):
            yield from read_lines(
                self.metrics_path, LINE_BYTES, max_bytes=METRICS_BYTES, max_lines=METRICS_LINES
            )

    def _row(self, line: bytes, number: int) -> dict[str, Any] | None:
        """The row in a line; None where there is none."""
        try:
            row = parse_json(line, f"{self.metrics_path}, line {number}")
        except ConfigError:
            return None
        at = row.get("round") if isinstance(row, dict) else None
        known = isinstance(at, int) and not isinstance(at, bool) and 0 <= at <= LAST_ROUND
        return row if known else None

    def amend(self, row: Mapping[str, Any]) -> None:
        """Replace the row of the same round, whichever it is, by a line that takes its place.

        The old line stays until `tidy`: one line costs the same in round 3,000 as in round 3, a reader that
        follows the file sees it come, and a kill leaves the old row or the new one.
        """
        self.append(row)

    def tidy(self) -> None:
        """One line for each round, in their order: what `amend` replaced goes."""
        stored = self._stored()
        if sum(line.endswith(b"\n") for line in self._lines()) > len(stored):
            self._rewrite(stored)

    def truncate(self, round: int) -> None:
        """Forget what came after `round`, so that a resumed run writes its own."""
        self._rewrite([row for row in self._stored() if row["round"] <= round])

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        replace_file(self.metrics_path, "".join(_json(row) + "\n" for row in rows))


def next_run_dir(base: str | Path, name: str) -> Path:
    """base/name, base/name-2, base/name-3, ...: the first that does not exist."""
    path, number = Path(base) / name, 2
    while os.path.lexists(path):
        path, number = Path(base) / f"{name}-{number}", number + 1
    return path


def _refuse_occupied(path: Path) -> None:
    """ConfigError unless `path` is an empty folder; it says what is there."""
    if not path.is_dir():
        raise ConfigError(f"{path} is a file; give --run a folder that does not exist yet")
    try:
        names = list_folder(path)
    except ConfigError as refusal:
        raise ConfigError(f"{refusal}; give --run another folder") from None
    if "recipe.toml" in names or "metrics.jsonl" in names:
        raise ConfigError(
            f"{path} already holds {_which_run(path)}; give --run another folder, or go on with --resume"
        )
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ConfigError(
            f"{path} holds other files ({shown}) and no run; give --run a new or an empty folder"
        )


def _which_run(path: Path) -> str:
    try:
        run = RunDir.open(path)
        done = max((row.round for row in run.rows()), default=0)
        status = run.about.get("status", "status unknown")
        return f'the run "{run.recipe.name}" ({status}, {done} of {run.recipe.outer.rounds} rounds)'
    except ConfigError:
        return "a run that cannot be read"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(finite(value), allow_nan=False, indent=indent)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; a diverged loss becomes null, so that the row still parses."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def _cut_torn_tail(file: BinaryIO) -> None:
    """Drop what follows the last newline, so that no row continues one that a kill cut short."""
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
    """A run in sums: bytes by purpose and by kind of link, what dense methods would have sent, and time."""
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
