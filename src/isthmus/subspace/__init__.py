"""The subspace part of the method: basis, boundary, embedding (sec. 2.2 and 2.4 of arXiv 2601.02360).

May import config, layout and model.
"""

from isthmus.subspace.basis import grassmann_step, project, random_basis
from isthmus.subspace.boundary import OpenBoundary, OpeningBoundary, SubspaceBoundary, learned_part
from isthmus.subspace.embedding import reproject, split

__all__ = [
    "OpenBoundary",
    "OpeningBoundary",
    "SubspaceBoundary",
    "grassmann_step",
    "learned_part",
    "project",
    "random_basis",
    "reproject",
    "split",
]
