"""The outer-round loop, written once: whatever fleet and exchange it is handed."""

import time
from collections.abc import Callable
from typing import Any

from isthmus.config import Recipe
from isthmus.engine import checkpoint
from isthmus.engine.simulated import SimulatedFleet
from isthmus.model.inner import learning_rate
from isthmus.planner.cost import round_seconds
from isthmus.runlog import RunDir
from isthmus.traffic import PURPOSES, dense_round_bytes, inner_step_bytes, outer_bytes

SAVE_SHARE = 0.05  # of the time may go into saving state


def run_rounds(
    recipe: Recipe, fleet: SimulatedFleet, exchange: Any, run: RunDir, view: Any, done: int
) -> None:
    """Rounds done+1 .. R: train, exchange, apply, evaluate, write one row, save."""
    rounds, steps = recipe.outer.rounds, recipe.outer.inner_steps
    saver = Saver(run, fleet)
    if done == 0:
        started = time.perf_counter()
        scores = fleet.evaluate()
        row = start_row(recipe, scores, time.perf_counter() - started)
        run.append(row)
        view.round(row)
    for round_index in range(done, rounds):
        started = time.perf_counter()
        losses, norms, contributions = fleet.train_round(round_index, lambda h: view.inner(h, steps, None))
        trained = time.perf_counter()
        fleet.apply(exchange.close(round_index, contributions))
        fleet.turn_basis((round_index + 1) * steps - 1)
        last = round_index + 1 == rounds
        scores = fleet.evaluate() if last or (round_index + 1) % recipe.data.eval_every == 0 else NO_SCORES
        seconds = time.perf_counter() - started
        per_member = losses.mean(0).tolist()
        row = {
            "round": round_index + 1,
            "inner_steps": (round_index + 1) * steps,
            "tokens": (round_index + 1) * recipe.round_tokens,
            "lr": learning_rate((round_index + 1) * steps - 1, recipe.inner, recipe.num_inner_steps),
            "loss_train": losses.mean().item(),
            "train_by_kind": fleet.by_kind(per_member),
            **scores,
            "grad_norm": norms.mean().item(),
            "seconds": seconds,
            "tokens_per_second": recipe.round_tokens / seconds,
            "fleet_seconds": round_seconds(recipe, (trained - started) / steps / recipe.num_replicas),
            "bytes": counted_bytes(recipe, exchange.take_counts()),
            "dense_bytes": dict(dense_round_bytes(recipe)),
        }
        # Row before state: a row without its state is cut off and run again, a state without its row would
        # lose it.
        run.append(row)
        saver.save(round_index + 1, last)
        view.round(row)


NO_SCORES = {"loss_full": None, "loss_pipelined": None, "loss_mixed": None, "loss_by_kind": {}}


def start_row(recipe: Recipe, scores: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Row 0: the untrained model."""
    return {
        "round": 0,
        "inner_steps": 0,
        "tokens": 0,
        "lr": learning_rate(0, recipe.inner, recipe.num_inner_steps),
        "loss_train": None,
        "train_by_kind": {},
        **scores,
        "grad_norm": None,
        "seconds": seconds,
        "tokens_per_second": None,
        "fleet_seconds": 0.0,
        "bytes": dict.fromkeys(PURPOSES, 0),
        "dense_bytes": {"stages": 0, "replicas": 0},
    }


def counted_bytes(recipe: Recipe, payloads: dict[str, int]) -> dict[str, int]:
    """One round's bytes by purpose: payloads as the exchange counted them, stage links by their shapes."""
    total = dict.fromkeys(PURPOSES, 0) | payloads
    for member in recipe.fleet():
        for purpose, count in inner_step_bytes(recipe, member).items():
            total[purpose] += recipe.outer.inner_steps * count
        if recipe.outer.method == "adamw":  # its all-reduce is not acted out
            up, down = outer_bytes(recipe, member)
            total["payload_up"] += up
            total["payload_down"] += down
    return total


class Saver:
    """Saves at round edges, as often as it may without taking more than its share of the time."""

    def __init__(
        self, run: RunDir, fleet: SimulatedFleet, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.fleet, self.clock = run, fleet, clock
        self.cost, self.last = 0.0, -float("inf")

    def save(self, rounds: int, force: bool) -> None:
        now = self.clock()
        if not force and (now - self.last) * SAVE_SHARE < self.cost:
            return
        checkpoint.save(self.run.state_path, rounds, self.fleet.state())
        self.last = self.clock()
        self.cost = self.last - now
