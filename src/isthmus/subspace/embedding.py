"""TE = T_S + T_perp (sec. 2.4): the part of the embedding in S, and the rest, frozen within a round."""

from torch import Tensor

from isthmus.subspace.basis import project


def split(table: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """T_S <- TE U U^T and T_perp <- TE - T_S: the state at the start of a run and of every round."""
    t_s = project(table, basis)
    return t_s, table - t_s


def reproject(t_s: Tensor, t_perp: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Fold what left S into T_perp; TE = T_S + T_perp is unchanged (eqs. 3-4 of arXiv 2601.02360)."""
    inside = project(t_s, basis)
    return inside, t_perp + (t_s - inside)
