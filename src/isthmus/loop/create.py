"""Create a run of named tensors: run.json, theta^(0), and a file for each replica."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from isthmus.config import BucketConfig, DataConfig, InnerConfig, OuterConfig, Recipe, ReplicaConfig
from isthmus.config.model import NamedTensors
from isthmus.config.toml import Overrides, dump_recipe, settings, stored_recipe
from isthmus.errors import ConfigError
from isthmus.loop.tensors import Parameters
from isthmus.protocol.bundle import hand_out, store_settings
from isthmus.runtime.create import create_named
from isthmus.store.url import SUFFIX

LEAST_SHARD_BYTES, MOST_SHARD_BYTES = 64 << 20, 10**9
SHARDS = 16  # at least so many for a large model, so that its ranks can share the work
START_SECONDS = 600.0  # round 1 waits so long for all replicas
SETTABLE = ("outer.", "bucket.")


def create(
    model: nn.Module,
    url: str | os.PathLike[str],
    *,
    inner_steps: int,
    rounds: int,
    replicas: Sequence[str],
    name: str = "run",
    keys: str | os.PathLike[str] | None = None,
    overrides: Overrides | None = None,
) -> dict[str, Path]:
    """Create a run that starts from the model's present weights; return each replica's file."""
    found = Parameters(model)
    if isinstance(replicas, str) or not replicas:
        raise ConfigError('replicas is a list of names, for example ["a", "b"]')
    recipe = _recipe(found, inner_steps, rounds, replicas, name, overrides or {})
    url, folder = os.fspath(url), Path(keys or Path("keys") / name)
    size = sum(p.numel() * p.element_size() for p in found.trained.values())
    create_named(
        *(recipe, url, folder, found.tensors),
        shard_bytes=min(MOST_SHARD_BYTES, max(LEAST_SHARD_BYTES, size // SHARDS)),
        anchor=found.anchor(),
        frozen=found.frozen_digest(),
        hand_out=lambda run, where, secrets: hand_out(run, url, store_settings(url, None), where, secrets),
    )
    return {replica: folder / f"{replica}{SUFFIX}" for replica in replicas}


def _recipe(
    found: Parameters, inner_steps: int, rounds: int, replicas: Sequence[str], name: str, overrides: Overrides
) -> Recipe:
    for line in settings(overrides):
        if not line.startswith(SETTABLE):
            raise ConfigError(
                f"{line.partition('=')[0]} cannot be set for a loop of your own, which has its own optimiser "
                f"and data; outer.* and bucket.* can"
            )
    shapes = tuple((each.name, each.shape) for each in found.tensors)
    recipe = Recipe(
        name=name,
        model=NamedTensors(tensors=shapes),
        data=DataConfig(corpus="", eval_by="none"),
        inner=InnerConfig(batch=1, micro_batches=1, precision="fp64" if found.is_double else "fp32"),
        outer=OuterConfig(inner_steps=inner_steps, rounds=rounds),
        bucket=BucketConfig(start_seconds=START_SECONDS),
        replicas=tuple(ReplicaConfig(name=replica) for replica in replicas),
    )
    recipe = stored_recipe(dump_recipe(recipe, with_model=False), tensors=shapes, overrides=overrides)
    if recipe.outer.method == "adamw":
        raise ConfigError('outer.method "adamw" averages gradients; take "sparseloco" or "diloco"')
    return recipe
