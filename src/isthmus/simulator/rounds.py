"""The rounds of a simulated run: train, evaluate, write a row, save."""

import time
from collections.abc import Callable
from typing import Protocol

from isthmus.config import Recipe
from isthmus.disk import explain_disk_full
from isthmus.layout.traffic import PURPOSES, inner_step_bytes, outer_bytes
from isthmus.model import checkpoint
from isthmus.outer.rounds import run_rounds
from isthmus.runlog import Row, RunDir
from isthmus.runlog.facts import Facts
from isthmus.runlog.live import View
from isthmus.simulator.exchange import ExchangingFleet, LocalExchange
from isthmus.simulator.fleet import SimulatedFleet

SAVE_SHARE = 0.05  # of the time that saving state may take


class RowSink(Protocol):
    """A receiver of rows: a run directory, or any other."""

    def append(self, row: Row, /) -> None: ...


def simulate_rounds(
    recipe: Recipe,
    fleet: SimulatedFleet,
    exchange: LocalExchange,
    run: RowSink,
    view: View,
    done: int = 0,
    saver: "Saver | None" = None,
    leave: Callable[[], bool] = lambda: False,
) -> bool:
    """Run the rounds after `done`. After each: evaluate, write one row, save if there is a saver. Return
    False if `leave` or one of the view's hooks ended it between two rounds."""
    rounds, steps = recipe.outer.rounds, recipe.outer.inner_steps
    clock = time.perf_counter()
    if done == 0:
        scores = fleet.evaluate()
        row = Row.untrained(recipe, scores, time.perf_counter() - clock)
        run.append(row)
        view.round(row)
        view.hooks.deliver()
        clock = time.perf_counter()

    def after(round_number: int, trained_seconds: float) -> None:
        nonlocal clock
        scores = fleet.evaluate() if recipe.is_scored(round_number) else None
        seconds = time.perf_counter() - clock
        sent = counted_bytes(recipe.in_round(round_number), exchange.pop_counts())
        each = trained_seconds / recipe.step_sequences
        spent = {m.name: each * recipe.batch_of(m.config) for m in fleet.members}
        facts = {
            m.name: Facts(
                loss=loss, seconds=spent[m.name], bytes=sent[m.name], measured=_outside(fleet, m.name)
            )
            for m, loss in zip(fleet.members, fleet.losses.mean(0).tolist(), strict=True)
        }
        row = Row.from_simulation(
            recipe,
            round_number,
            facts,
            scores,
            loss_train=fleet.losses.mean().item(),
            grad_norm=fleet.norms.mean().item(),
            seconds=seconds,
        )
        # Write the row before the state: a row without its state is cut off and its round runs again, but a
        # state without its row would lose the row.
        run.append(row)
        if saver:
            saver.save(round_number, force=round_number == rounds)
        view.round(row)
        if view.hooks.deliver() and saver:
            saver.save(round_number, force=True)
        clock = time.perf_counter()

    def stops() -> bool:
        return leave() or view.hooks.stopped

    left_over = range(done + 1, rounds + 1)
    driven = ExchangingFleet(fleet, exchange)
    return run_rounds(driven, left_over, lambda h: view.inner(h, steps, None), after, stops)


def _outside(fleet: SimulatedFleet, name: str) -> dict[str, list[float]]:
    count = fleet.outside[name]
    return {} if count is None else {"outside_tokens": [count]}


def counted_bytes(recipe: Recipe, payloads: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """One round's bytes of every replica by purpose: payloads as the exchange counted them, stage links by
    their shapes."""
    sent: dict[str, dict[str, int]] = {}
    for member in recipe.fleet():
        total = sent[member.name] = dict.fromkeys(PURPOSES, 0) | payloads[member.name]
        for purpose, count in inner_step_bytes(recipe, member).items():
            total[purpose] += recipe.outer.inner_steps * count
        if recipe.outer.method == "adamw":  # its all-reduce is not simulated
            up, down = outer_bytes(recipe, member)
            total["payload_up"] += up
            total["payload_down"] += down
    return sent


class Saver:
    """Saves between rounds, as often as its share of the time allows."""

    def __init__(
        self, run: RunDir, fleet: SimulatedFleet, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.fleet, self.clock = run, fleet, clock
        self.cost, self.last = 0.0, -float("inf")
        self.saved = 0  # the newest saved round

    def save(self, rounds: int, force: bool) -> None:
        now = self.clock()
        due = force or (now - self.last) * SAVE_SHARE >= self.cost
        if not due or rounds == self.saved:
            return
        state = self.fleet.state()
        needed = sum(tensor.nbytes for named in state.values() for tensor in named.values())
        with explain_disk_full(self.run.path, needed, f"the state after round {rounds}"):
            checkpoint.save(self.run.state_path, rounds, state)
        self.last, self.saved = self.clock(), rounds
        self.cost = self.last - now
