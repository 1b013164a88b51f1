"""One inner step of a replica: compute, links and schedule -> seconds. Standard library only.

Bytes come from `traffic`, schedules from `replica.schedule` (the data that the stages execute), seconds from
METHOD section 3: the closed ceiling and an event simulation of the same schedule.
"""

from dataclasses import dataclass
from math import prod

from isthmus.config import Member, Recipe, ReplicaConfig
from isthmus.errors import ConfigError
from isthmus.planner.cost import inner_step_seconds, step_flops
from isthmus.replica.schedule import deep, depths, simulate_schedule
from isthmus.replica.split import EMBEDDING, stage_names
from isthmus.traffic import inner_step_bytes

FORWARD_SHARE = 1 / 3  # of a micro-batch's 6 N: 2 N forward, 4 N backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    tflops: float  # training rate of one machine
    flops_per_step: float  # 6 N per token, the whole replica
    seconds_per_step: float  # of one machine where all stages share the work alike
    stage_seconds_per_step: tuple[float, ...]  # as the layers are really dealt, the head with the last


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
    forward_seconds_per_step: float
    backward_seconds_per_step: float
    busy: float  # share of the inner step in which the forward direction carries something


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One inner step, by both levels of METHOD section 3."""

    micro_batches: int
    depths: tuple[int, ...]  # micro-batches that each stage runs forward before its first backward
    closed_seconds: float  # m max(t, l) + (S-1)(t + 2 (l + latency))
    seconds: float  # the event simulation of the schedule with these depths
    linkless_seconds: float  # the same if links took no time: what compute and the pipeline's flush need
    bubble: float  # share of the step in which the average stage has nothing to do


def rate_of(replica: ReplicaConfig, tflops: float = 0.0) -> float:
    """The machine's training rate, or one line that says how to find it out."""
    rate = replica.tflops or tflops
    if rate <= 0:
        raise ConfigError(
            f"replica {replica.name}: the training rate of its machines is not known; set tflops in the "
            "recipe (`isthmus doctor` on that machine measures it), or give --tflops or --device "
            f"{replica.name}=NAME (such as h100)"
        )
    return rate


def compute_of(recipe: Recipe, replica: ReplicaConfig, tflops: float) -> Compute:
    flops = step_flops(recipe)
    mean = flops / replica.stages / (tflops * 1e12)
    shapes = recipe.model.shapes()
    # 6 N is dealt by what multiplies: the embedding is a look-up, its share goes to all.
    work = [
        sum(prod(shapes[name]) for name in names if name != EMBEDDING)
        for names in stage_names(recipe.model, replica.stages)
    ]
    seconds = tuple(mean * replica.stages * part / sum(work) for part in work)
    return Compute(tflops=tflops, flops_per_step=flops, seconds_per_step=mean, stage_seconds_per_step=seconds)


def inner_step(recipe: Recipe, member: Member, compute: Compute) -> tuple[StageLink | None, Step]:
    replica, m = member.config, recipe.inner.micro_batches
    mean = compute.seconds_per_step
    if replica.stages == 1:
        return None, Step(
            micro_batches=1, depths=(1,), closed_seconds=mean, seconds=mean, linkless_seconds=mean, bubble=0.0
        )
    crossing = inner_step_bytes(recipe, member)
    num_links, rate = replica.stages - 1, replica.link.mbps * 1e6 / 8
    forward = (crossing["activations"] + crossing["tokens"]) // num_links // m
    backward = crossing["gradients"] // num_links // m
    latency, t = replica.link.latency_ms / 1e3, mean / m
    chosen = depths(replica.stages, m, t, forward / rate, latency, recipe.inner.in_flight)
    each = [seconds / m for seconds in compute.stage_seconds_per_step]
    there = [FORWARD_SHARE * t for t in each]
    back = [(1 - FORWARD_SHARE) * t for t in each]
    schedule = deep(replica.stages, m, chosen)
    seconds = simulate_schedule(schedule, there, back, forward / rate, latency)
    linkless = simulate_schedule(schedule, there, back, 0.0, 0.0)
    link = StageLink(
        mbps=replica.link.mbps,
        latency_ms=replica.link.latency_ms,
        subspace_dim=replica.subspace_dim(recipe.model.width),
        num_links=num_links,
        forward_bytes_per_micro_batch=forward,
        backward_bytes_per_micro_batch=backward,
        forward_seconds_per_micro_batch=forward / rate,
        backward_seconds_per_micro_batch=backward / rate,
        forward_seconds_per_step=m * forward / rate,
        backward_seconds_per_step=m * backward / rate,
        busy=m * forward / rate / seconds,
    )
    closed = inner_step_seconds(recipe, member, mean * replica.stages)
    step = Step(
        micro_batches=m,
        depths=chosen,
        closed_seconds=closed,
        seconds=seconds,
        linkless_seconds=linkless,
        bubble=1 - mean / seconds,
    )
    return link, step
