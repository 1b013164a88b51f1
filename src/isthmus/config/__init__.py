"""Recipes: TOML in, frozen and checked dataclasses out. Standard library only."""

from isthmus.config.toml import build_table, dump_recipe, load_recipe, parse_recipe, toml_line
from isthmus.config.tree import (
    AUTO,
    PRESETS,
    BucketConfig,
    DataConfig,
    FinishConfig,
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
    "AUTO",
    "PRESETS",
    "BucketConfig",
    "DataConfig",
    "FinishConfig",
    "InnerConfig",
    "LinkConfig",
    "Member",
    "ModelConfig",
    "OuterConfig",
    "Recipe",
    "ReplicaConfig",
    "SubspaceConfig",
    "build_table",
    "dump_recipe",
    "load_recipe",
    "nearest",
    "parse_recipe",
    "toml_line",
]
