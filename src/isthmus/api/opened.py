"""Read a run, from its folder or its bucket, while it goes on and after."""

import os
from abc import ABC, abstractmethod
from functools import cached_property
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
    """What a run has recorded. Its rows are read once; `refresh` reads again."""

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
        """One row per round; row 0 is the model before training."""

    @abstractmethod
    def weights(self, round: int | None = None) -> "dict[str, Tensor]":
        """The model's tensors by name after `round`; by default after the newest."""

    @property
    def config(self) -> dict[str, Any]:
        """The recipe as plain tables, like its file."""
        return as_tables(self.recipe)

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
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
        from isthmus.export.source import newest_params
        from isthmus.protocol.place import has_bucket

        found = newest_params(self.run)
        if found and round in (None, found[0]):
            return found[1]
        if has_bucket(self.run):
            from isthmus.protocol.access import open_ledger

            return replayed(open_ledger(self.where), round)
        if found:
            raise ConfigError(f"{self.where} keeps its newest weights only, of round {found[0]}")
        raise ConfigError(f"{self.where} has no saved round yet; there are no weights to take from it")


class BucketRun(Run):
    """The bucket of a fleet, given by its URL or folder."""

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
        """Read the fleet again, too: replicas come and go, rounds are added."""
        super().refresh()
        self.ledger.look()
        self.recipe = self.ledger.run.recipe

    def weights(self, round: int | None = None) -> "dict[str, Tensor]":
        return replayed(self.ledger, round)


def open_run(where: str | os.PathLike[str]) -> Run:
    """Open a run by its folder, or by the URL or folder of its bucket. It writes nothing."""
    from isthmus.protocol.place import find_place

    place = find_place(os.fspath(where))
    return FolderRun(place.run) if place.run else BucketRun(place.bucket)


def replayed(ledger: "Ledger", round: int | None) -> "dict[str, Tensor]":
    """Return theta^(round) from a bucket."""
    from isthmus.export.source import replayed as replay_to

    last = ledger.last_round()
    wanted = last if round is None else round
    if not 0 <= wanted <= last:
        raise ConfigError(f"round {wanted} is not settled; this run has the rounds 0 to {last}")
    return dict(replay_to(ledger, wanted).anchor)
