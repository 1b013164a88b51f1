"""Recipes: TOML in, frozen and checked dataclasses out. Standard library only."""

from isthmus.config.toml import dump_recipe, load_recipe, parse_recipe
from isthmus.config.tree import (
    PRESETS,
    BucketConfig,
    DataConfig,
    InnerConfig,
    LinkConfig,
    Member,
    ModelConfig,
    OuterConfig,
    Recipe,
    ReplicaConfig,
    SubspaceConfig,
    nearest,
)

__all__ = [
    "PRESETS",
    "BucketConfig",
    "DataConfig",
    "InnerConfig",
    "LinkConfig",
    "Member",
    "ModelConfig",
    "OuterConfig",
    "Recipe",
    "ReplicaConfig",
    "SubspaceConfig",
    "dump_recipe",
    "load_recipe",
    "nearest",
    "parse_recipe",
]
