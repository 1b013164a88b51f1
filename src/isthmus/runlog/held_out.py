"""Held-out losses of a run that no machine records, as members report them with their updates."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from isthmus.config import Recipe
from isthmus.runlog.facts import Facts, HeldOut
from isthmus.runlog.row import EntryOfManifest, Row


class ReportingManifest(Protocol):
    @property
    def round(self) -> int: ...
    @property
    def entries(self) -> Iterable[EntryOfManifest]: ...


class HeldOutLosses:
    """By round: the loss and who measured it. If two report one round, the first in a manifest counts."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[HeldOut, str]] = {}

    def add(self, manifest: ReportingManifest) -> None:
        """Add a manifest's reports: a commit of round t can report earlier anchors."""
        for entry in manifest.entries:
            self.add_facts(entry.replica, entry.facts, manifest.round - 1)

    def add_facts(self, replica: str, facts: Facts, last: int) -> None:
        """Add one replica's report, also from its farewell after the last round."""
        said = facts.held_out
        if said is not None and said.round <= last:
            self.found.setdefault(said.round, (said, replica))

    @property
    def last(self) -> tuple[HeldOut, str] | None:
        return self.found[max(self.found)] if self.found else None

    def filled(self, row: Row) -> Row:
        """Return the row with its losses, if they are known."""
        if row.round not in self.found:
            return row
        said, _ = self.found[row.round]
        return replace(row, loss_full=said.full, loss_pipelined=said.pipelined, loss_mixed=said.mixed)

    def untrained(self, recipe: Recipe) -> list[Row]:
        """Return row 0, if a member measured it."""
        return [self.filled(Row.untrained(recipe, None, 0.0))] if 0 in self.found else []
