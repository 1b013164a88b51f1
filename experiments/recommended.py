"""The recommended settings, once for every size: edit them here. Standard library only.

They send no more bytes than the paper's mixed fleet, on either kind of link: the paper has k/d = 1/8 in bf16
between stages, and 32 entries of a chunk in fp32 between replicas.
"""

from fractions import Fraction

from experiments.budget import fitting
from isthmus.config import ModelConfig

PAPERS = Fraction(1, 8)
WIRE = "int5"
SETTINGS = ("inner.optimizer=muon", "outer.keep=128", "outer.values=2bit")


def recommended(model: ModelConfig) -> tuple[str, ...]:
    """As `--set` takes them. k is the largest that this wire sends in the paper's bytes."""
    return (
        *SETTINGS,
        f"replicas.edge.wire={WIRE}",
        f"replicas.edge.compression={fitting(WIRE, PAPERS, model)}",
    )
