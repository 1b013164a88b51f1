"""Write rounds to a TensorBoard event file with tensorboardX."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.runlog import Row

SCALARS = {
    "loss_full": "held-out/full",
    "loss_pipelined": "held-out/pipelined",
    "loss_mixed": "held-out/mixed",
    "loss_train": "train/all",
    "grad_norm": "inner/grad_norm",
    "lr": "inner/lr",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/round_seconds",
}
LATER = "held-out"  # the beginning of tags that a row may get later than others


class Follower(ABC):
    """Write each round's values once, and late ones once they are known: a watched page shows a round before
    its losses are measured."""

    def __init__(self, started: str = "") -> None:
        self.done = -1  # the newest round written
        self.unscored: set[int] = set()  # written rounds that had no held-out loss yet
        try:
            self.began = datetime.fromisoformat(started).timestamp()
        except ValueError:
            self.began = time.time()

    def add(self, rows: list[Row]) -> None:
        """Write new rounds; a round's time is the run's start plus the seconds of all rounds up to it."""
        at = self.began
        for row in rows:
            at += row.seconds or 0.0
            scored = row.loss_full is not None
            if row.round > self.done:
                self.write(at, row.round, dict(scalars(row)))
                self.done = row.round
                self.unscored |= set() if scored else {row.round}
            elif scored and row.round in self.unscored:
                later = {tag: value for tag, value in scalars(row) if tag.startswith(LATER)}
                self.write(at, row.round, later)
                self.unscored.discard(row.round)

    @abstractmethod
    def write(self, at: float, round: int, values: Mapping[str, float]) -> None:
        """Write one round's values; for late losses, only those."""


class EventWriter(Follower):
    """Append an event per round to its own file in `folder`, and a second one for late losses."""

    def __init__(self, folder: Path, started: str = "") -> None:
        super().__init__(started)
        # These import torch, which takes seconds, so load them only for event files.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self.event, self.summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = EventsWriter(str(folder / "events"), f".{os.getpid()}.isthmus")
        except OSError as error:
            raise ConfigError(
                f"cannot write TensorBoard files to {folder}: {error.strerror}; give --tensorboard a folder"
            ) from None

    def write(self, at: float, round: int, values: Mapping[str, float]) -> None:
        shown = [self.summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.file.write_event(self.event(wall_time=at, step=round, summary=self.summary(value=shown)))

    def add(self, rows: list[Row]) -> None:
        super().add(rows)
        self.file.flush()


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) for everything that a row knows."""
    named: list[tuple[str, float | None]] = [(tag, row[field]) for field, tag in SCALARS.items()]
    named += [(f"train/{kind}", value) for kind, value in row.train_by_kind.items()]
    named += [(f"held-out by kind/{kind}", value) for kind, value in row.loss_by_kind.items()]
    named += [(f"bytes/{purpose}", value) for purpose, value in row.bytes.items()]
    return ((tag, float(value)) for tag, value in named if value is not None)
