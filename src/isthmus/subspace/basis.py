"""U from a seed, projection onto S = Col(U), and the Grassmann step of Table 5c."""

import torch
from torch import Tensor


def random_basis(width: int, dim: int, seed: int) -> Tensor:
    """U (D, K) with orthonormal columns, drawn from the seed: the same on every machine without sending it
    (sec. 2.2 of arXiv 2601.02360).

    It is drawn and factorised in float64 on the CPU, so that every device rounds the same matrix.
    """
    if not 1 <= dim <= width:
        raise ValueError(f"subspace of {dim} dimensions in a width of {width}; 1 to {width} fit")
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(width, dim, generator=generator, dtype=torch.float64)
    basis, upper = torch.linalg.qr(gaussian)  # (D, K)
    return basis * torch.sign(upper.diagonal())  # sign fixed: QR is unique, and U uniform over the subspaces


def project(x: Tensor, basis: Tensor) -> Tensor:
    """Pi_S on the last axis: x U U^T."""
    return (x @ basis) @ basis.mT


def grassmann_step(basis: Tensor, covariance: Tensor, lr: float) -> Tensor:
    """Turn U toward the span of the activation gradients (Table 5c): one Riemannian step on
    ||G - G U U^T||^2.

    covariance = sum of g^T g (D, D). The tangent direction is 2 (I - U U^T) C U, retracted by QR.
    """
    towards = covariance @ basis  # (D, K)
    tangent = 2 * (towards - basis @ (basis.mT @ towards)) / covariance.trace()
    turned, upper = torch.linalg.qr(basis + lr * tangent)
    return turned * torch.sign(upper.diagonal())
