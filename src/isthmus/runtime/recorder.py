"""Record a run from its bucket alone: a row when a round is settled, its losses once they are known."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch
from msgspec.structs import replace

from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.recorded import bucket_rows, farewells
from isthmus.protocol.replay import Replay
from isthmus.runlog import REAL, About, Row, RunDir
from isthmus.runlog.live import View
from isthmus.runlog.row import Scores
from isthmus.runlog.words import rounds_in_words
from isthmus.runtime.scoring import ScoredAnchor, ScoringDevice, Stopped
from isthmus.store.retry import StoreError

ANSWER_SECONDS = 5.0  # the most a store may take to say whether a round is settled


class Recorder:
    """Reads the ledger. `advance` adds a row as soon as a round is settled, from its manifest alone.
    `fill_in` replays the rounds as the replicas did, scores them, and updates their rows.

    `Scoring` calls `fill_in` in a separate thread: it may lag by rounds without delaying the rows or the
    fleet. In a run directory with rows, both continue after those. `pause` is (a round, the seconds during
    which the run was stopped in it).
    """

    def __init__(
        self,
        ledger: Ledger,
        corpus: Corpus,
        run: RunDir,
        view: View,
        pause: tuple[int, float] = (0, 0.0),
        where: Sequence[ScoringDevice] = (ScoringDevice(),),
    ) -> None:
        self.ledger, self.run, self.view, self.pause = ledger, run, view, pause
        self.recipe: Recipe = ledger.run.recipe
        self.stopped = threading.Event()
        self.anchor = ScoredAnchor(ledger, corpus, list(where), view.note, self.stopped)
        self.changed = threading.Condition()  # guards rows, on disk and here
        self.fault = ""  # why losses are no longer measured
        rows = run.rows()
        # The recorded rows that still lack losses; the file has all rows.
        self.waiting = {row.round: row for row in rows if not row.is_filled_in(self.recipe)}
        for row in self.waiting.values():
            view.hooks.add(row, awaited=True)
        if rows:
            self.last = rows[-1]
        else:
            self.last = self._append(Row.untrained(self.recipe, None, 0.0))

    @property
    def replay(self) -> Replay:
        """The replay at the newest replayed round."""
        return self.anchor.replay

    # Rows

    def _append(self, row: Row) -> Row:
        with self.changed:
            self.run.append(row)
            self.waiting[row.round] = row
            self.view.round(row, awaited=self.recipe.is_scored(row.round) and not self.fault)
            self.changed.notify_all()
        return row

    def advance(self) -> Manifest | None:
        """Record one more round, if it is settled."""
        manifest = self.ledger.manifest(self.last.round + 1)
        if manifest is None:
            return None
        if manifest.round == self.pause[0]:
            manifest = replace(manifest, seconds=max(manifest.seconds - self.pause[1], 1e-3))
        self.last = self._append(Row.from_manifest(self.recipe, manifest, self.last.tokens))
        return manifest

    def record(self, stop: Callable[[], bool], poll_seconds: float = 0.1) -> None:
        """Record until the last round is settled, or `stop` returns True and no settled round is left."""
        away = False
        while self.last.round < self.recipe.outer.rounds:
            over, settled = stop(), None
            try:
                # Briefly: the replicas are not supervised meanwhile.
                if self.ledger.settled_at(self.last.round + 1, time.monotonic() + ANSWER_SECONDS) is not None:
                    settled = self.advance()
                away = False
            except StoreError as error:  # a reader waits until the store is back
                if error.lasting:
                    raise
                if not away:
                    self.view.note(f"{error}; still trying")
                away = True
            if settled is None:
                if over:
                    return
                time.sleep(poll_seconds)

    def add_farewells(self, ended: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
        """Add the replicas' counts after their last commits to the last row, so that the sums are exact."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            over = ended() or time.monotonic() > deadline
            found = farewells(self.ledger)
            if over or len(found) == self.recipe.num_replicas:
                break
            time.sleep(0.2)
        if self.last.round > 0:
            with self.changed:
                self.last.add_farewells(self.recipe, found)
                self.run.amend(self.last)

    # Losses

    def fill_in(self) -> bool:
        """Replay and score the oldest round whose row lacks losses; False if there is none."""
        with self.changed:
            if not self.waiting:
                return False
            wanted = min(self.waiting)
        reached, scores, digest = self.anchor.somewhere(lambda: self._measure(wanted))
        self.anchor.check()
        with self.changed:
            skipped = [self.waiting.pop(t) for t in sorted(self.waiting) if t < reached]
            if row := self.waiting.pop(reached, None):
                row.fill_in(scores, digest)
                self.run.amend(row)
            for each in (*skipped, *([row] if row else [])):
                self.view.losses(each)
        if lost := [row.round for row in skipped if self.recipe.is_scored(row.round)]:
            self.view.note(
                f"no held-out losses of {rounds_in_words(lost)}: payloads were swept before they were scored"
            )
        return True

    def _measure(self, wanted: int) -> tuple[int, Scores | None, str]:
        reached = self.anchor.reach(wanted)
        scored = self.recipe.is_scored(reached) and not self.fault
        return reached, *self.anchor.with_digest(self._scores_or_none if scored else lambda: None)

    def _scores_or_none(self) -> Scores | None:
        """The scores, or None. A failure ends the losses, not the run; the anchor goes on."""
        try:
            return self._scores()
        except Stopped:
            raise
        except Exception as error:
            if self.anchor.may_move(error):
                raise
            self.fail(error)
            return None

    def _scores(self) -> Scores:
        return self.anchor.scores()

    def fail(self, error: Exception) -> None:
        """Stop measuring losses."""
        self.fault = (str(error).splitlines() or [""])[0] or type(error).__name__
        self.view.note(f"no more held-out losses: {self.fault}; the fleet goes on")
        with self.changed:
            for row in self.waiting.values():
                self.view.losses(row)

    def has_last_anchor(self) -> bool:
        """Whether `replay` is at the last recorded round."""
        return self.anchor.held is not None and self.anchor.held.round == self.last.round

    def problem(self) -> str:
        """The rounds that could not be scored, and why; empty if there are none."""
        if not self.fault:
            return ""
        unscored = [row.round for row in self.run.rows() if not row.is_filled_in(self.recipe)]
        which = f"{rounds_in_words(unscored)} could" if unscored else "the last anchor could"
        return f"{which} not be scored: {self.fault}"


class Scoring(threading.Thread):
    """Fills in a recorder's rows while it records; a context manager."""

    RETRY_SECONDS = 1.0  # while the store is down

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(daemon=True, name="scoring")
        self.recorder, self.ended = recorder, False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.recorder.stopped.set()
        self._end()
        self.join(timeout=10)

    def run(self) -> None:
        torch.set_num_threads(1)  # the replicas need the cores more
        recorder = self.recorder
        while True:
            with recorder.changed:
                recorder.changed.wait_for(lambda: recorder.waiting or self.ended)
            try:
                if not recorder.fill_in():  # the last round is recorded, and its anchor is the model
                    recorder.anchor.somewhere(lambda: recorder.anchor.reach(recorder.last.round))
                    return
            except Stopped:
                return
            except StoreError as error:
                if not error.passes:
                    return recorder.fail(error)
                recorder.stopped.wait(self.RETRY_SECONDS)
            except Exception as error:
                return recorder.fail(error)

    def finish(self) -> None:
        """Wait until every recorded round is scored; log a note if that takes a while."""
        self._end()
        self.join(timeout=1.0)
        with self.recorder.changed:
            rounds = [t for t in sorted(self.recorder.waiting) if self.recorder.recipe.is_scored(t)]
        if self.is_alive() and rounds:
            self.recorder.view.note(f"scoring {rounds_in_words(rounds)}")
        while self.is_alive():  # so that Ctrl-C works
            self.join(timeout=0.5)

    def _end(self) -> None:
        with self.recorder.changed:
            self.ended = True
            self.recorder.changed.notify_all()


def write_from_bucket(ledger: Ledger, path: str | Path) -> RunDir:
    """Write a run directory from a bucket alone, for a joined run that no machine records: the replicas'
    reports, without a replay; held-out losses if one of them measured any."""
    recipe, rows = ledger.run.recipe, bucket_rows(ledger)
    about = About(
        mode=REAL,
        parameters=recipe.model.num_parameters,
        corpus=recipe.data.corpus,
        status="finished" if rows[-1].round == recipe.outer.rounds else "running",
    )
    run = RunDir.create(path, recipe, about)
    for row in rows:
        run.append(row)
    return run
