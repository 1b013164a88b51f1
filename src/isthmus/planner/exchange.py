"""The end of a round: what every machine sends to and reads from the bucket, and which replica closes it.

Sizes come from the codec's own arithmetic (`layout.traffic`), requests from `layout.requests`. Writes go one
request after another; some reads run at the same time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from isthmus.config import LinkConfig, Member, Recipe, ReplicaConfig
from isthmus.layout.requests import READ_AT_ONCE, SHORTEST_SECONDS
from isthmus.layout.traffic import machine_shards, outer_bytes
from isthmus.planner.cost import exchange_seconds
from isthmus.planner.memory import MASTER_BYTES

POLL_SECONDS = SHORTEST_SECONDS / 2  # until a closer, and then the others, notice the end of a round
# Checking a payload: hash, unpack, squared norm. One core of a busy machine does 6 to 9 MB/s of packed 2bit.
VERIFY_BYTES_PER_SECOND = 10e6
TOGETHER = 0.98  # kinds with at least this share of the longest round count as delivering together


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterExchange:
    """The end of a round. Bytes count the whole replica, seconds its slowest machine."""

    mbps: float
    latency_ms: float
    up_bytes: int
    down_bytes: int
    up_seconds: float
    down_seconds: float

    @property
    def seconds(self) -> float:
        return self.up_seconds + self.down_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The closer's work between the last upload and the manifest."""

    closer: str
    verify_bytes: int  # all other payloads of the round
    last_bytes: int  # those that arrive together at its end
    seconds: float


def has_bucket(recipe: Recipe) -> bool:
    """Return whether the run uses a bucket: AdamW averages gradients, and one replica has no peers."""
    return recipe.outer.method != "adamw" and recipe.num_replicas > 1


def _machines(recipe: Recipe, replica: ReplicaConfig) -> tuple[tuple[list[int], list[int]], ...]:
    """Return (shards written, shards read) of every machine; the processes of a sharded replica share one."""
    parts = machine_shards(recipe, replica)
    if not replica.sharded:
        return parts
    writes, reads = (sorted({i for part in parts for i in part[way]}) for way in (0, 1))
    return ((writes, reads),)


def exchange_of(recipe: Recipe, member: Member, sizes: tuple[int, ...]) -> OuterExchange:
    """Return the exchange, with every machine on its own link; the slowest machine counts."""
    link, others = member.config.outer_link, recipe.num_replicas - 1
    up, down = outer_bytes(recipe, member, sizes)
    if has_bucket(recipe):
        machines = _machines(recipe, member.config)
        up_seconds = max(
            _transfer(link, sum(sizes[i] for i in w), len(w) + (n == 0)) for n, (w, _) in enumerate(machines)
        )
        # All other replicas' shards, and this replica's own that another machine sent: the embedding's.
        read = [{i: others + (i not in w) for i in r} for w, r in machines]  # how many of each shard
        down_seconds = max(
            _transfer(link, sum(n * sizes[i] for i, n in counts.items()), _waits(sum(counts.values())))
            for counts in read
        )
    else:
        up_seconds = down_seconds = exchange_seconds(recipe, member) / 2
    return OuterExchange(
        mbps=link.mbps,
        latency_ms=link.latency_ms,
        up_bytes=up,
        down_bytes=down,
        up_seconds=up_seconds,
        down_seconds=down_seconds,
    )


def _transfer(link: LinkConfig, num_bytes: float, num_waits: float) -> float:
    """Return the seconds for the bytes and for successive answers, at two latencies each."""
    return num_bytes * 8 / (link.mbps * 1e6) + num_waits * 2 * link.latency_ms / 1e3


def _waits(num_requests: int) -> int:
    """Return the waits for requests made together: a limited number runs at the same time."""
    return ceil(num_requests / READ_AT_ONCE)


def closing_of(recipe: Recipe, turns: Mapping[str, float], sizes: tuple[int, ...]) -> Closing | None:
    """Return the closing. Full replicas close if there are any. Earlier arrivals are already checked."""
    if not has_bucket(recipe):
        return None
    closer = min(recipe.replicas, key=lambda r: (r.parts > 1, -r.outer_link.mbps))
    payload, latest = sum(sizes), max(turns.values())
    late = [r for r in recipe.replicas if turns[r.name] > TOGETHER * latest]
    num_last = sum(r.count for r in late) - (closer in late)
    # A listing, the commits, their shards, the manifest, and the poll of the others.
    waits = 1 + _waits(num_last) + _waits(num_last * len(sizes)) + 2
    reading = _transfer(closer.outer_link, num_last * payload, waits)
    return Closing(
        closer=closer.name,
        verify_bytes=(recipe.num_replicas - 1) * payload,
        last_bytes=num_last * payload,
        seconds=reading + num_last * payload / VERIFY_BYTES_PER_SECOND + 2 * POLL_SECONDS,
    )


def snapshot_of(recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of one anchor in the bucket, and how many a run writes."""
    if not has_bucket(recipe):
        return 0, 0
    copies = 2 if recipe.outer.method == "diloco" else 1  # includes its momentum
    size = MASTER_BYTES["fp64" if recipe.inner.precision == "fp64" else "fp32"]
    return copies * recipe.model.num_stored * size, recipe.outer.rounds // recipe.bucket.anchor_every


def stored_bytes(recipe: Recipe, sizes: tuple[int, ...], snapshot: int, num_snapshots: int) -> int:
    """Return the most bytes in the bucket at any time. With bucket.keep_rounds, each new anchor deletes older
    objects."""
    if not has_bucket(recipe):
        return 0
    updates, keep, every = recipe.num_replicas, recipe.bucket.keep_rounds, recipe.bucket.anchor_every
    rounds = min(recipe.outer.rounds, keep + 2 * every) if keep else recipe.outer.rounds
    anchors = min(num_snapshots, rounds // every + 1) if keep else num_snapshots
    return rounds * updates * sum(sizes) + anchors * snapshot
