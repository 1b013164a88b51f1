"""The outer methods by the name that a recipe gives them."""

from collections.abc import Mapping

from torch import Tensor

from isthmus.config import OuterConfig
from isthmus.outer.baselines import DiLoCo
from isthmus.outer.sparseloco import SparseLoCo

METHODS = {"sparseloco": SparseLoCo, "diloco": DiLoCo}


def outer_method(config: OuterConfig, anchor: Mapping[str, Tensor]) -> SparseLoCo:
    """The outer method of a recipe. "adamw" has none: its replicas share one set of weights."""
    return METHODS[config.method](anchor, config)
