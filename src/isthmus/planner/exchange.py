"""The end of a round: what every machine sends to and reads from the bucket, and who closes it.

Sizes are the codec's own arithmetic (`layout.traffic`), and so are requests (`layout.requests`). What is
written goes up one request after another; of what is read, some are under way at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from isthmus.config import LinkConfig, Member, Recipe, ReplicaConfig
from isthmus.layout.requests import READ_AT_ONCE, SHORTEST_SECONDS
from isthmus.layout.traffic import machine_shards, outer_bytes, shards
from isthmus.planner.cost import exchange_seconds
from isthmus.planner.memory import MASTER_BYTES

POLL_SECONDS = SHORTEST_SECONDS / 2  # until a round that is due is seen by a closer, and by the others
# Checking a payload: hash, unpack, squared norm. 6 to 9 MB/s of packed 2bit on one core of a busy machine.
VERIFY_BYTES_PER_SECOND = 10e6
TOGETHER = 0.98  # kinds whose rounds are at least this share of the longest deliver at the same moment
COMMIT_BYTES, SHARD_LINE_BYTES = 600, 80  # about, in commits and manifests: a replica's facts; one shard


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

    @property
    def seconds(self) -> float:
        return self.up_seconds + self.down_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """What a machine that comes without state reads: the newest anchor, then the rounds since."""

    anchor_bytes: int
    replay_bytes_per_round: int
    replay_rounds_most: int
    bytes_most: int
    seconds_most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What the closer of a round does between the last upload and the manifest."""

    closer: str
    verify_bytes: int  # all the others' payloads, over the whole round
    last_bytes: int  # of those that arrive together at its end
    seconds: float
    manifest_bytes: int


def has_bucket(recipe: Recipe) -> bool:
    """AdamW averages gradients instead, and one replica has no one to exchange with."""
    return recipe.outer.method != "adamw" and recipe.num_replicas > 1


def _machines(recipe: Recipe, replica: ReplicaConfig) -> tuple[tuple[list[int], list[int]], ...]:
    """(shards it writes, shards it reads) of every machine; the processes of a sharded replica share one."""
    parts = machine_shards(recipe, replica)
    if not replica.sharded:
        return parts
    writes, reads = (sorted({i for part in parts for i in part[way]}) for way in (0, 1))
    return ((writes, reads),)


def exchange_of(recipe: Recipe, member: Member, sizes: tuple[int, ...]) -> OuterExchange:
    """Every machine over its own link; the slowest machine counts."""
    link, others = member.config.outer_link, recipe.num_replicas - 1
    up, down = outer_bytes(recipe, member, sizes)
    if has_bucket(recipe):
        machines = _machines(recipe, member.config)
        up_seconds = max(
            _transfer(link, sum(sizes[i] for i in w), len(w) + (n == 0)) for n, (w, _) in enumerate(machines)
        )
        # All the others' shards, and of its own replica's those that another machine sent: the embedding's.
        read = [{i: others + (i not in w) for i in r} for w, r in machines]  # how many of each shard
        down_seconds = max(
            _transfer(link, sum(n * sizes[i] for i, n in counts.items()), _waits(sum(counts.values())))
            for counts in read
        )
        gets = sum(sum(counts.values()) for counts in read)
        puts = sum(len(w) for w, _ in machines) + 1
    else:
        up_seconds = down_seconds = exchange_seconds(recipe, member) / 2
        gets = puts = 0
    return OuterExchange(
        mbps=link.mbps,
        latency_ms=link.latency_ms,
        up_bytes=up,
        down_bytes=down,
        up_seconds=up_seconds,
        down_seconds=down_seconds,
        gets=gets,
        puts=puts,
    )


def _transfer(link: LinkConfig, num_bytes: float, num_waits: float) -> float:
    """The bytes, and one answer after another that is waited for: two latencies each."""
    return num_bytes * 8 / (link.mbps * 1e6) + num_waits * 2 * link.latency_ms / 1e3


def _waits(num_requests: int) -> int:
    """Of requests that are made together: some are under way at a time."""
    return ceil(num_requests / READ_AT_ONCE)


def closing_of(
    recipe: Recipe, turns: Mapping[str, float], sizes: tuple[int, ...], verify_rate: float
) -> Closing | None:
    """Full replicas close where there are some. What arrived before the last kind is already checked."""
    if not has_bucket(recipe):
        return None
    closer = min(recipe.replicas, key=lambda r: (r.parts > 1, -r.outer_link.mbps))
    payload, latest = sum(sizes), max(turns.values())
    late = [r for r in recipe.replicas if turns[r.name] > TOGETHER * latest]
    num_last = sum(r.count for r in late) - (closer in late)
    # A listing, the commits, copies of their shards and those read, the manifest, and the others' look at it.
    waits = 1 + _waits(num_last) + 2 * _waits(num_last * len(sizes)) + 2
    reading = _transfer(closer.outer_link, num_last * payload, waits)
    return Closing(
        closer=closer.name,
        verify_bytes=(recipe.num_replicas - 1) * payload,
        last_bytes=num_last * payload,
        seconds=reading + num_last * payload / verify_rate + 2 * POLL_SECONDS,
        manifest_bytes=recipe.num_replicas * (COMMIT_BYTES + SHARD_LINE_BYTES * len(sizes)),
    )


def catch_up_of(recipe: Recipe, replica: ReplicaConfig, sizes: tuple[int, ...]) -> CatchUp | None:
    """At most anchor_every - 1 rounds are replayed, and every machine reads its own part of them."""
    if recipe.outer.method == "adamw":
        return None
    shapes, parts, link = recipe.model.shapes(), shards(recipe), replica.outer_link
    rounds = min(recipe.bucket.anchor_every, recipe.outer.rounds) - 1
    anchor = [_anchor_bytes(recipe, sum(prod(shapes[name]) for name in names)) for names in parts]
    reads = [r for _, r in _machines(recipe, replica)]
    replay = [recipe.num_replicas * sum(sizes[i] for i in r) for r in reads]
    seconds = max(
        _transfer(
            link,
            sum(anchor[i] for i in r) + rounds * per_round,
            _waits(len(r)) + rounds * _waits(len(r) * recipe.num_replicas),
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


def snapshot_of(recipe: Recipe) -> tuple[int, int]:
    """Bytes of one anchor in the bucket, and how many a run writes."""
    if not has_bucket(recipe):
        return 0, 0
    each = _anchor_bytes(recipe, recipe.model.num_stored)
    return each, recipe.outer.rounds // recipe.bucket.anchor_every


def stored_bytes(recipe: Recipe, sizes: tuple[int, ...], snapshot: int, num_snapshots: int) -> int:
    """The most that lies in the bucket at a time. Of every round, its closer keeps a copy of the others'
    updates. With bucket.keep_rounds, what is older goes up to an anchor, once for every anchor."""
    if not has_bucket(recipe):
        return 0
    updates, keep, every = 2 * recipe.num_replicas - 1, recipe.bucket.keep_rounds, recipe.bucket.anchor_every
    rounds = min(recipe.outer.rounds, keep + 2 * every) if keep else recipe.outer.rounds
    anchors = min(num_snapshots, rounds // every + 1) if keep else num_snapshots
    return rounds * updates * sum(sizes) + anchors * snapshot
