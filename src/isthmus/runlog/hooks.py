"""Functions that get every round of a run: `on_round` of the Python API, and loggers."""

import threading
from collections.abc import Callable, Sequence
from copy import deepcopy

from isthmus.runlog.row import Row

OnRound = Callable[[Row], bool | None]  # False: stop the run at the end of this round


class RoundHooks:
    """Pass each row to every function: once, in the order of rounds, and when it is complete.

    Rows and their losses may come from two threads; the functions run in the thread of `deliver`. If one of
    them returns False or raises, it is not called again, and the run leaves at the end of the round.
    """

    def __init__(self, functions: Sequence[OnRound] = ()) -> None:
        self.functions = list(functions)
        self.rows: list[Row] = []  # not delivered yet
        self.awaited: set[int] = set()  # rounds among these whose losses are still being measured
        self.lock = threading.Lock()
        self.stopped = False
        self.error: Exception | None = None

    def add(self, row: Row, awaited: bool = False) -> None:
        """Add a finished round; `awaited`: its losses come later, by `fill_in`."""
        if not self.functions:
            return
        with self.lock:
            self.rows.append(row)
            if awaited:
                self.awaited.add(row.round)

    def fill_in(self, row: Row) -> None:
        """Complete an awaited row, or give up on its losses."""
        with self.lock:
            if row.round in self.awaited:
                self.awaited.discard(row.round)
                self.rows = [row if each.round == row.round else each for each in self.rows]

    def deliver(self) -> bool:
        """Call the functions for all complete rows; return True if the run must stop."""
        while row := self._next():
            self.functions = [function for function in self.functions if self._goes_on(function, row)]
        return self.stopped

    def _goes_on(self, function: OnRound, row: Row) -> bool:
        try:
            # Pass a copy, so that a function cannot change the run's row.
            goes_on = function(deepcopy(row)) is not False
        except Exception as error:  # the run ends in order first, and then this is raised
            goes_on, self.error = False, error
        self.stopped = self.stopped or not goes_on
        return goes_on

    def _next(self) -> Row | None:
        with self.lock:
            ready = self.rows and self.rows[0].round not in self.awaited
            return self.rows.pop(0) if ready else None

    def raise_error(self) -> None:
        """Raise what a function raised, once the run has ended."""
        if self.error is not None:
            raise self.error
