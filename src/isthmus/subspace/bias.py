"""The bias of compression: how much of the stream a boundary drops, how far the embedding leaves S."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from isthmus import gpu
from isthmus.model.llama import BoundaryFunction
from isthmus.subspace import project, split

ROWS = 8192  # of the embedding per step
Measure = Callable[[Tensor, Tensor], Tensor]  # (stream, tokens) -> measurement, still on the device


def energies(basis: Tensor, table: Tensor) -> Measure:
    """(||r - r U U^T||^2, ||r||^2) of r = x - T_perp[tokens]: the energy dropped, and all of it.

    `table` is the whole TE, as the boundary has it; only rows that are looked up are split. The energies of a
    batch's parts add up.
    """

    def measure(x: Tensor, tokens: Tensor) -> Tensor:
        _, t_perp = split(embedding(tokens, table).to(basis.dtype), basis)  # (B, L, D)
        rest = x.to(basis.dtype) - t_perp
        dropped = rest - project(rest, basis)
        return torch.stack([_energy(dropped), _energy(rest)])

    return measure


def share(energy: Tensor) -> Tensor:
    """||r - r U U^T||^2 / ||r||^2: the share of energy that the boundary drops."""
    return _ratio(energy[0], energy[1])


def outside(basis: Tensor, table: Tensor) -> Measure:
    """A measure of one batch's share."""
    measure = energies(basis, table)
    return lambda x, tokens: share(measure(x, tokens))


def watched(function: BoundaryFunction, measure: Measure, found: list[Tensor]) -> BoundaryFunction:
    """Wrap a boundary function so that it also appends its measurements to `found`."""

    def send(x: Tensor, tokens: Tensor) -> Tensor:
        found.append(measure(x, tokens))
        return function(x, tokens)

    return send


def drift(table: Tensor, frozen: Tensor, basis: Tensor) -> Tensor:
    """||TE (I - U U^T) - T_perp|| / ||T_perp||: how far a round took the embedding out of S, before eqs. 3-4
    of arXiv 2601.02360 fold it into T_perp. `frozen` is the table at the round's start, on any device.

    It takes ROWS rows at a time, so that the device does not run out of memory.
    """
    moved = whole = torch.zeros((), dtype=gpu.wide(basis.device), device=basis.device)
    for now, before in zip(table.split(ROWS), frozen.split(ROWS), strict=True):
        _, t_perp = split(before.to(basis), basis)
        _, new = split(now.to(basis), basis)
        moved, whole = moved + _energy(new - t_perp), whole + _energy(t_perp)
    return _ratio(moved, whole).sqrt()


def _energy(x: Tensor) -> Tensor:
    return x.square().sum(dtype=gpu.wide(x.device))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    # An empty stream has no dropped energy.
    return part / whole.clamp(min=torch.finfo(whole.dtype).tiny)
