"""Held-out losses of a run that no machine records, as its members report them with their updates."""

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
    """By round: the loss and who measured it. Of two who report one round, the first in a manifest counts."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[HeldOut, str]] = {}

    def add(self, manifest: ReportingManifest) -> None:
        """A commit of round t can tell of the anchors before it."""
        for entry in manifest.entries:
            self.add_facts(entry.replica, entry.facts, manifest.round - 1)

    def add_facts(self, replica: str, facts: Facts, last: int) -> None:
        """Also of a farewell, which comes after the last round."""
        said = facts.held_out
        if said is not None and said.round <= last:
            self.found.setdefault(said.round, (said, replica))

    @property
    def last(self) -> tuple[HeldOut, str] | None:
        return self.found[max(self.found)] if self.found else None

    def filled(self, row: Row) -> Row:
        """The row with its losses, if they are known."""
        if row.round not in self.found:
            return row
        said, _ = self.found[row.round]
        return replace(row, loss_full=said.full, loss_pipelined=said.pipelined, loss_mixed=said.mixed)

    def untrained(self, recipe: Recipe) -> list[Row]:
        """Row 0, where somebody has measured it."""
        return [self.filled(Row.untrained(recipe, None, 0.0))] if 0 in self.found else []
