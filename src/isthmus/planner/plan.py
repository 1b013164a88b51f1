"""Recipe -> forecast: what a run will take, by kind of replica and by link, before anyone rents a machine.

`step` plans one inner step, `exchange` the end of a round, `memory` the processes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from isthmus.config import Member, Recipe, ReplicaConfig
from isthmus.errors import ConfigError
from isthmus.layout.requests import READS, round_requests
from isthmus.layout.traffic import STAGE_PURPOSES, inner_step_bytes, machine_shards, shard_bytes
from isthmus.layout.wire import FLOAT_BYTES
from isthmus.planner.auto import resolve
from isthmus.planner.exchange import (
    Closing,
    OuterExchange,
    closing_of,
    exchange_of,
    has_bucket,
    snapshot_of,
    stored_bytes,
)
from isthmus.planner.fit import cures, usable
from isthmus.planner.loss_price import LossPrice, price_of
from isthmus.planner.memory import recomputing, replica_memory
from isthmus.planner.step import Compute, StageLink, Step, compute_of, inner_step, rate_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices. The sum omits everything without a price."""

    per_hour: Mapping[str, float] = field(default_factory=dict)  # of one machine, by replica name
    egress_per_gb: float | None = None  # for reading from the bucket
    put_per_million: float | None = None
    get_per_million: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindForecast:
    """One [[replicas]] table."""

    name: str
    kind: str
    count: int
    stages: int
    compression: str  # k/d between stages, or "none"
    wire: str  # encoding between stages
    loss_price: LossPrice | None  # expected; None if boundaries are open in bf16 or finer
    compute: Compute
    link: StageLink | None
    step: Step
    exchange: OuterExchange
    processes: int  # of a full replica, on one machine
    sharding: str  # "full": they split the model
    recompute: bool
    batch: int  # sequences per inner step
    micro_batches: int  # parts of that batch
    memory: tuple[dict[str, int], ...]  # of each process that owns a part of the model
    memory_plain: tuple[int, ...]  # their totals without recomputation
    memory_recomputed: tuple[int, ...]  # and with it
    memory_gb: float  # for one process; 0: unknown
    fits: bool | None  # None: unknown
    cures: tuple[str, ...]  # if it does not fit: changes that would make it fit
    round_seconds: float  # H steps and its own exchange, without waiting
    wait_seconds: float  # per round, for slower replicas
    utilisation: float  # share of the run during which its machines compute
    utilisation_alone: float  # the same without waiting
    bottleneck: str  # "compute", "link", "bubble", "exchange" or "waiting"
    bytes: dict[str, int]  # over the run, all replicas of this kind, by purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Finishing:
    """The last rounds, which send whole streams between stages."""

    rounds: int
    how: str
    round_seconds: float
    slowest: str
    stage_bytes_per_round: int  # all replicas
    usual_stage_bytes_per_round: int  # in the rounds before


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
    auto: tuple[str, ...]  # what "auto" became in the recipe, and why
    payload_bytes: int  # one replica's update
    num_shards: int
    closing: Closing | None
    finish: Finishing | None  # None if no round opens boundaries
    round_seconds: float  # of a usual round, not a finishing one, like all figures per round or step
    slowest: str
    utilisation: float  # over all machines, weighted by their rate
    tokens: int
    tokens_per_second: float
    hours: float
    bytes: dict[str, int]  # over the run, by purpose
    link_bytes: dict[str, int]  # over the run: between stages, to the bucket, from the bucket
    snapshot_bytes: int  # one anchor
    snapshots: int
    stored_bytes_most: int
    requests_per_round: dict[str, int]  # writes, reads, and the reads that fetch updates
    requests: dict[str, int]
    money: dict[str, float] | None

    @property
    def close_seconds(self) -> float:
        return self.closing.seconds if self.closing else 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def predict(
    recipe: Recipe,
    tflops: float = 0.0,
    prices: Prices | None = None,
    memory_gb: float = 0.0,
) -> Forecast:
    """Forecast a run. `tflops` and `memory_gb` apply to machines for which the recipe states none."""
    recipe, picks = resolve(recipe, tflops, memory_gb)
    rates = {replica.name: rate_of(replica, tflops) for replica in recipe.replicas}
    rounds, sizes = recipe.outer.rounds, shard_bytes(recipe)
    usual = _round_of(recipe, rates, sizes)
    last = usual
    if recipe.finish.rounds:
        last = _round_of(recipe.in_round(rounds), rates, sizes)
    seconds = usual.seconds * rounds + recipe.finish.rounds * (last.seconds - usual.seconds)
    kinds = tuple(_kind(usual, last, r.name, sizes, seconds / rounds) for r in recipe.replicas)
    sent = {key: sum(kind.bytes[key] for kind in kinds) for key in kinds[0].bytes}
    snapshot, num_snapshots = snapshot_of(recipe)
    sent["snapshots"] = snapshot * num_snapshots
    link_bytes = {
        "stages": sum(sent[purpose] for purpose in STAGE_PURPOSES),
        "to_bucket": sent["payload_up"] + sent["snapshots"],
        "from_bucket": sent["payload_down"] + sent["control"],
    }
    per_round = _requests(recipe, kinds, usual.seconds)
    requests = {verb: number * rounds for verb, number in per_round.items()}
    requests["put"] += num_snapshots * (len(sizes) + 1)
    machine_rate = {r.name: r.count * r.stages * rates[r.name] for r in recipe.replicas}
    busy = sum(kind.utilisation * machine_rate[kind.name] for kind in kinds) / sum(machine_rate.values())
    hours = seconds / 3600
    return Forecast(
        name=recipe.name,
        num_parameters=recipe.model.num_parameters,
        num_replicas=recipe.num_replicas,
        num_machines=sum(r.count * r.stages for r in recipe.replicas),
        rounds=rounds,
        inner_steps=recipe.outer.inner_steps,
        kinds=kinds,
        auto=tuple(pick.reason for pick in picks),
        payload_bytes=sum(sizes),
        num_shards=len(sizes),
        closing=usual.closing,
        finish=_finishing(usual, last) if recipe.finish.rounds else None,
        round_seconds=usual.seconds,
        slowest=usual.slowest,
        utilisation=busy,
        tokens=rounds * recipe.round_tokens,
        tokens_per_second=rounds * recipe.round_tokens / seconds,
        hours=hours,
        bytes=sent,
        link_bytes=link_bytes,
        snapshot_bytes=snapshot,
        snapshots=num_snapshots,
        stored_bytes_most=stored_bytes(recipe, sizes, snapshot, num_snapshots),
        requests_per_round=per_round,
        requests=requests,
        money=_money(recipe, prices, hours, link_bytes["from_bucket"], requests) if prices else None,
    )


@dataclass(frozen=True, slots=True)
class _Pace:
    """One replica of a kind, by itself."""

    member: Member
    compute: Compute
    link: StageLink | None
    step: Step
    exchange: OuterExchange


@dataclass(frozen=True, slots=True)
class _Round:
    """One outer round of the fleet: a usual one, or a finishing one, which sends whole streams."""

    recipe: Recipe
    paces: dict[str, _Pace]  # by [[replicas]] table
    closing: Closing | None
    slowest: str
    seconds: float

    @property
    def stage_bytes(self) -> int:
        each = [inner_step_bytes(self.recipe, member) for member in self.recipe.fleet()]
        return self.recipe.outer.inner_steps * sum(sum(purposes.values()) for purposes in each)


def _round_of(recipe: Recipe, rates: Mapping[str, float], sizes: tuple[int, ...]) -> _Round:
    paces, turns = {}, {}
    first = {member.config.name: member for member in reversed(recipe.fleet())}
    for replica in recipe.replicas:
        member, compute = first[replica.name], compute_of(recipe, replica, rates[replica.name])
        link, step = inner_step(recipe, member, compute)
        exchange = exchange_of(recipe, member, sizes)
        paces[replica.name] = _Pace(member, compute, link, step, exchange)
        # From a closed round to the replica's next delivery; then all wait for the slowest and the closer.
        steps = recipe.outer.inner_steps * step.seconds
        turns[replica.name] = exchange.down_seconds + steps + exchange.up_seconds
    closing = closing_of(recipe, turns, sizes)
    slowest = max(turns, key=turns.__getitem__)
    return _Round(recipe, paces, closing, slowest, turns[slowest] + (closing.seconds if closing else 0.0))


def _finishing(usual: _Round, last: _Round) -> Finishing:
    return Finishing(
        rounds=usual.recipe.finish.rounds,
        how=usual.recipe.finish.how,
        round_seconds=last.seconds,
        slowest=last.slowest,
        stage_bytes_per_round=last.stage_bytes,
        usual_stage_bytes_per_round=usual.stage_bytes,
    )


def _kind(
    usual: _Round, last: _Round, name: str, sizes: tuple[int, ...], mean_round_seconds: float
) -> KindForecast:
    recipe, pace, closing = usual.recipe, usual.paces[name], usual.closing
    replica, steps = pace.member.config, recipe.outer.inner_steps
    exchange = pace.exchange.up_seconds + (closing.seconds if closing else 0.0) + pace.exchange.down_seconds
    alone = steps * pace.step.seconds + exchange
    compute = steps * pace.compute.seconds_per_step
    wait = max(0.0, usual.seconds - alone)
    times, finishing = recipe.outer.rounds * replica.count, recipe.finish.rounds * replica.count
    closed = inner_step_bytes(recipe, pace.member)
    opened = inner_step_bytes(recipe, last.paces[name].member)
    sent = {key: steps * ((times - finishing) * closed[key] + finishing * opened[key]) for key in closed}
    sent["payload_up"] = times * pace.exchange.up_bytes
    sent["payload_down"] = times * pace.exchange.down_bytes
    sent["control"] = 0
    if closing and closing.closer == name:
        # If the closer is split, its first machine or process also reads the other shards, to check them.
        reads = machine_shards(recipe, replica)[0][1]
        unread = sum(size for i, size in enumerate(sizes) if i not in reads)
        sent["control"] = recipe.outer.rounds * recipe.num_replicas * unread
    losses = {
        "link": steps * (pace.step.seconds - pace.step.linkless_seconds),
        "bubble": steps * (pace.step.linkless_seconds - pace.compute.seconds_per_step),
        "exchange": exchange,
        "waiting": wait,
    }
    worst = max(losses, key=losses.__getitem__)
    # A slower link keeps more micro-batches in flight: finishing rounds may have the most.
    most = tuple(map(max, pace.step.in_flight, last.paces[name].step.in_flight))
    memory = replica_memory(recipe, replica, most)
    plain, recomputed = (
        tuple(process.total for process in replica_memory(*recomputing(recipe, replica, yes), most))
        for yes in (False, True)
    )
    fits = None
    if replica.memory_gb:
        fits = max(process.total for process in memory) <= usable(replica.memory_gb)
    return KindForecast(
        name=name,
        kind=replica.kind,
        count=replica.count,
        stages=replica.stages,
        compression=replica.compression,
        wire=replica.wire,
        loss_price=_loss_price(recipe, replica),
        compute=pace.compute,
        link=pace.link,
        step=pace.step,
        exchange=pace.exchange,
        processes=replica.processes,
        sharding=replica.sharding,
        recompute=recipe.recomputes(replica),
        batch=recipe.batch_of(replica),
        micro_batches=recipe.micro_batches_of(replica),
        memory=tuple(process.to_dict() for process in memory),
        memory_plain=plain,
        memory_recomputed=recomputed,
        memory_gb=replica.memory_gb,
        fits=fits,
        cures=cures(recipe, replica, pace.compute.tflops) if fits is False else (),
        round_seconds=alone,
        wait_seconds=wait,
        utilisation=compute / mean_round_seconds,
        utilisation_alone=compute / alone,
        bottleneck=worst if losses[worst] > 0.1 * usual.seconds else "compute",
        bytes=sent,
    )


def _loss_price(recipe: Recipe, replica: ReplicaConfig) -> LossPrice | None:
    if replica.stages == 1 or (not replica.compressed and replica.wire in FLOAT_BYTES):
        return None
    return price_of(recipe.inner.optimizer, replica.wire, replica.compression, recipe.subspace.anchor)


def _requests(recipe: Recipe, kinds: tuple[KindForecast, ...], round_seconds: float) -> dict[str, int]:
    """Return a round's reads and writes, as the protocol makes them (`layout.requests`).

    A listing is priced as a write. "payload_get" counts the reads that fetch updates. Two replicas may close,
    as `init` names them.
    """
    if not has_bucket(recipe):
        return {"get": 0, "put": 0, "payload_get": 0}
    waits = applied = processes = 0.0
    for kind, replica in zip(kinds, recipe.replicas, strict=True):
        busy = recipe.outer.inner_steps * kind.step.seconds + kind.exchange.seconds
        waits += kind.count * max(0.0, round_seconds - busy)
        processes += kind.count * len(kind.memory)
        applied += kind.count * sum(len(reads) for _, reads in machine_shards(recipe, replica))
    each = round_requests(
        recipe.num_replicas,
        len(shard_bytes(recipe)),
        round_seconds=round_seconds,
        wait_seconds=waits / recipe.num_replicas,
        heartbeat_seconds=recipe.bucket.heartbeat_seconds,
        num_closers=min(2, recipe.num_replicas),
        num_processes=round(processes),
        applied_shards=round(applied),
    )
    reads = sum(each[verb] for verb in READS)
    writes = sum(each.values()) - reads
    return {"get": round(reads), "put": round(writes), "payload_get": round(each["payload get"])}


def check_names(recipe: Recipe, per_hour: Mapping[str, float]) -> None:
    """Raise ConfigError for the price of a replica that the recipe lacks."""
    known = [replica.name for replica in recipe.replicas]
    for name in per_hour:
        if name not in known:
            raise ConfigError(f"--price-per-hour {name}: no such replica; there is {', '.join(known)}")


def _money(
    recipe: Recipe, prices: Prices, hours: float, egress_bytes: int, requests: Mapping[str, int]
) -> dict[str, float]:
    parts = {
        f"machines.{replica.name}": hours * prices.per_hour[replica.name] * replica.count * replica.stages
        for replica in recipe.replicas
        if replica.name in prices.per_hour
    }
    if prices.egress_per_gb is not None:
        parts["egress"] = egress_bytes / 1e9 * prices.egress_per_gb
    for verb, price in (("put", prices.put_per_million), ("get", prices.get_per_million)):
        if price is not None:
            parts[verb] = requests[verb] / 1e6 * price
    return parts | {"total": sum(parts.values())}
