"""Follows a run from the bucket alone and writes its run directory: rows, losses, bytes."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.layout.stages import EMBEDDING
from isthmus.layout.traffic import PURPOSES, dense_round_bytes
from isthmus.model.inner import learning_rate
from isthmus.model.llama import init_tensor
from isthmus.planner.cost import round_seconds
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.replay import Replay
from isthmus.replica.evaluate import Scorer
from isthmus.runlog import Row, RunDir
from isthmus.runlog.kinds import add_farewell, by_kind, measured_by_kind
from isthmus.runtime.create import GONE
from isthmus.simulator.rounds import NO_SCORES, start_row
from isthmus.store.retry import StoreError
from isthmus.subspace.boundaries import BasisSet


class Recorder:
    """A reader of the ledger: replays every round as the replicas did, scores it, and adds a row.

    In a run directory that has rows already it goes on after the last of them. `away` is a round during which
    nobody trained for so many seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        corpus: Corpus,
        run: RunDir,
        view: Any,
        away: tuple[int, float] = (0, 0.0),
    ) -> None:
        self.ledger, self.run, self.view, self.away = ledger, run, view, away
        self.recipe: Recipe = ledger.run.recipe
        rows = run.rows()
        done = rows[-1]["round"] if rows else 0
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
        self.held = -1  # the round whose embedding the scorer holds
        if not rows:
            self.row(start_row(self.recipe, self._scores(), 0.0))

    def _scores(self) -> dict[str, Any]:
        self.scorer.bases.begin_round(self.replay.round)
        return self.scorer.score(self.replay.anchor, self.table)

    def row(self, row: dict[str, Any]) -> None:
        self.run.append(row)
        self.view.round(row)

    def advance(self) -> Manifest | None:
        """One round further, if it is settled."""
        if self.held != self.replay.round:  # the next step changes the anchor in place
            self.scorer.hold(self.table)
            self.held = self.replay.round
        manifest = self.replay.step()
        if manifest is None:
            return None
        recipe, t = self.recipe, manifest.round
        if t == self.away[0]:
            manifest = replace(manifest, seconds=max(manifest.seconds - self.away[1], 1e-3))
        due = recipe.is_scored(t)
        row = row_from_manifest(
            recipe, manifest, self.run.rows()[-1]["tokens"], self._scores() if due else NO_SCORES
        )
        row["anchor"] = self.replay.digest()
        self.row(row)
        return manifest

    def farewell(self, ended: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
        """What the replicas counted after their last commits joins the last row: the run's sums are exact."""
        last, deadline = self.run.rows()[-1], time.monotonic() + timeout_seconds
        while True:
            over = ended() or time.monotonic() > deadline
            said = farewells(self.ledger)
            if over or len(said) == self.recipe.num_replicas:
                break
            time.sleep(0.2)
        if last["round"] == 0:
            return
        join_farewells(last, self.recipe, said)
        self.run.amend(last)

    def follow(self, stop: Callable[[], bool], poll_seconds: float = 0.5) -> None:
        """Until the last round is settled, or nothing is settled any more after `stop` said so."""
        while self.replay.round < self.recipe.outer.rounds:
            over = stop()
            try:
                settled = self.advance()
            except StoreError as error:  # who only looks on waits for the store to come back
                if error.kind not in ("network", "busy", "slow"):
                    raise
                self.view.note(f"{error}; still trying")
                settled = None
            if settled is None:
                if over:
                    return
                time.sleep(poll_seconds)


def row_from_manifest(recipe: Recipe, manifest: Manifest, tokens_before: int, scores: dict[str, Any]) -> Row:
    """One settled round as its replicas told it."""
    t, steps = manifest.round, recipe.outer.inner_steps
    entries = {entry.replica: entry.facts for entry in manifest.entries}
    took_part = [member for member in recipe.fleet() if member.name in entries]
    losses = [float(entries[m.name].get("loss") or 0.0) for m in took_part]
    tokens = len(took_part) * steps * recipe.inner.batch * recipe.model.context
    # Bytes as the replicas counted them, from one commit to the next: a round's downloads are told with
    # the next round's commit, and the last round's with the farewell.
    counts = dict.fromkeys(PURPOSES, 0)
    for facts in entries.values():
        for purpose, count in facts.get("bytes", {}).items():
            counts[purpose] = counts.get(purpose, 0) + int(count)
    return {
        "round": t,
        "inner_steps": t * steps,
        "tokens": tokens_before + tokens,
        "lr": learning_rate(t * steps - 1, recipe.inner, recipe.num_inner_steps),
        "loss_train": sum(losses) / len(losses),
        "train_by_kind": by_kind(took_part, losses),
        **scores,
        "grad_norm": sum(float(f.get("grad_norm") or 0) for f in entries.values()) / len(entries),
        "seconds": manifest.seconds,
        "tokens_per_second": tokens / max(manifest.seconds, 1e-9),
        "fleet_seconds": round_seconds(recipe.in_round(t), manifest.seconds / steps),
        "bytes": counts,
        "dense_bytes": dict(dense_round_bytes(recipe, took_part)),
        "measured": measured_by_kind(took_part, entries),
        "contributors": [entry.replica for entry in manifest.entries],
        "refused": {name: reason for name, reason in manifest.refused},
    }


def farewells(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """What those who are gone counted after their last commits."""
    beats = {member.name: ledger.heartbeat(member.name) for member in ledger.run.recipe.fleet()}
    gone = {name: beat[0] for name, beat in beats.items() if beat and beat[0].get("state") in GONE}
    return {name: body.get("farewell") or {} for name, body in gone.items()}


def join_farewells(row: Row, recipe: Recipe, said: dict[str, dict[str, Any]]) -> None:
    for farewell in said.values():
        for purpose, count in farewell.get("bytes", {}).items():
            row["bytes"][purpose] = row["bytes"].get(purpose, 0) + int(count)
    add_farewell(row, recipe.fleet(), said)


def write_from_bucket(ledger: Ledger, path: str | Path) -> RunDir:
    """A run directory from a bucket alone, of what replicas told and nothing replayed: for runs that were
    joined, which no machine follows. Held-out losses are not in it."""
    recipe, last = ledger.run.recipe, ledger.last_round()
    rows = [start_row(recipe, NO_SCORES, 0.0)]
    for t in range(1, last + 1):
        rows.append(row_from_manifest(recipe, ledger.manifest(t), rows[-1]["tokens"], NO_SCORES))
    if last:
        join_farewells(rows[-1], recipe, farewells(ledger))
    about = {
        "mode": "real processes",
        "parameters": recipe.model.num_parameters,
        "corpus": recipe.data.corpus,
    }
    about["status"] = "finished" if last == recipe.outer.rounds else "running"
    run = RunDir.create(path, recipe, about)
    for row in rows:
        run.append(row)
    return run
