"""A run to look at: the folder of one, or its bucket, while it goes on and after."""

import os
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.config import Recipe
from isthmus.config.toml import as_tables
from isthmus.errors import ConfigError
from isthmus.runlog import REAL, About, Row, RunDir
from isthmus.runlog.results import to_frame
from isthmus.runlog.words import sentences

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingImports] - an extra
    from torch import Tensor

    from isthmus.protocol.ledger import Ledger


class Run(ABC):
    """What a run has written down. Its rows are read once; `refresh` looks again."""

    def __init__(self, where: str, recipe: Recipe) -> None:
        self.where, self.recipe = where, recipe

    def __repr__(self) -> str:
        return f"<isthmus run {self.recipe.name} in {self.where}>"

    @property
    @abstractmethod
    def about(self) -> About:
        """Facts of the whole run: versions, device, status."""

    @property
    @abstractmethod
    def rows(self) -> list[Row]:
        """A row for each round; row 0 is the model before training."""

    @abstractmethod
    def weights(self, round: int | None = None) -> "dict[str, Tensor]":
        """The model's tensors by name after `round`: the newest that there is, when not given."""

    @property
    def config(self) -> dict[str, Any]:
        """The recipe as plain tables, as its file has them."""
        return as_tables(self.recipe)

    @property
    def rounds(self) -> int:
        """How many rounds are done."""
        return max((row.round for row in self.rows), default=0)

    @property
    def status(self) -> str:
        """running, finished, interrupted or failed."""
        return self.about.get("status") or "running"

    def refresh(self) -> None:
        for name in ("about", "rows"):
            vars(self).pop(name, None)

    def to_frame(self) -> "pd.DataFrame":
        """The rows as a pandas frame, with the round as its index."""
        return to_frame(self.rows)

    def summary(self) -> str:
        """The run in plain words."""
        return "\n".join(sentences(self.recipe, self.about, self.rows))


class FolderRun(Run):
    """The folder of `simulate`, `train` or `report --to`."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(str(run.path), run.recipe)
        self.run = run

    @cached_property
    def about(self) -> About:
        return self.run.about

    @cached_property
    def rows(self) -> list[Row]:
        return self.run.rows()

    def weights(self, round: int | None = None) -> "dict[str, Tensor]":
        from isthmus.export.source import has_bucket, newest_params

        found = newest_params(self.run)
        if found and round in (None, found[0]):
            return found[1]
        if has_bucket(self.run):
            from isthmus.protocol.access import bucket_to_read, open_ledger

            return replayed(open_ledger(bucket_to_read(self.run, self.where)), round)
        if found:
            raise ConfigError(f"{self.where} keeps its newest weights only, of round {found[0]}")
        raise ConfigError(f"{self.where} has no saved round yet; there are no weights to take from it")


class BucketRun(Run):
    """The bucket of a fleet, by its URL or folder."""

    def __init__(self, where: str) -> None:
        from isthmus.protocol.access import open_ledger

        self.ledger: Ledger = open_ledger(where)
        super().__init__(where, self.ledger.run.recipe)

    @cached_property
    def about(self) -> About:
        return About(
            mode=REAL,
            parameters=self.recipe.model.num_parameters,
            corpus=self.recipe.data.corpus,
            status="finished" if self.rounds == self.recipe.outer.rounds else "running",
        )

    @cached_property
    def rows(self) -> list[Row]:
        from isthmus.protocol.recorded import bucket_rows

        return bucket_rows(self.ledger)

    def refresh(self) -> None:
        """The fleet itself may have changed: replicas come and go, rounds are added."""
        super().refresh()
        self.ledger.membership.look()
        self.recipe = self.ledger.run.recipe

    def weights(self, round: int | None = None) -> "dict[str, Tensor]":
        return replayed(self.ledger, round)


def open_run(where: str | os.PathLike[str]) -> Run:
    """A run by its folder, or by the URL or folder of its bucket. Nothing is written."""
    given = os.fspath(where)
    path = Path(given).expanduser()
    if "://" in given or ((path / "run.json").is_file() and not (path / "recipe.toml").is_file()):
        return BucketRun(given if "://" in given else str(path))
    return FolderRun(RunDir.open(path))


def replayed(ledger: "Ledger", round: int | None) -> "dict[str, Tensor]":
    """theta^(round) from a bucket: the newest anchor before it, and the rounds since."""
    from isthmus.protocol.chain import gone
    from isthmus.protocol.replay import Replay

    last = ledger.last_round()
    wanted = last if round is None else round
    if not 0 <= wanted <= last:
        raise ConfigError(f"round {wanted} is not settled; this run has the rounds 0 to {last}")
    replay = Replay(ledger, wanted)
    while replay.round < wanted:
        if replay.step() is None:
            raise gone(replay.round + 1)
    return dict(replay.anchor)
