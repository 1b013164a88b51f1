"""Bytes per link, as plain arithmetic. Standard library only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from isthmus.config import Member, ModelConfig, Recipe, ReplicaConfig
from isthmus.layout.chunks import packed_many_bytes
from isthmus.layout.stages import EMBEDDING, boundaries, stage_names, stage_of
from isthmus.layout.wire import FLOAT_BYTES, stream_bytes

STAGE_PURPOSES = ("activations", "gradients", "tokens")
REPLICA_PURPOSES = ("payload_up", "payload_down", "control")
PURPOSES = STAGE_PURPOSES + REPLICA_PURPOSES
GRADIENT_BYTES = 4  # dense data parallelism averages fp32 gradients


def shards(recipe: Recipe, also: Iterable[int] = ()) -> tuple[tuple[str, ...], ...]:
    """Return how every replica cuts its update into shards. The cut is fine enough that each stage of each
    replica, and each process of a sharded one, finds its own part whole. `also`: further numbers of stages.

    If there are such parts, the embedding is its own shard, because every compressed stage applies its update
    (docs/method.md, The embedding).
    """
    parts = {*(replica.parts for replica in recipe.replicas), *also}
    return _shards(recipe.model, frozenset(number for number in parts if number > 1))


@lru_cache(maxsize=256)
def _shards(model: ModelConfig, stages: frozenset[int]) -> tuple[tuple[str, ...], ...]:
    if not stages:
        return (tuple(model.shapes()),)
    parts: dict[tuple[int, ...], list[str]] = {}
    for name in model.shapes():
        owners = (-1,) if name == EMBEDDING else tuple(stage_of(name, model, s) for s in sorted(stages))
        parts.setdefault(owners, []).append(name)
    return tuple(tuple(names) for names in parts.values())


def shard_bytes(recipe: Recipe, also: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the packed size of each shard of one replica's update, exactly as the codec writes it."""
    shapes, outer = recipe.model.shapes(), recipe.outer
    keep, values = codec_settings(recipe)
    return tuple(
        packed_many_bytes({name: shapes[name] for name in names}, outer.chunk_side, keep, values)
        for names in shards(recipe, also)
    )


def codec_settings(recipe: Recipe) -> tuple[int, str]:
    """Return (keep, values) of TOP-kappa and Q; DiLoCo sends everything."""
    outer = recipe.outer
    if outer.method == "sparseloco":
        return outer.keep, outer.values
    return outer.chunk_side**2, "fp64" if recipe.inner.precision == "fp64" else "fp32"


def machine_shards(recipe: Recipe, replica: ReplicaConfig) -> tuple[tuple[list[int], list[int]], ...]:
    """Return (shards written, shards read) for every machine of a replica, or every process of a sharded one,
    as the exchange assigns them."""
    return _machine_shards(shards(recipe), recipe.model, replica.parts, replica.compressed)


@lru_cache(maxsize=256)
def _machine_shards(
    parts: tuple[tuple[str, ...], ...], model: ModelConfig, num_stages: int, compressed: bool
) -> tuple[tuple[list[int], list[int]], ...]:
    found = []
    for own in map(set, stage_names(model, num_stages)):
        writes = [i for i, names in enumerate(parts) if own.issuperset(names)]
        extra = [i for i, names in enumerate(parts) if names == (EMBEDDING,) and compressed]
        found.append((writes, sorted({*writes, *extra})))
    return tuple(found)


def shards_read(recipe: Recipe, member: Member) -> tuple[int, ...]:
    """Return how many machines of this replica read each shard of every other replica's update."""
    machines = machine_shards(recipe, member.config)
    return tuple(sum(i in reads for _, reads in machines) for i in range(len(shards(recipe))))


def inner_step_bytes(recipe: Recipe, member: Member, subspace_dim: int | None = None) -> dict[str, int]:
    """Return what crosses all stage boundaries of one replica in one inner step, by purpose."""
    replica, model = member.config, recipe.model
    num_links = len(boundaries(model, replica.stages))
    dim = replica.subspace_dim(model.width) if subspace_dim is None else subspace_dim
    stream = num_links * stream_bytes(replica.wire, recipe.batch_of(replica), model.context, dim)
    # One id more than positions: the last stage finds its targets in the same message.
    ids = num_links * recipe.batch_of(replica) * (model.context + 1) * model.token_bytes
    return {"activations": stream, "gradients": stream, "tokens": ids}


def micro_batch_bytes(recipe: Recipe, member: Member) -> tuple[int, int]:
    """Return (forward, backward): the bytes of one micro-batch on one link between two stages."""
    crossing, shares = (
        inner_step_bytes(recipe, member),
        (member.config.stages - 1) * recipe.micro_batches_of(member.config),
    )
    return (crossing["activations"] + crossing["tokens"]) // shares, crossing["gradients"] // shares


def round_bytes(recipe: Recipe, round_number: int = 1) -> dict[str, int]:
    """Return all bytes of one outer round, over all replicas, by purpose; finishing rounds send whole
    streams."""
    recipe = recipe.in_round(round_number)
    total: dict[str, int] = dict.fromkeys(PURPOSES, 0)
    steps, sizes = recipe.outer.inner_steps, shard_bytes(recipe)
    for member in recipe.fleet():
        for purpose, count in inner_step_bytes(recipe, member).items():
            total[purpose] += steps * count
        up, down = outer_bytes(recipe, member, sizes)
        total["payload_up"] += up
        total["payload_down"] += down
    return total


def outer_bytes(recipe: Recipe, member: Member, sizes: tuple[int, ...] | None = None) -> tuple[int, int]:
    """Return (up, down) of one replica in one outer round, over all its machines."""
    if recipe.outer.method == "adamw":
        each = recipe.outer.inner_steps * _ring_bytes(recipe)
        return each, each
    sizes = shard_bytes(recipe) if sizes is None else sizes
    others = recipe.num_replicas - 1
    if not others:
        return 0, 0
    # A machine already holds its own update; the stages after the first read the embedding's shard.
    down = sum(
        size * (others * readers + readers - 1)
        for size, readers in zip(sizes, shards_read(recipe, member), strict=True)
    )
    return sum(sizes), down


def _ring_bytes(recipe: Recipe, num_replicas: int | None = None) -> int:
    """Return one replica's upload in a ring all-reduce of the gradients: 2 (M-1)/M of them (download: the
    same)."""
    m = recipe.num_replicas if num_replicas is None else num_replicas
    return 2 * (m - 1) * recipe.model.num_stored * GRADIENT_BYTES // m


def _in_floats(member: Member) -> Member:
    wire = member.config.wire if member.config.wire in FLOAT_BYTES else "bf16"
    return replace(member, config=replace(member.config, wire=wire))


def dense_round_bytes(recipe: Recipe, took_part: Sequence[Member] | None = None) -> Mapping[str, int]:
    """Return the bytes of the same round with open stage boundaries, in bf16 instead of few bits, and with
    gradients averaged every inner step.

    `took_part`: the replicas to compare with, if some of the fleet were absent.
    """
    steps, members = recipe.outer.inner_steps, recipe.fleet() if took_part is None else took_part
    stages = sum(
        steps * sum(inner_step_bytes(recipe, _in_floats(member), recipe.model.width).values())
        for member in members
    )
    m = len(members)
    return {"stages": stages, "replicas": 2 * steps * m * _ring_bytes(recipe, m) if m else 0}
