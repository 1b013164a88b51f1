"""The rounds of a simulated run: train, evaluate, write a row, save."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from isthmus.config import Recipe
from isthmus.layout.traffic import PURPOSES, dense_round_bytes, inner_step_bytes, outer_bytes
from isthmus.model import checkpoint
from isthmus.model.inner import learning_rate
from isthmus.outer.rounds import run_rounds
from isthmus.planner.cost import round_seconds
from isthmus.runlog import RunDir
from isthmus.runlog.kinds import by_kind, measured_by_kind

SAVE_SHARE = 0.05  # of the time may go into saving state


class Rows(Protocol):
    """Where rows go: a run directory, or whatever else takes them."""

    def append(self, row: Mapping[str, Any]) -> None: ...


def simulate_rounds(
    recipe: Recipe,
    fleet: Any,
    exchange: Any,
    run: Rows,
    view: Any,
    done: int = 0,
    saver: "Saver | None" = None,
) -> None:
    """The rounds of a simulated run: after each, evaluate, write one row, save where there is a saver."""
    rounds, steps = recipe.outer.rounds, recipe.outer.inner_steps
    clock = time.perf_counter()
    if done == 0:
        scores = fleet.evaluate()
        row = start_row(recipe, scores, time.perf_counter() - clock)
        run.append(row)
        view.round(row)
        clock = time.perf_counter()
    fleet.scorer.hold(fleet.table)

    def after(round_number: int, trained_seconds: float) -> None:
        nonlocal clock
        last = round_number == rounds
        scores = fleet.evaluate() if recipe.is_scored(round_number) else NO_SCORES
        seconds = time.perf_counter() - clock
        each = trained_seconds / recipe.num_replicas
        now = recipe.in_round(round_number)
        sent = counted_bytes(now, exchange.pop_counts())
        row = {
            "round": round_number,
            "inner_steps": round_number * steps,
            "tokens": round_number * recipe.round_tokens,
            "lr": learning_rate(round_number * steps - 1, recipe.inner, recipe.num_inner_steps),
            "loss_train": fleet.losses.mean().item(),
            "train_by_kind": by_kind(fleet.members, fleet.losses.mean(0).tolist()),
            **scores,
            "grad_norm": fleet.norms.mean().item(),
            "seconds": seconds,
            "tokens_per_second": recipe.round_tokens / seconds,
            "fleet_seconds": round_seconds(now, each / steps),
            "bytes": {purpose: sum(counts[purpose] for counts in sent.values()) for purpose in PURPOSES},
            "dense_bytes": dict(dense_round_bytes(recipe)),
            "measured": measured_by_kind(
                fleet.members,
                {name: {"seconds": each, "bytes": counts} for name, counts in sent.items()},
            ),
        }
        # Row before state: a row without its state is cut off and run again, a state without its row would
        # lose it.
        run.append(row)
        if saver:
            saver.save(round_number, last)
        fleet.scorer.hold(fleet.table)
        view.round(row)
        clock = time.perf_counter()

    run_rounds(fleet, exchange, range(done + 1, rounds + 1), lambda h: view.inner(h, steps, None), after)


NO_SCORES = {
    "loss_full": None,
    "loss_pipelined": None,
    "loss_mixed": None,
    "loss_by_kind": {},
    "bias": {},
}


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
        "measured": {},
    }


def counted_bytes(recipe: Recipe, payloads: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """One round's bytes of every replica by purpose: payloads as the exchange counted them, stage links by
    their shapes."""
    sent = {}
    for member in recipe.fleet():
        total = sent[member.name] = dict.fromkeys(PURPOSES, 0) | payloads[member.name]
        for purpose, count in inner_step_bytes(recipe, member).items():
            total[purpose] += recipe.outer.inner_steps * count
        if recipe.outer.method == "adamw":  # its all-reduce is not acted out
            up, down = outer_bytes(recipe, member)
            total["payload_up"] += up
            total["payload_down"] += down
    return sent


class Saver:
    """Saves at round edges, as often as it may without taking more than its share of the time."""

    def __init__(self, run: RunDir, fleet: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self.fleet, self.clock = run, fleet, clock
        self.cost, self.last = 0.0, -float("inf")

    def save(self, rounds: int, force: bool) -> None:
        now = self.clock()
        if not force and (now - self.last) * SAVE_SHARE < self.cost:
            return
        checkpoint.save(self.run.state_path, rounds, self.fleet.state())
        self.last = self.clock()
        self.cost = self.last - now
