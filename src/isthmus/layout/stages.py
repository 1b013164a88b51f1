"""Assign layers to stages, keeping full-model names. Standard library only.

The rule: embedding and head each weigh as much as one layer. The weights are split as evenly as possible,
with the remainder on the first stages (9 layers in 4 stages: 2, 3, 3, 1). A stage without a layer takes one
from the fullest. The paper does not state its split, and boundary positions change the loss, so the rule is
part of a run.

With `model.stage_cut = "flops"` the embedding weighs nothing and the head its multiplications (ten layers of
`qwen3-0.6b`). The last stage takes the number of layers that minimises the work of the busiest stage.
"""

from functools import lru_cache
from math import prod

from isthmus.config import ModelConfig
from isthmus.config.model import TABLES

EMBEDDING = "tok_embeddings.weight"


def table_name(boundary: int) -> str:
    """The name of this boundary's learned table, if subspace.anchor is "learned"."""
    return f"{TABLES}{boundary}.weight"


def is_looked_up(name: str) -> bool:
    """Return whether this is a table of token rows, which no matrix product uses."""
    return name == EMBEDDING or name.startswith(TABLES)


@lru_cache(maxsize=4096)
def layers_per_stage(model: ModelConfig, num_stages: int) -> tuple[int, ...]:
    num_layers = model.layers
    if model.stage_cut == "flops" and num_stages > 1:
        layer = sum(prod(shape) for shape in model.layer_shapes().values() if len(shape) == 2)
        head, others = model.vocab * model.width / layer, num_stages - 1
        last = range(1, num_layers - others + 1)
        own = min(last, key=lambda number: max(-(-(num_layers - number) // others), number + head))
        share, remainder = divmod(num_layers - own, others)
        return (*(share + (s < remainder) for s in range(others)), own)
    share, remainder = divmod(num_layers + 2, num_stages)
    counts = [share + (s < remainder) for s in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    while min(counts) < 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return tuple(counts)


@lru_cache(maxsize=4096)
def boundaries(model: ModelConfig, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers before each of the S-1 boundaries."""
    counts = layers_per_stage(model, num_stages)
    return tuple(sum(counts[: s + 1]) for s in range(num_stages - 1))


def stage_of(name: str, model: ModelConfig, num_stages: int) -> int:
    """Return the stage that trains the parameter of this full-model name."""
    if name == EMBEDDING:
        return 0
    if name.startswith(TABLES):  # in the stage that adds it to its input
        return min(int(name.split(".")[1]) + 1, num_stages - 1)
    if not name.startswith("layers."):
        return num_stages - 1
    layer = int(name.split(".")[1])
    return sum(layer >= edge for edge in boundaries(model, num_stages))


@lru_cache(maxsize=256)
def stage_names(model: ModelConfig, num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Return the parameters of every stage, each in the order that all replicas share."""
    stages: list[list[str]] = [[] for _ in range(num_stages)]
    for name in model.shapes():
        stages[stage_of(name, model, num_stages)].append(name)
    return tuple(tuple(names) for names in stages)
