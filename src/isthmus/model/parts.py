"""The form of the model's parts in training: unchanged, compiled, or recomputed in the backward."""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.utils.checkpoint import checkpoint

from isthmus.model.llama import RunLayer, head_losses, layer

# Stacks of other sizes, stages with other boundaries and finishing rounds each compile anew.
MAX_VARIANTS = 64


@dataclass(frozen=True, slots=True)
class Parts:
    """`llama.layer` and `llama.head_losses`, or equivalent functions."""

    layer: RunLayer = layer
    head_losses: RunLayer = head_losses


@lru_cache(maxsize=4)
def parts(compiled: bool = False, recompute: bool = False) -> Parts:
    """`compiled`: compile one layer and the head with its loss, each once. Compiling the whole model would
    take longer with every layer, and gains no speed for a full replica (bench/RESULTS.md).

    `recompute`: a layer keeps only its input and runs again in the backward (`inner.recompute`).
    """
    run_layer, losses = layer, head_losses
    if compiled:
        allow_variants()
        run_layer, losses = (torch.compile(part, dynamic=False) for part in (layer, head_losses))
    if recompute:
        # A layer uses no randomness, and reading the random state would end a recorded step.
        run_layer = partial(checkpoint, run_layer, use_reentrant=False, preserve_rng_state=False)
    return Parts(run_layer, losses)


def allow_variants() -> None:
    """Raise torch's limit of 8 variants of a function."""
    from torch.compiler import config

    config.recompile_limit = max(MAX_VARIANTS, config.recompile_limit)
