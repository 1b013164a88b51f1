"""Records a run from its bucket alone: replays it, scores it, and writes the run directory."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import init_tensor
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.replay import Replay
from isthmus.replica.evaluate import Scorer
from isthmus.runlog import REAL, About, Row, RunDir
from isthmus.runlog.facts import Facts
from isthmus.runlog.live import View
from isthmus.runlog.row import Scores
from isthmus.store.retry import StoreError
from isthmus.subspace.boundaries import BasisSet


class Recorder:
    """A reader of the ledger: replays every round as the replicas did, scores it, and adds a row.

    In a run directory that has rows already it goes on after the last of them. `pause` is (a round, the
    seconds of it in which the run was stopped).
    """

    def __init__(
        self,
        ledger: Ledger,
        corpus: Corpus,
        run: RunDir,
        view: View,
        pause: tuple[int, float] = (0, 0.0),
    ) -> None:
        self.ledger, self.run, self.view, self.pause = ledger, run, view, pause
        self.recipe: Recipe = ledger.run.recipe
        rows = run.rows()
        done = rows[-1].round if rows else 0
        self.replay = Replay(ledger, done)
        while self.replay.round < done and self.replay.step():
            pass
        cpu = torch.device("cpu")
        anchor = self.replay.anchor[EMBEDDING]
        self.scorer = Scorer(self.recipe, corpus, BasisSet(self.recipe, cpu, anchor.dtype), cpu, anchor.dtype)
        self.table = anchor
        if not self.recipe.subspace.adaptation:  # then T_perp stays at its first value; see check_trainable
            shape = tuple(anchor.shape)
            self.table = init_tensor(EMBEDDING, shape, self.recipe.model, self.recipe.seed).to(anchor.dtype)
        self.frozen_round = -1  # the round whose embedding the scorer keeps
        self.last = rows[-1] if rows else self._append(Row.untrained(self.recipe, self._scores(), 0.0))

    def _scores(self) -> Scores:
        self.scorer.bases.begin_round(self.replay.round)
        return self.scorer.score(self.replay.anchor, self.table)

    def _append(self, row: Row) -> Row:
        self.run.append(row)
        self.view.round(row)
        return row

    def advance(self) -> Manifest | None:
        """Record one more round, if it is settled."""
        if self.frozen_round != self.replay.round:  # the next step changes the anchor in place
            self.scorer.hold(self.table)
            self.frozen_round = self.replay.round
        manifest = self.replay.step()
        if manifest is None:
            return None
        if manifest.round == self.pause[0]:
            manifest = replace(manifest, seconds=max(manifest.seconds - self.pause[1], 1e-3))
        scores = self._scores() if self.recipe.is_scored(manifest.round) else None
        row = Row.from_manifest(self.recipe, manifest, self.last.tokens, scores, self.replay.digest())
        self.last = self._append(row)
        return manifest

    def record(self, stop: Callable[[], bool], poll_seconds: float = 0.5) -> None:
        """Record until the last round is settled, or `stop` says so and no settled round is left."""
        while self.replay.round < self.recipe.outer.rounds:
            over = stop()
            try:
                settled = self.advance()
            except StoreError as error:  # a reader waits until the store is back
                if error.kind not in ("network", "busy", "slow"):
                    raise
                self.view.note(f"{error}; still trying")
                settled = None
            if settled is None:
                if over:
                    return
                time.sleep(poll_seconds)

    def add_farewells(self, ended: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
        """Add to the last row what the replicas counted after their last commits: the sums are exact."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            over = ended() or time.monotonic() > deadline
            found = farewells(self.ledger)
            if over or len(found) == self.recipe.num_replicas:
                break
            time.sleep(0.2)
        if self.last.round > 0:
            self.last.add_farewells(self.recipe, found)
            self.run.amend(self.last)


def farewells(ledger: Ledger) -> dict[str, Facts]:
    """What the replicas that have ended counted after their last commits."""
    beats = {member.name: ledger.heartbeat(member.name) for member in ledger.run.recipe.fleet()}
    return {name: beat[0].farewell for name, beat in beats.items() if beat and beat[0].gone}


def write_from_bucket(ledger: Ledger, path: str | Path) -> RunDir:
    """A run directory from a bucket alone, for a run that was joined and that no machine records: what the
    replicas reported, without a replay. Held-out losses are not in it."""
    recipe, last = ledger.run.recipe, ledger.last_round()
    rows = [Row.untrained(recipe, None, 0.0)]
    for t in range(1, last + 1):
        manifest = ledger.manifest(t)
        assert manifest is not None, "rounds are settled one after another"
        rows.append(Row.from_manifest(recipe, manifest, rows[-1].tokens))
    if last:
        rows[-1].add_farewells(recipe, farewells(ledger))
    about = About(
        mode=REAL,
        parameters=recipe.model.num_parameters,
        corpus=recipe.data.corpus,
        status="finished" if last == recipe.outer.rounds else "running",
    )
    run = RunDir.create(path, recipe, about)
    for row in rows:
        run.append(row)
    return run
