"""Micro-batch order, as data. Standard library only: the planner simulates what the stages execute.

A schedule holds, for every stage, its actions in order. A stage runs `depth` micro-batches forward before
its first backward and then alternates, so `depth` is also the most it has in flight. 1F1B and GPipe are the
two ends (depths S - s and m); a slow link wants something between, deep enough that a gradient is back by the
time the stage has nothing else to do, and no deeper than memory allows.
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


Action = Forward | Backward
Schedule = tuple[tuple[Action, ...], ...]  # [stage][place in its order]
Times = float | Sequence[float]  # the same everywhere, or one for each stage or link


def depths(
    num_stages: int,
    num_micro_batches: int,
    t_seconds: float,
    link_seconds: float,
    latency_seconds: float,
    limit: int = 0,
) -> tuple[int, ...]:
    """Warm-up depth of every stage: w_s = min(m, 1 + (S-1-s) (1 + ceil(2 (t_link + latency) / t))).

    t is the forward and backward of one micro-batch, t_link what it takes to carry it one way. Between a
    forward here and its backward lie S-1-s neighbours, each a computation and a crossing both ways. `limit`
    bounds the micro-batches in flight (0: only m does). The depths do not increase with s, or a stage would
    wait for forwards that the stage before it may not run yet.
    """
    most = min(num_micro_batches, limit or num_micro_batches)
    there_and_back = 2 * (link_seconds + latency_seconds)
    if there_and_back <= 0:
        crossings = 0
    elif there_and_back >= t_seconds * num_micro_batches:
        crossings = num_micro_batches  # also where nothing is known of t
    else:
        crossings = math.ceil(there_and_back / t_seconds)
    return tuple(min(most, 1 + (num_stages - 1 - s) * (1 + crossings)) for s in range(num_stages))


def deep(num_stages: int, num_micro_batches: int, depths: Sequence[int]) -> Schedule:
    """The order with these warm-up depths."""
    if len(depths) != num_stages or any(a < b for a, b in pairwise(depths)):
        raise ValueError(f"depths {tuple(depths)} of {num_stages} stages: one each, never increasing")
    if min(depths) < 1:
        raise ValueError(f"depths {tuple(depths)}: a stage runs at least one micro-batch forward first")
    return tuple(_order(num_micro_batches, min(depth, num_micro_batches)) for depth in depths)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B: just enough in flight to keep every stage busy where links take no time."""
    return deep(num_stages, num_micro_batches, range(num_stages, 0, -1))


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards."""
    return deep(num_stages, num_micro_batches, [num_micro_batches] * num_stages)


def limited(schedule: Schedule, limit: int) -> Schedule:
    """The same order with no stage more than `limit` micro-batches deep; 0: as it is."""
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
    """The most micro-batches that a stage with this order holds activations of."""
    held = most = 0
    for action in order:
        held += 1 if isinstance(action, Forward) else -1
        most = max(most, held)
    return most


def simulate_schedule(
    schedule: Schedule,
    forward_seconds: Times,
    backward_seconds: Times,
    link_seconds: Times,
    latency_seconds: Times,
) -> float:
    """Seconds from the first forward to the last backward of one inner step.

    Receives are posted ahead and sends are asynchronous: a stage waits for input only. A link carries one
    micro-batch at a time each way, link_seconds long, and delivers it latency_seconds after its end.
    """
    num_stages = len(schedule)
    compute = {Forward: _each(forward_seconds, num_stages), Backward: _each(backward_seconds, num_stages)}
    link = _each(link_seconds, num_stages - 1)  # [s] between stages s and s + 1
    latency = _each(latency_seconds, num_stages - 1)
    arrived: dict[tuple[int, Action], float] = {}  # when a stage holds what an action of it needs
    link_free: dict[tuple[int, type], float] = {}
    clock, at = [0.0] * num_stages, [0] * num_stages
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(schedule):
            while at[s] < len(order):
                action = order[at[s]]
                kind = type(action)
                fed = (kind is Forward and s == 0) or (kind is Backward and s == num_stages - 1)
                if not fed and (s, action) not in arrived:
                    break
                start = max(clock[s], 0.0 if fed else arrived[s, action])
                clock[s] = start + compute[kind][s]
                at[s] += 1
                moved = True
                to = s + 1 if kind is Forward else s - 1
                if 0 <= to < num_stages:
                    edge = min(s, to)
                    sent = max(clock[s], link_free.get((edge, kind), 0.0)) + link[edge]
                    link_free[edge, kind] = sent
                    arrived[to, action] = sent + latency[edge]
    if any(place < len(order) for place, order in zip(at, schedule, strict=True)):
        raise ValueError(f"this schedule stops for ever, its stages after {at} actions")
    return max(clock)


def _each(times: Times, count: int) -> list[float]:
    return [float(times)] * count if isinstance(times, int | float) else list(times)
