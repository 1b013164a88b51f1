"""Recipes: TOML in, frozen and checked dataclasses out. Standard library only.

May import nothing else.
"""

from isthmus.config.checks import nearest
from isthmus.config.fleet import AUTO, BucketConfig, LinkConfig, Member, ReplicaConfig
from isthmus.config.model import PRESETS, ModelConfig
from isthmus.config.toml import build_table, dump_recipe, load_recipe, parse_recipe, toml_line
from isthmus.config.tree import (
    DataConfig,
    FinishConfig,
    InnerConfig,
    OuterConfig,
    Recipe,
    SubspaceConfig,
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
