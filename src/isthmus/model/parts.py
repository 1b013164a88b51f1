"""How the parts of the model run in training: as they are, compiled, or recomputed in the backward."""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.utils.checkpoint import checkpoint

from isthmus.model.llama import RunLayer, head_losses, layer

# Stacks of other sizes, stages with other boundaries and finishing rounds are compiled one after another.
MAX_VARIANTS = 64


@dataclass(frozen=True, slots=True)
class Parts:
    """`llama.layer` and `llama.head_losses`, or functions that do the same."""

    layer: RunLayer = layer
    head_losses: RunLayer = head_losses


@lru_cache(maxsize=4)
def parts(compiled: bool = False, recompute: bool = False) -> Parts:
    """`compiled`: one layer and the head with its loss, each compiled once. Compiling the whole model would
    take longer with every layer; a full replica is as fast as one that does (bench/RESULTS.md).

    `recompute`: a layer keeps its input only, and runs again in the backward (`inner.recompute`).
    """
    run_layer, losses = layer, head_losses
    if compiled:
        allow_variants()
        run_layer, losses = (torch.compile(part, dynamic=False) for part in (layer, head_losses))
    if recompute:
        # There is nothing random in a layer, and asking for its random state would end a recorded step.
        run_layer = partial(checkpoint, run_layer, use_reentrant=False, preserve_rng_state=False)
    return Parts(run_layer, losses)


def allow_variants() -> None:
    """torch gives up on a function after 8 variants. The setting's name has changed, so torch is asked."""
    import torch._dynamo.config as config

    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, max(MAX_VARIANTS, getattr(config, name)))
            return
