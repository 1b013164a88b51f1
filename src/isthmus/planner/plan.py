"""Recipe -> forecast: what a run will take, per replica kind and per link, before anything is rented.

Standard library only. Bytes come from `traffic`, schedules from `replica.schedule` (the data that the stages
execute), seconds from METHOD section 3: the closed ceiling and an event simulation of the same schedule.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod

from isthmus.config import LinkConfig, Member, Recipe, ReplicaConfig
from isthmus.errors import ConfigError
from isthmus.planner.cost import exchange_seconds, inner_step_seconds, step_flops
from isthmus.planner.memory import MASTER_BYTES, process_memory
from isthmus.replica.schedule import deep, depths, simulate_schedule
from isthmus.replica.split import EMBEDDING, stage_names
from isthmus.traffic import inner_step_bytes, outer_bytes, shard_bytes, shards

POLL_SECONDS = 0.5  # a settled round is seen so much later on average: processes look once a second
FORWARD_SHARE = 1 / 3  # of a micro-batch's 6 N: 2 N forward, 4 N backward
# Judging a payload: hash, unpack, squared norm. 6 to 9 MB/s of packed 2bit on one core of a busy machine.
VERIFY_BYTES_PER_SECOND = 10e6
TOGETHER = 0.98  # kinds whose rounds are so nearly equally long deliver at the same moment
COMMIT_BYTES, SHARD_LINE_BYTES = 600, 80  # about, in commits and manifests: a replica's facts; one shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a run is paid with; nothing is assumed where nothing is given."""

    per_hour: Mapping[str, float] = field(default_factory=dict)  # of one machine, by replica name
    egress_per_gb: float | None = None  # of reading from the bucket
    put_per_million: float | None = None
    get_per_million: float | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterExchange:
    """The end of a round. Bytes are of the whole replica, seconds of its slowest machine."""

    mbps: float
    latency_ms: float
    up_bytes: int
    down_bytes: int
    up_seconds: float
    down_seconds: float
    gets: int  # of payloads, all machines
    puts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """What a machine that comes without state reads: the newest anchor, then the rounds since."""

    anchor_bytes: int
    replay_bytes_per_round: int
    replay_rounds_most: int
    bytes_most: int
    seconds_most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KindForecast:
    """One [[replicas]] table."""

    name: str
    kind: str
    count: int
    stages: int
    compute: Compute
    link: StageLink | None
    step: Step
    exchange: OuterExchange
    catch_up: CatchUp | None
    memory: tuple[dict[str, int], ...]  # one for each process of one replica
    round_seconds: float  # H steps and its own exchange, if it waited for nobody
    wait_seconds: float  # in every round, for slower replicas
    utilisation: float  # share of the whole run in which its machines compute
    utilisation_alone: float  # the same if it waited for nobody
    bottleneck: str  # "compute", "link", "bubble", "exchange" or "waiting"
    bytes: dict[str, int]  # of the whole run, all replicas of this kind, by purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What the closer of a round does between the last upload and the manifest."""

    closer: str
    verify_bytes: int  # all the others' payloads, over the whole round
    last_bytes: int  # of those that arrive together at its end
    commit_gets: int  # in one look
    seconds: float
    manifest_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A whole run."""

    name: str
    num_parameters: int
    num_replicas: int
    num_machines: int
    rounds: int
    inner_steps: int  # H
    kinds: tuple[KindForecast, ...]
    payload_bytes: int  # one replica's update
    num_shards: int
    closing: Closing | None
    round_seconds: float
    slowest: str
    utilisation: float  # over all machines, weighted by their rate
    tokens: int
    tokens_per_second: float
    hours: float
    bytes: dict[str, int]  # of the whole run, by purpose
    link_bytes: dict[str, int]  # of the whole run: between stages, to the bucket, from the bucket
    snapshot_bytes: int  # one anchor
    snapshots: int
    stored_bytes_most: int
    requests_per_round: dict[str, int]
    requests: dict[str, int]
    money: dict[str, float] | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def predict(
    recipe: Recipe,
    tflops: float = 0.0,
    prices: Prices | None = None,
    verify_bytes_per_second: float = VERIFY_BYTES_PER_SECOND,
) -> Forecast:
    """The forecast of a run. `tflops` is the rate of machines whose own the recipe does not state."""
    rates = {replica.name: rate_of(replica, tflops) for replica in recipe.replicas}
    members = {member.config.name: member for member in reversed(recipe.fleet())}
    sizes = shard_bytes(recipe)
    paces = {r.name: _pace(recipe, members[r.name], rates[r.name], sizes) for r in recipe.replicas}
    # From one settled round to a replica's next delivery; then all wait for the slowest, and for the closer.
    turns = {
        name: pace.exchange.down_seconds
        + recipe.outer.inner_steps * pace.step.seconds
        + pace.exchange.up_seconds
        for name, pace in paces.items()
    }
    closing = _closing(recipe, turns, sizes, verify_bytes_per_second)
    close_seconds = closing.seconds if closing else 0.0
    slowest = max(turns, key=turns.__getitem__)
    round_seconds = turns[slowest] + close_seconds
    kinds = tuple(
        _kind(recipe, members[r.name], paces[r.name], round_seconds, close_seconds, sizes, closing)
        for r in recipe.replicas
    )
    rounds = recipe.outer.rounds
    sent = {key: sum(kind.bytes[key] for kind in kinds) for key in kinds[0].bytes}
    snapshot, num_snapshots = _snapshot(recipe)
    sent["snapshots"] = snapshot * num_snapshots
    per_round = _requests(recipe, kinds, round_seconds)
    hours = rounds * round_seconds / 3600
    machine_rate = {r.name: r.count * r.stages * rates[r.name] for r in recipe.replicas}
    busy = sum(kind.utilisation * machine_rate[kind.name] for kind in kinds) / sum(machine_rate.values())
    forecast_bytes = {
        "stages": sent["activations"] + sent["gradients"] + sent["tokens"],
        "to_bucket": sent["payload_up"] + sent["snapshots"],
        "from_bucket": sent["payload_down"] + sent["control"],
    }
    requests = {verb: number * rounds for verb, number in per_round.items()}
    requests["put"] += num_snapshots * (len(sizes) + 1)
    return Forecast(
        name=recipe.name,
        num_parameters=recipe.model.num_parameters,
        num_replicas=recipe.num_replicas,
        num_machines=sum(r.count * r.stages for r in recipe.replicas),
        rounds=rounds,
        inner_steps=recipe.outer.inner_steps,
        kinds=kinds,
        payload_bytes=sum(sizes),
        num_shards=len(sizes),
        closing=closing,
        round_seconds=round_seconds,
        slowest=slowest,
        utilisation=busy,
        tokens=rounds * recipe.round_tokens,
        tokens_per_second=recipe.round_tokens / round_seconds,
        hours=hours,
        bytes=sent,
        link_bytes=forecast_bytes,
        snapshot_bytes=snapshot,
        snapshots=num_snapshots,
        stored_bytes_most=_stored(recipe, sizes, snapshot, num_snapshots),
        requests_per_round=per_round,
        requests=requests,
        money=_money(recipe, prices, hours, forecast_bytes["from_bucket"], requests) if prices else None,
    )


def rate_of(replica: ReplicaConfig, tflops: float = 0.0) -> float:
    """The machine's training rate, or one line that says how to find it out."""
    rate = replica.tflops or tflops
    if rate <= 0:
        raise ConfigError(
            f"replica {replica.name}: the training rate of its machines is not known; set tflops in the "
            "recipe (`isthmus doctor` on that machine measures it) or give --tflops"
        )
    return rate


@dataclass(frozen=True, slots=True)
class _Pace:
    compute: Compute
    link: StageLink | None
    step: Step
    exchange: OuterExchange


def _pace(recipe: Recipe, member: Member, tflops: float, sizes: tuple[int, ...]) -> _Pace:
    compute = _compute(recipe, member.config, tflops)
    link, step = _inner_step(recipe, member, compute)
    return _Pace(compute, link, step, _exchange(recipe, member, sizes))


def _compute(recipe: Recipe, replica: ReplicaConfig, tflops: float) -> Compute:
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


def _inner_step(recipe: Recipe, member: Member, compute: Compute) -> tuple[StageLink | None, Step]:
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
    chosen = depths(replica.stages, m, t, forward / rate, latency)
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


def machines_of(recipe: Recipe, replica: ReplicaConfig) -> list[tuple[list[int], list[int]]]:
    """(shards it writes, shards it reads) of every machine of a replica, as the exchange has them."""
    parts = shards(recipe)
    found = []
    for own in stage_names(recipe.model, replica.stages):
        writes = [i for i, names in enumerate(parts) if set(names) <= set(own)]
        extra = [i for i, names in enumerate(parts) if names == (EMBEDDING,) and replica.compressed]
        found.append((writes, sorted({*writes, *extra})))
    return found


def _exchange(recipe: Recipe, member: Member, sizes: tuple[int, ...]) -> OuterExchange:
    """Every machine over its own link, one request after another; the slowest machine counts."""
    replica, link = member.config, member.config.outer_link
    others = recipe.num_replicas - 1
    up, down = outer_bytes(recipe, member, sizes)
    if recipe.outer.method == "adamw" or not others:
        half = exchange_seconds(recipe, member) / 2
        return OuterExchange(
            mbps=link.mbps,
            latency_ms=link.latency_ms,
            up_bytes=up,
            down_bytes=down,
            up_seconds=half,
            down_seconds=half,
            gets=0,
            puts=0,
        )
    machines = machines_of(recipe, replica)
    up_seconds = max(
        _transfer(link, sum(sizes[i] for i in w), len(w) + (n == 0)) for n, (w, _) in enumerate(machines)
    )
    # All the others' shards, and of its own replica's those that another machine sent: the embedding's.
    read = [[i for i in r for _ in range(others + (i not in w))] for w, r in machines]
    down_seconds = max(_transfer(link, sum(sizes[i] for i in parts), len(parts)) for parts in read)
    return OuterExchange(
        mbps=link.mbps,
        latency_ms=link.latency_ms,
        up_bytes=up,
        down_bytes=down,
        up_seconds=up_seconds,
        down_seconds=down_seconds,
        gets=sum(len(parts) for parts in read),
        puts=sum(len(w) for w, _ in machines) + 1,
    )


def _transfer(link: LinkConfig, num_bytes: float, num_requests: float) -> float:
    """Requests go one after another, and each waits for its answer: two latencies."""
    return num_bytes * 8 / (link.mbps * 1e6) + num_requests * 2 * link.latency_ms / 1e3


def _closing(
    recipe: Recipe, turns: Mapping[str, float], sizes: tuple[int, ...], verify_rate: float
) -> Closing | None:
    """Full replicas close where there are some. What came before the last kind is judged by then."""
    others = recipe.num_replicas - 1
    if recipe.outer.method == "adamw" or not others:
        return None
    closer = min(recipe.replicas, key=lambda r: (r.stages > 1, -r.outer_link.mbps))
    payload, latest = sum(sizes), max(turns.values())
    late = [r for r in recipe.replicas if turns[r.name] > TOGETHER * latest]
    num_last = sum(r.count for r in late) - (closer in late)
    looks = recipe.num_replicas + 1  # every commit, then the manifest's creation
    reading = _transfer(closer.outer_link, num_last * payload, num_last * len(sizes) + looks)
    return Closing(
        closer=closer.name,
        verify_bytes=others * payload,
        last_bytes=num_last * payload,
        commit_gets=recipe.num_replicas,
        seconds=reading + num_last * payload / verify_rate + POLL_SECONDS,
        manifest_bytes=recipe.num_replicas * (COMMIT_BYTES + SHARD_LINE_BYTES * len(sizes)),
    )


def _kind(
    recipe: Recipe,
    member: Member,
    pace: _Pace,
    round_seconds: float,
    close_seconds: float,
    sizes: tuple[int, ...],
    closing: Closing | None,
) -> KindForecast:
    replica, steps = member.config, recipe.outer.inner_steps
    exchange = pace.exchange.up_seconds + close_seconds + pace.exchange.down_seconds
    alone = steps * pace.step.seconds + exchange
    compute = steps * pace.compute.seconds_per_step
    wait = max(0.0, round_seconds - alone)
    times = recipe.outer.rounds * replica.count
    sent = {key: times * steps * number for key, number in inner_step_bytes(recipe, member).items()}
    sent["payload_up"] = times * pace.exchange.up_bytes
    sent["payload_down"] = times * pace.exchange.down_bytes
    sent["control"] = 0
    if closing and closing.closer == replica.name:
        # A pipelined closer's first machine also reads the shards that it has no use for, to judge them.
        reads = machines_of(recipe, replica)[0][1]
        unread = sum(size for i, size in enumerate(sizes) if i not in reads)
        sent["control"] = recipe.outer.rounds * recipe.num_replicas * unread
    losses = {
        "link": steps * (pace.step.seconds - pace.step.linkless_seconds),
        "bubble": steps * (pace.step.linkless_seconds - pace.compute.seconds_per_step),
        "exchange": exchange,
        "waiting": wait,
    }
    worst = max(losses, key=losses.__getitem__)
    processes = [process_memory(recipe, replica, s, pace.step.depths[s]) for s in range(replica.stages)]
    return KindForecast(
        name=replica.name,
        kind=replica.kind,
        count=replica.count,
        stages=replica.stages,
        compute=pace.compute,
        link=pace.link,
        step=pace.step,
        exchange=pace.exchange,
        catch_up=_catch_up(recipe, replica, sizes),
        memory=tuple(asdict(process) | {"total": process.total} for process in processes),
        round_seconds=alone,
        wait_seconds=wait,
        utilisation=compute / round_seconds,
        utilisation_alone=compute / alone,
        bottleneck=worst if losses[worst] > 0.1 * round_seconds else "compute",
        bytes=sent,
    )


def _catch_up(recipe: Recipe, replica: ReplicaConfig, sizes: tuple[int, ...]) -> CatchUp | None:
    """At most anchor_every - 1 rounds are replayed, and every machine reads its own part of them."""
    if recipe.outer.method == "adamw":
        return None
    shapes, parts, link = recipe.model.shapes(), shards(recipe), replica.outer_link
    rounds = min(recipe.bucket.anchor_every, recipe.outer.rounds) - 1
    anchor = [_anchor_bytes(recipe, sum(prod(shapes[name]) for name in names)) for names in parts]
    reads = [r for _, r in machines_of(recipe, replica)]
    replay = [recipe.num_replicas * sum(sizes[i] for i in r) for r in reads]
    seconds = max(
        _transfer(
            link,
            sum(anchor[i] for i in r) + rounds * per_round,
            len(r) * (1 + rounds * recipe.num_replicas),
        )
        for r, per_round in zip(reads, replay, strict=True)
    )
    whole = sum(anchor[i] for r in reads for i in r)
    return CatchUp(
        anchor_bytes=whole,
        replay_bytes_per_round=sum(replay),
        replay_rounds_most=rounds,
        bytes_most=whole + rounds * sum(replay),
        seconds_most=seconds,
    )


def _anchor_bytes(recipe: Recipe, num_parameters: int) -> int:
    copies = 2 if recipe.outer.method == "diloco" else 1  # with its momentum
    size = MASTER_BYTES["fp64" if recipe.inner.precision == "fp64" else "fp32"]
    return copies * num_parameters * size


def _snapshot(recipe: Recipe) -> tuple[int, int]:
    """Bytes of one anchor in the bucket, and how many a run writes."""
    if recipe.outer.method == "adamw" or recipe.num_replicas == 1:
        return 0, 0
    return _anchor_bytes(
        recipe, recipe.model.num_parameters
    ), recipe.outer.rounds // recipe.bucket.anchor_every


def _stored(recipe: Recipe, sizes: tuple[int, ...], snapshot: int, num_snapshots: int) -> int:
    """What lies in the bucket at the end if nothing is swept."""
    if recipe.outer.method == "adamw" or recipe.num_replicas == 1:
        return 0
    return recipe.outer.rounds * recipe.num_replicas * sum(sizes) + num_snapshots * snapshot


def _requests(
    recipe: Recipe,
    kinds: tuple[KindForecast, ...],
    round_seconds: float,
) -> dict[str, int]:
    """GETs and PUTs of one round, as the exchange makes them; every replica may close (a private run).

    While it waits, every process looks for the manifest once a second, and every closer for all the commits.
    """
    if recipe.outer.method == "adamw" or recipe.num_replicas == 1:
        return {"get": 0, "put": 0}
    gets = puts = 0
    for kind in kinds:
        waiting = round_seconds - recipe.outer.inner_steps * kind.step.seconds
        looks = 1 + round(max(0.0, waiting - kind.exchange.up_seconds - kind.exchange.down_seconds))
        gets += kind.count * (kind.exchange.gets + kind.stages * looks + recipe.num_replicas * looks)
        beats = round(round_seconds / recipe.bucket.heartbeat_seconds)
        puts += kind.count * (kind.exchange.puts + beats)
    return {"get": gets, "put": puts + 1}


def _money(
    recipe: Recipe, prices: Prices, hours: float, egress_bytes: int, requests: Mapping[str, int]
) -> dict[str, float]:
    known = {replica.name: replica for replica in recipe.replicas}
    for name in prices.per_hour:
        if name not in known:
            raise ConfigError(f"--price-per-hour {name}: no such replica; there is {', '.join(known)}")
    parts = {
        f"machines.{name}": hours * price * known[name].count * known[name].stages
        for name, price in prices.per_hour.items()
    }
    if prices.egress_per_gb is not None:
        parts["egress"] = egress_bytes / 1e9 * prices.egress_per_gb
    for verb, price in (("put", prices.put_per_million), ("get", prices.get_per_million)):
        if price is not None:
            parts[verb] = requests[verb] / 1e6 * price
    return parts | {"total": sum(parts.values())}
