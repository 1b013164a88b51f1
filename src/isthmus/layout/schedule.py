"""Micro-batch order, as data. Standard library only: the planner simulates what the stages execute.

A schedule lists every stage's actions in order. A stage runs `depth` micro-batches forward before its first
backward and then alternates, so `depth` is also the most it has in flight. 1F1B and GPipe are the extremes
(depths S - s and m). A slow link wants a depth in between: enough that a gradient is back when the stage has
nothing else to do, and no more than memory allows.

A backward may be split. The previous stage waits only for the gradient of the input, which can leave before
the gradients of the weights are computed. Nothing needs those until the inner step ends, so they fill waits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Forward:
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    micro_batch: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The part of a backward that the previous stage waits for."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The rest of the backward; until then the stage holds the micro-batch."""

    micro_batch: int


Action = Forward | Backward | BackwardInput | BackwardWeight
Schedule = tuple[tuple[Action, ...], ...]  # [stage][position in its order]
Times = float | Sequence[float]  # one value for all, or one per stage or link
_HELD = {Forward: 1, Backward: -1, BackwardInput: 0, BackwardWeight: -1}
PAYS = 0.05  # share of a simulated inner step: if split backwards gain less, they are not worth their memory
WEIGHT_SHARE = 0.5  # of a backward: one matrix product for the input, and a similar one for the weight


def depths(
    num_stages: int,
    num_micro_batches: int,
    t_seconds: float,
    link_seconds: float,
    latency_seconds: float,
    limit: int = 0,
) -> tuple[int, ...]:
    """Warm-up depth of every stage: w_s = min(m, 1 + (S-1-s) (1 + ceil(2 (t_link + latency) / pace))).

    t is the forward and backward time of one micro-batch, t_link the time to carry it one way. Between a
    stage's forward and its backward lie S-1-s neighbours, each with a computation and a crossing both ways.
    Micro-batches follow each other at the pace, the slower of t and t_link. A greater depth would hurt on a
    link slower than compute: its two directions would take turns. `limit` bounds the micro-batches in flight
    (0: only m does). Depths do not increase with s, or a stage would wait for forwards that the stage before
    it may not run yet.
    """
    most = min(num_micro_batches, limit or num_micro_batches)
    pace = max(t_seconds, link_seconds)
    there_and_back = 2 * (link_seconds + latency_seconds)
    # In micro-batches: how many follow each other during one round trip.
    if there_and_back <= 0:
        round_trip = 0
    elif there_and_back >= pace * num_micro_batches:
        round_trip = num_micro_batches  # also if t is unknown
    else:
        round_trip = math.ceil(there_and_back / pace)
    return tuple(min(most, 1 + (num_stages - 1 - s) * (1 + round_trip)) for s in range(num_stages))


def deep(num_stages: int, num_micro_batches: int, depths: Sequence[int]) -> Schedule:
    """Return the order with these warm-up depths."""
    if len(depths) != num_stages or any(a < b for a, b in pairwise(depths)):
        raise ValueError(f"depths {tuple(depths)} of {num_stages} stages: one each, never increasing")
    if min(depths) < 1:
        raise ValueError(f"depths {tuple(depths)}: a stage runs at least one micro-batch forward first")
    return tuple(_order(num_micro_batches, min(depth, num_micro_batches)) for depth in depths)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B: just enough in flight to keep every stage busy if links take no time."""
    return deep(num_stages, num_micro_batches, range(num_stages, 0, -1))


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards."""
    return deep(num_stages, num_micro_batches, [num_micro_batches] * num_stages)


def limited(schedule: Schedule, limit: int) -> Schedule:
    """Return the same order with every stage at most `limit` micro-batches deep; 0: unchanged."""
    if not limit:
        return schedule
    shallow = [min(limit, in_flight(order)) for order in schedule]
    return deep(len(schedule), len(schedule[0]) // 2, shallow)


def _order(num_micro_batches: int, depth: int) -> tuple[Action, ...]:
    order: list[Action] = [Forward(i) for i in range(depth)]
    for i in range(num_micro_batches):
        order.append(Backward(i))
        if depth + i < num_micro_batches:
            order.append(Forward(depth + i))
    return tuple(order)


def in_flight(order: Sequence[Action]) -> int:
    """Return the most micro-batches whose activations a stage with this order holds."""
    held = most = 0
    for action in order:
        held += _HELD[type(action)]
        most = max(most, held)
    return most


def filled(
    schedule: Schedule,
    forward_seconds: Times,
    backward_seconds: Times,
    link_seconds: Times,
    latency_seconds: Times,
    hold: int = 0,
) -> Schedule:
    """Split every backward, and place weight gradients where a stage would wait.

    A stage that holds `hold` micro-batches computes an owed weight gradient before another forward; 0: as
    many as the deepest stage holds anyway, so the machine with the fullest memory needs no more. The times
    affect only the order: weight gradients are always summed in the order of the micro-batches.
    """
    hold = hold or max(in_flight(order) for order in schedule)
    line = _Line(len(schedule), forward_seconds, backward_seconds, link_seconds, latency_seconds)
    todo = [
        [BackwardInput(a.micro_batch) if isinstance(a, Backward) else a for a in reversed(order)]
        for order in schedule
    ]
    owed: list[list[Action]] = [[] for _ in schedule]
    orders: list[list[Action]] = [[] for _ in schedule]
    held = [0] * len(schedule)
    while True:
        # Advance the stage that is earliest in time: it knows everything sent to it by then.
        choices = []
        for s, actions in enumerate(todo):
            start = line.start(s, actions[-1]) if actions else None
            full = bool(actions) and isinstance(actions[-1], Forward) and held[s] >= hold
            if owed[s] and (start is None or start > line.clock[s] or full):
                choices.append((line.clock[s], s, owed[s]))
            elif start is not None:
                choices.append((start, s, actions))
        if not choices:
            break
        _, s, source = min(choices, key=lambda choice: choice[:2])
        action = source.pop()
        line.run(s, action)
        orders[s].append(action)
        held[s] += _HELD[type(action)]
        if isinstance(action, BackwardInput):
            owed[s].insert(0, BackwardWeight(action.micro_batch))
    return tuple(map(tuple, orders))


def filled_if_it_pays(
    schedule: Schedule, forward: Times, backward: Times, link: Times, latency: Times, hold: int = 0
) -> Schedule:
    """Return `filled`, or the schedule unchanged if that gains less than a twentieth of the step.

    On a link nearly as slow as compute the predicted gain is a few percent, and none was measured.
    """
    times = (forward, backward, link, latency)
    split = filled(schedule, *times, hold)
    better = simulate_schedule(split, *times) <= (1 - PAYS) * simulate_schedule(schedule, *times)
    return split if better else schedule


def simulate_schedule(
    schedule: Schedule,
    forward_seconds: Times,
    backward_seconds: Times,
    link_seconds: Times,
    latency_seconds: Times,
) -> float:
    """Return the seconds from the first forward to the last backward of one inner step.

    Receives are posted ahead and sends are asynchronous, so a stage waits only for input. A link carries one
    micro-batch at a time each way for link_seconds, and delivers it latency_seconds later.
    """
    line = _Line(len(schedule), forward_seconds, backward_seconds, link_seconds, latency_seconds)
    at = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(schedule):
            while at[s] < len(order) and line.start(s, order[at[s]]) is not None:
                line.run(s, order[at[s]])
                at[s] += 1
                moved = True
    if any(done < len(order) for done, order in zip(at, schedule, strict=True)):
        raise ValueError(f"this schedule stops for ever, its stages after {at} actions")
    return max(line.clock)


class _Line:
    """Stages in a row and the links between them, each with its own clock."""

    def __init__(self, num_stages: int, forward: Times, backward: Times, link: Times, latency: Times) -> None:
        self.num_stages, self.clock = num_stages, [0.0] * num_stages
        back = _each(backward, num_stages)
        self.compute = {
            Forward: _each(forward, num_stages),
            Backward: back,
            BackwardInput: [(1 - WEIGHT_SHARE) * seconds for seconds in back],
            BackwardWeight: [WEIGHT_SHARE * seconds for seconds in back],
        }
        # [s]: from stage s to stage s + 1
        self.link, self.latency = _each(link, num_stages - 1), _each(latency, num_stages - 1)
        self.arrived: dict[tuple[int, int, int], float] = {}  # (stage, way, micro-batch)
        self.free: dict[tuple[int, int], float] = {}  # (link, way)

    def start(self, s: int, action: Action) -> float | None:
        """Return when an idle stage can begin this action; None while its input has not been sent."""
        way = _way(action)
        if way == 0 or s == (0 if way > 0 else self.num_stages - 1):
            return self.clock[s]
        arrived = self.arrived.get((s, way, action.micro_batch))
        return None if arrived is None else max(self.clock[s], arrived)

    def run(self, s: int, action: Action) -> None:
        start = self.start(s, action)
        assert start is not None, f"{action} on stage {s} has no input yet"
        self.clock[s] = start + self.compute[type(action)][s]
        way = _way(action)
        if way and 0 <= s + way < self.num_stages:
            edge = min(s, s + way)
            self.free[edge, way] = max(self.clock[s], self.free.get((edge, way), 0.0)) + self.link[edge]
            self.arrived[s + way, way, action.micro_batch] = self.free[edge, way] + self.latency[edge]


def _way(action: Action) -> int:
    """Return where the result goes: to the next stage, the previous one, or nowhere."""
    return 1 if isinstance(action, Forward) else 0 if isinstance(action, BackwardWeight) else -1


def _each(times: Times, count: int) -> list[float]:
    return [float(times)] * count if isinstance(times, int | float) else list(times)
