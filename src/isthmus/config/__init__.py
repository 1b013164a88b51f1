"""The Recipe tree: TOML in, frozen and checked dataclasses out.

May import nothing else; standard library only.
"""

from isthmus.config.checks import nearest
from isthmus.config.fleet import AUTO, BucketConfig, LinkConfig, Member, ReplicaConfig
from isthmus.config.model import PRESETS, ModelConfig
from isthmus.config.toml import (
    build_table,
    dump_recipe,
    load_recipe,
    parse_recipe,
    stored_recipe,
    toml_line,
)
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
    "stored_recipe",
    "toml_line",
]
