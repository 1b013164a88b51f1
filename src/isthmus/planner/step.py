"""One inner step of a replica: compute, links and schedule -> seconds.

Bytes come from `layout.traffic`, schedules from `layout.schedule` (the data that stages execute), and seconds
from an event simulation of that schedule.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from isthmus.config import Member, Recipe, ReplicaConfig
from isthmus.errors import ConfigError
from isthmus.layout.schedule import Schedule, deep, depths, filled_if_it_pays, in_flight, simulate_schedule
from isthmus.layout.stages import EMBEDDING, is_looked_up, stage_names
from isthmus.layout.traffic import micro_batch_bytes
from isthmus.planner.cost import step_flops

FORWARD_SHARE = 1 / 3  # of a micro-batch's 6 N: 2 N forward, 4 N backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    tflops: float  # training rate of one machine
    flops_per_step: float  # 6 N per token, the whole replica
    seconds_per_step: float  # of one machine, if all stages share the work equally
    stage_seconds_per_step: tuple[float, ...]  # with the real split of layers, and the head in the last


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """One link between two stages of a pipelined replica; full duplex."""

    mbps: float
    latency_ms: float
    subspace_dim: int
    num_links: int
    forward_bytes_per_micro_batch: int  # activations and token ids
    backward_bytes_per_micro_batch: int  # gradients
    forward_seconds_per_micro_batch: float
    backward_seconds_per_micro_batch: float
    busy: float  # share of the inner step that forward transfers take
    steady_busy: float  # the same without fill and drain


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One inner step, by an event simulation."""

    micro_batches: int
    depths: tuple[int, ...]  # micro-batches that each stage runs forward before its first backward
    in_flight: tuple[int, ...]  # the most at a time; as `depths` unless backwards are split
    seconds: float  # the event simulation of the schedule with these depths
    linkless_seconds: float  # the same with instantaneous links: compute and the pipeline's flush
    bubble: float  # share of the step that the average stage is idle


def rate_of(replica: ReplicaConfig, tflops: float = 0.0) -> float:
    """Return the machine's training rate, or raise one line that says how to measure it."""
    rate = replica.tflops or tflops
    if rate <= 0:
        raise ConfigError(
            f"replica {replica.name}: the training rate of its machines is not known; set tflops in the "
            "recipe (`isthmus doctor` on that machine measures it); `isthmus plan` also takes --tflops X and "
            f"--device {replica.name}=NAME (such as h100)"
        )
    return rate


def compute_of(recipe: Recipe, replica: ReplicaConfig, tflops: float) -> Compute:
    flops = step_flops(recipe, replica)
    once, again = _work(recipe, replica)
    whole = flops / (tflops * 1e12)
    seconds = tuple(whole * (o + a) / sum(once) for o, a in zip(once, again, strict=True))
    return Compute(
        tflops=tflops,
        flops_per_step=flops,
        seconds_per_step=whole * recomputed_share(recipe, replica) / replica.stages,
        stage_seconds_per_step=seconds,
    )


def _work(recipe: Recipe, replica: ReplicaConfig) -> tuple[list[float], list[float]]:
    """Return each stage's multiplied parameters, and what recomputation repeats: a layer's forward."""
    shapes, again = recipe.model.shapes(), recipe.recomputes(replica)
    once, repeated = [], []
    for names in stage_names(recipe.model, replica.stages):
        # Split 6 N by multiplications: the embedding is a look-up, so its share is spread over all.
        own = {name: prod(shapes[name]) for name in names if not is_looked_up(name)}
        layers = sum(number for name, number in own.items() if name.startswith("layers."))
        once.append(float(sum(own.values())))
        repeated.append(FORWARD_SHARE * layers if again else 0.0)
    if recipe.model.tie_embeddings:
        once[-1] += prod(shapes[EMBEDDING])  # the head multiplies by it
    return once, repeated


def recomputed_share(recipe: Recipe, replica: ReplicaConfig) -> float:
    """Return an inner step's operations over 6 N a token: above 1 if layers run again in the backward."""
    once, repeated = _work(recipe, replica)
    return 1 + sum(repeated) / sum(once)


def inner_step(recipe: Recipe, member: Member, compute: Compute) -> tuple[StageLink | None, Step]:
    replica, m = member.config, recipe.micro_batches_of(member.config)
    mean = compute.seconds_per_step
    if replica.stages == 1:
        return None, Step(
            micro_batches=1,
            depths=(1,),
            in_flight=(1,),
            seconds=mean,
            linkless_seconds=mean,
            bubble=0.0,
        )
    rate = replica.link.mbps * 1e6 / 8
    forward, backward = micro_batch_bytes(recipe, member)
    latency, t = replica.link.latency_ms / 1e3, mean / m
    each = tuple(seconds / m for seconds in compute.stage_seconds_per_step)
    pace = steady_pace(each, forward / rate, latency, recipe.inner.in_flight)
    chosen = depths(replica.stages, m, t, forward / rate, latency, recipe.inner.in_flight)
    if recipe.inner.backward == "split":  # in the order that equal stages would choose
        there = FORWARD_SHARE * t
        whole, limit = deep(replica.stages, m, chosen), recipe.inner.in_flight
        split = filled_if_it_pays(whole, there, t - there, forward / rate, latency, limit)
        most = tuple(in_flight(order) for order in split)
        seconds, linkless = _run(each, split, forward / rate, latency), _run(each, split, 0.0, 0.0)
    else:
        most = chosen
        seconds = _simulated(each, m, chosen, forward / rate, latency)
        linkless = _simulated(each, m, chosen, 0.0, 0.0)
    link = StageLink(
        mbps=replica.link.mbps,
        latency_ms=replica.link.latency_ms,
        subspace_dim=replica.subspace_dim(recipe.model.width),
        num_links=replica.stages - 1,
        forward_bytes_per_micro_batch=forward,
        backward_bytes_per_micro_batch=backward,
        forward_seconds_per_micro_batch=forward / rate,
        backward_seconds_per_micro_batch=backward / rate,
        busy=m * forward / rate / seconds,
        steady_busy=forward / rate / pace,
    )
    step = Step(
        micro_batches=m,
        depths=chosen,
        in_flight=most,
        seconds=seconds,
        linkless_seconds=linkless,
        bubble=1 - mean / seconds,
    )
    return link, step


@lru_cache(maxsize=4096)
def steady_pace(
    stage_seconds: tuple[float, ...], link_seconds: float, latency_seconds: float, limit: int = 0
) -> float:
    """Return the seconds between micro-batches with a full pipeline, by the event simulation.

    It simulates an inner step of 2 n micro-batches and one of n, and divides the difference by n, so filling
    and draining cancel. A run can measure the same with twice the batch in twice the micro-batches. Without a
    limit it is the slowest of all stages and links.
    """
    # Just deep enough for the slower of compute and link: any deeper, all forwards would precede the first
    # backward, and the two directions of a slow link would take turns.
    num_stages, t = len(stage_seconds), max(sum(stage_seconds) / len(stage_seconds), link_seconds)
    deepest = depths(num_stages, 128, t, link_seconds, latency_seconds, limit)[0]
    n = max(32, 2 * deepest)  # long enough to fill it
    short, long = (
        _simulated(
            stage_seconds,
            num,
            depths(num_stages, num, t, link_seconds, latency_seconds, limit),
            link_seconds,
            latency_seconds,
        )
        for num in (n, 2 * n)
    )
    return max((long - short) / n, link_seconds, *stage_seconds)  # nothing is faster than its slowest part


@lru_cache(maxsize=4096)
def _simulated(
    stage_seconds: tuple[float, ...],
    m: int,
    chosen: tuple[int, ...],
    link_seconds: float,
    latency_seconds: float,
) -> float:
    return _run(stage_seconds, deep(len(stage_seconds), m, chosen), link_seconds, latency_seconds)


def _run(
    stage_seconds: tuple[float, ...], schedule: Schedule, link_seconds: float, latency_seconds: float
) -> float:
    there = [FORWARD_SHARE * t for t in stage_seconds]
    back = [(1 - FORWARD_SHARE) * t for t in stage_seconds]
    return simulate_schedule(schedule, there, back, link_seconds, latency_seconds)
