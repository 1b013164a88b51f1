"""A stage boundary: two affine maps with the wire between them."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from isthmus.model.llama import look_up


class OpenBoundary:
    """Passes the residual stream unchanged, in all its D dimensions."""

    def compress(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x

    def expand(self, z: Tensor, tokens: Tensor) -> Tensor:
        return z


class SubspaceBoundary:
    """Carries the residual stream over a slow link in K of its D dimensions (sec. 2.2 of arXiv 2601.02360).

    Both maps are affine, so plain autograd on each side of the wire already sends back grad @ U.

    Any table that differs from T_perp only inside S gives the same result: the difference is subtracted
    before the projection and added after it. Replicas use the whole TE of the anchor: bf16 then carries
    smaller numbers, and no second table is needed.
    """

    def __init__(self, basis: Tensor, t_perp: Tensor) -> None:
        self.basis = basis  # (D, K)
        self.t_perp = t_perp  # (V, D), frozen within a round

    def compress(self, x: Tensor, tokens: Tensor) -> Tensor:
        frozen = embedding(tokens, self.t_perp).to(x.dtype)
        return (x - frozen) @ self.basis.to(x.dtype)  # (B, L, D) -> (B, L, K)

    def expand(self, z: Tensor, tokens: Tensor) -> Tensor:
        # RoPE adds nothing to the stream, so the paper's PosEmbed term is zero here.
        frozen = embedding(tokens, self.t_perp).to(z.dtype)
        return z @ self.basis.to(z.dtype).mT + frozen  # (B, L, K) -> (B, L, D)


class OpeningBoundary(OpenBoundary):
    """A boundary in a finishing round: x_hat = T + (P + a (I - P)) (x - T). At a = 0 it is the subspace
    boundary, at a = 1 it changes nothing (docs/method.md, Finishing rounds).

    The part outside S needs the whole stream on the wire. The sender blends and sends x_hat.
    """

    def __init__(self, basis: Tensor, t_perp: Tensor, share: Tensor) -> None:
        self.basis, self.t_perp = basis, t_perp
        self.share = share  # a, 0-dimensional, so that a compiled forward reads each round's value

    def compress(self, x: Tensor, tokens: Tensor) -> Tensor:
        basis = self.basis.to(x.dtype)
        drift = x - embedding(tokens, self.t_perp).to(x.dtype)  # (B, L, D)
        outside = drift - (drift @ basis) @ basis.mT
        return x - (1 - self.share).to(x.dtype) * outside  # in this form a = 1 is exactly x


def learned_part(
    boundary: OpenBoundary | SubspaceBoundary, table: Tensor, tokens: Tensor, dtype: torch.dtype
) -> Tensor:
    """The contribution of a learned table (V, D) or (R, V, D) to x_hat, if subspace.anchor is "learned".

    Both sides of a link know the tokens, so a part outside S that depends only on the token need not cross
    it. The paper uses T_perp for that; here every boundary also learns a table. It starts at zero and fades
    as the boundary opens.
    """
    part = look_up(table, tokens, dtype)  # (B, L, D)
    return part * (1 - boundary.share).to(dtype) if isinstance(boundary, OpeningBoundary) else part
