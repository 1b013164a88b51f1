"""Layers -> stages, full-model names kept. Standard library only.

The rule: embedding and head each weigh as much as one layer; the weights are dealt as evenly as they go,
first stages taking the remainder (9 layers in 4 stages: 2, 3, 3, 1); a stage left without a layer takes one
from the fullest. The paper does not give its split, and boundary positions change the loss, so the rule is
part of a run.
"""

from functools import cache, lru_cache

from isthmus.config import ModelConfig
from isthmus.config.model import TABLES

EMBEDDING = "tok_embeddings.weight"


def table_name(boundary: int) -> str:
    """The learned table of this boundary, where subspace.anchor is "learned"."""
    return f"{TABLES}{boundary}.weight"


def is_looked_up(name: str) -> bool:
    """A table of rows for tokens: nothing is multiplied by it."""
    return name == EMBEDDING or name.startswith(TABLES)


@cache
def layers_per_stage(num_layers: int, num_stages: int) -> tuple[int, ...]:
    share, remainder = divmod(num_layers + 2, num_stages)
    counts = [share + (s < remainder) for s in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    while min(counts) < 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return tuple(counts)


@cache
def boundaries(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """For each of the S-1 boundaries, the number of layers that lie before it."""
    counts = layers_per_stage(num_layers, num_stages)
    return tuple(sum(counts[: s + 1]) for s in range(num_stages - 1))


def stage_of(name: str, num_layers: int, num_stages: int) -> int:
    """The stage that trains the parameter of this full-model name."""
    if name == EMBEDDING:
        return 0
    if name.startswith(TABLES):  # with the stage that adds it to what it receives
        return min(int(name.split(".")[1]) + 1, num_stages - 1)
    if not name.startswith("layers."):
        return num_stages - 1
    layer = int(name.split(".")[1])
    return sum(layer >= edge for edge in boundaries(num_layers, num_stages))


@lru_cache(maxsize=256)
def stage_names(model: ModelConfig, num_stages: int) -> tuple[tuple[str, ...], ...]:
    """The parameters of every stage, each in the order that all replicas share."""
    stages: list[list[str]] = [[] for _ in range(num_stages)]
    for name in model.shapes():
        stages[stage_of(name, model.layers, num_stages)].append(name)
    return tuple(tuple(names) for names in stages)
