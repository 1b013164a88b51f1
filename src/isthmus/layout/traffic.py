"""Bytes per link as plain arithmetic. Standard library only."""

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
    """How every replica cuts its update: so finely that each stage of each replica finds its own part whole,
    and each process of a sharded one. `also`: numbers of stages that the recipe need not have.

    The embedding stands alone where there are such parts, because every compressed stage applies its update
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
        owners = (
            (-1,) if name == EMBEDDING else tuple(stage_of(name, model.layers, s) for s in sorted(stages))
        )
        parts.setdefault(owners, []).append(name)
    return tuple(tuple(names) for names in parts.values())


def shard_bytes(recipe: Recipe, also: Iterable[int] = ()) -> tuple[int, ...]:
    """The packed size of each shard of one replica's update, exactly as the codec writes it."""
    shapes, outer = recipe.model.shapes(), recipe.outer
    keep, values = codec_settings(recipe)
    return tuple(
        packed_many_bytes({name: shapes[name] for name in names}, outer.chunk_side, keep, values)
        for names in shards(recipe, also)
    )


def codec_settings(recipe: Recipe) -> tuple[int, str]:
    """(keep, values) of TOP-kappa and Q; DiLoCo sends everything."""
    outer = recipe.outer
    if outer.method == "sparseloco":
        return outer.keep, outer.values
    return outer.chunk_side**2, "fp64" if recipe.inner.precision == "fp64" else "fp32"


def machine_shards(recipe: Recipe, replica: ReplicaConfig) -> tuple[tuple[list[int], list[int]], ...]:
    """(shards it writes, shards it reads) of every machine of a replica, or of every process of a sharded
    one, as the exchange has them."""
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
    """How many machines of this replica read each shard of every other replica's update."""
    machines = machine_shards(recipe, member.config)
    return tuple(sum(i in reads for _, reads in machines) for i in range(len(shards(recipe))))


def inner_step_bytes(recipe: Recipe, member: Member, subspace_dim: int | None = None) -> dict[str, int]:
    """What crosses all the stage boundaries of one replica in one inner step, by purpose."""
    replica, model = member.config, recipe.model
    num_links = len(boundaries(model.layers, replica.stages))
    dim = replica.subspace_dim(model.width) if subspace_dim is None else subspace_dim
    forth, back = (
        num_links * stream_bytes(replica.wire, recipe.batch_of(replica), model.context, dim, centred)
        for centred in (True, False)
    )
    # One id more than there are positions: the last stage finds its targets in the same message.
    ids = num_links * recipe.batch_of(replica) * (model.context + 1) * model.token_bytes
    return {"activations": forth, "gradients": back, "tokens": ids}


def micro_batch_bytes(recipe: Recipe, member: Member) -> tuple[int, int]:
    """(forward, backward): what one micro-batch puts on one link between two stages."""
    crossing, shares = (
        inner_step_bytes(recipe, member),
        (member.config.stages - 1) * recipe.micro_batches_of(member.config),
    )
    return (crossing["activations"] + crossing["tokens"]) // shares, crossing["gradients"] // shares


def round_bytes(recipe: Recipe, round_number: int = 1) -> dict[str, int]:
    """All bytes of one outer round, over all replicas, by purpose; finishing rounds carry whole streams."""
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
    """(up, down) of one replica in one outer round, over all its machines."""
    if recipe.outer.method == "adamw":
        each = recipe.outer.inner_steps * _ring_bytes(recipe)
        return each, each
    sizes = shard_bytes(recipe) if sizes is None else sizes
    others = recipe.num_replicas - 1
    if not others:
        return 0, 0
    # Of its own update a machine holds what it sent; the stages after the first read the embedding's shard.
    down = sum(
        size * (others * readers + readers - 1)
        for size, readers in zip(sizes, shards_read(recipe, member), strict=True)
    )
    return sum(sizes), down


def _ring_bytes(recipe: Recipe, num_replicas: int | None = None) -> int:
    """One replica's upload in one ring all-reduce of the gradients: 2 (M-1)/M of them (and as much down)."""
    m = recipe.num_replicas if num_replicas is None else num_replicas
    return 2 * (m - 1) * recipe.model.num_stored * GRADIENT_BYTES // m


def _in_floats(member: Member) -> Member:
    wire = member.config.wire if member.config.wire in FLOAT_BYTES else "bf16"
    return replace(member, config=replace(member.config, wire=wire))


def dense_round_bytes(recipe: Recipe, took_part: Sequence[Member] | None = None) -> Mapping[str, int]:
    """What the same round costs with open stage boundaries, in bf16 instead of few bits, and with gradients
    averaged every inner step.

    `took_part`: the replicas that it is compared with, where some of the fleet were absent.
    """
    steps, members = recipe.outer.inner_steps, recipe.fleet() if took_part is None else took_part
    stages = sum(
        steps * sum(inner_step_bytes(recipe, _in_floats(member), recipe.model.width).values())
        for member in members
    )
    m = len(members)
    return {"stages": stages, "replicas": 2 * steps * m * _ring_bytes(recipe, m) if m else 0}
