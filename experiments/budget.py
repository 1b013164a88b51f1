"""Bytes of a recipe by kind of link, and the k that fits into the bytes of another. Standard library only."""

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from isthmus.config import ModelConfig, Recipe
from isthmus.layout.traffic import dense_round_bytes, inner_step_bytes, outer_bytes, shard_bytes
from isthmus.layout.wire import stream_bytes

GROUP, WIDE = 8, 256  # a k of WIDE and more is a multiple of GROUP, as matrix units like it


def stage_bytes(recipe: Recipe) -> int:
    """What crosses all boundaries of one pipelined replica in a round, both ways, ids counted; 0 where there
    is none. Of several kinds, the one that sends most."""
    each = [sum(inner_step_bytes(recipe, member).values()) for member in recipe.fleet()]
    return recipe.outer.inner_steps * max(each)


def open_stage_bytes(recipe: Recipe) -> int:
    """The same with nothing compressed, in bf16."""
    members = [replace(one, config=replace(one.config, wire="bf16")) for one in recipe.fleet()]
    each = [sum(inner_step_bytes(recipe, member, recipe.model.width).values()) for member in members]
    return recipe.outer.inner_steps * max(each)


def stage_share(recipe: Recipe) -> float:
    """Bytes between stages over the whole run, of those with nothing compressed, in bf16. In finishing rounds
    whole streams cross, however far a boundary has opened."""
    opened = recipe.finish.rounds / recipe.outer.rounds
    return opened + (1 - opened) * stage_bytes(recipe) / open_stage_bytes(recipe)


def replica_bytes(recipe: Recipe) -> int:
    """Up and down of all replicas in a round."""
    sizes = shard_bytes(recipe)
    return sum(sum(outer_bytes(recipe, member, sizes)) for member in recipe.fleet())


def per_token(recipe: Recipe) -> tuple[float, float]:
    """(between stages, for a token of a pipelined replica; between replicas, for a token of any)."""
    own = recipe.round_tokens / recipe.num_replicas
    return stage_bytes(recipe) / own, replica_bytes(recipe) / recipe.round_tokens


def of_every_step(recipe: Recipe) -> float:
    """Bytes between replicas as a share of those that averaging fp32 gradients at every step takes."""
    plain = recipe.model.num_parameters / recipe.model.num_stored  # without learned tables
    return replica_bytes(recipe) / (dense_round_bytes(recipe)["replicas"] * plain)


@lru_cache(maxsize=256)
def fitting(wire: str, ratio: Fraction, model: ModelConfig) -> str | None:
    """The largest k/d whose streams take no more bytes on this wire than bf16 at `ratio`, both ways together;
    None where not even one dimension does."""
    allowed = 2 * stream_bytes("bf16", 1, model.context, int(model.width * ratio), False)

    def taken(dim: int) -> int:
        return sum(stream_bytes(wire, 1, model.context, dim, centred) for centred in (True, False))

    fits = [dim for dim in range(1, model.width + 1) if taken(dim) <= allowed]
    most = max(fits, default=0)
    return str(Fraction(most - (most % GROUP if most >= WIDE else 0), model.width)) if fits else None
