"""The stage boundaries of replicas: after which layer, for which rows of a stack, and what they do."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.layout.stages import boundaries, table_name
from isthmus.model.llama import BoundaryFunction
from isthmus.subspace import OpenBoundary, OpeningBoundary, SubspaceBoundary, learned_part, random_basis
from isthmus.subspace.wire import LocalLink

Key = tuple  # equal for boundaries with the same effect: the wire, the U, whether they open


def derived_seed(seed: int, *path: str | int) -> int:
    digest = hashlib.sha256("/".join(map(str, (seed, *path))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def boundary_function(
    boundary: OpenBoundary | SubspaceBoundary,
    link: LocalLink,
    table: Tensor | None = None,
    rows: slice | None = None,
) -> BoundaryFunction:
    """compress, link, expand: the stream's path between two stages. `table` is a learned one; if every
    replica of a stack has its own, ours are these `rows`."""

    def send(x: Tensor, tokens: Tensor) -> Tensor:
        x_hat = boundary.expand(link.carry(boundary.compress(x, tokens)), tokens)
        if table is None:
            return x_hat
        # Read again in every step, since autograd differentiates it.
        own = table if rows is None else table[rows]
        return x_hat + learned_part(boundary, own, tokens, x.dtype)

    return send


class BasisSet:
    """Every U of a run, drawn from the recipe's seed on first use (docs/method.md, The basis).

    It also knows how far the boundaries that project onto them are open in this round.
    """

    def __init__(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> None:
        self.recipe, self.device, self.dtype = recipe, device, dtype
        self.bases: dict[str, Tensor] = {}
        self.opening = False  # a finishing round
        self.share = torch.zeros((), device=device, dtype=dtype)  # its share a

    def begin_round(self, round_number: int) -> bool:
        """Whether boundaries must be rebuilt. Once they open, only the value of a changes."""
        share, before = self.recipe.opening(round_number), self.opening
        self.opening = share is not None
        self.share.fill_(share or 0.0)
        return self.opening != before

    def boundary(self, member: Member, number: int, table: Tensor) -> OpenBoundary | SubspaceBoundary:
        if not member.config.compressed:
            return OpenBoundary()
        basis = self.get(member, number)
        return OpeningBoundary(basis, table, self.share) if self.opening else SubspaceBoundary(basis, table)

    def key(self, member: Member, boundary: int) -> str:
        dim = member.config.subspace_dim(self.recipe.model.width)
        scope = self.recipe.subspace.basis
        if scope == "global":
            return f"{dim}"
        return f"{dim}/{member.name}" if scope == "replica" else f"{dim}/{member.name}/{boundary}"

    def get(self, member: Member, boundary: int) -> Tensor:
        key = self.key(member, boundary)
        if key not in self.bases:
            width, dim = self.recipe.model.width, member.config.subspace_dim(self.recipe.model.width)
            basis = random_basis(width, dim, derived_seed(self.recipe.seed, "basis", key))
            self.bases[key] = basis.to(self.device, self.dtype)
        return self.bases[key]


def boundary_functions(
    recipe: Recipe,
    members: Sequence[Member],
    bases: BasisSet,
    table: Tensor,
    rows_each: int = 1,
    *,
    params: Mapping[str, Tensor],
    outside: Tensor | None = None,
    compiled: bool = False,
) -> dict[int, list[tuple[slice, BoundaryFunction]]]:
    """For each edge (layers before it), its boundaries and their rows of the leading axis; neighbours with
    the same boundary share it. Each member has `rows_each` rows. `params` include learned tables. `outside`:
    a count per row, to which its links add the tokens outside their range. `compiled`: compile few-bit
    wires."""
    at: dict[int, list[tuple[slice, Key, Member, int]]] = {}
    for i, member in enumerate(members):
        rows = slice(i * rows_each, (i + 1) * rows_each)
        for boundary, edge in enumerate(boundaries(recipe.model, member.config.stages)):
            key = boundary_key(member, boundary, bases)
            here = at.setdefault(edge, [])
            if here and here[-1][1] == key and here[-1][0].stop == rows.start:
                here[-1] = (slice(here[-1][0].start, rows.stop), *here[-1][1:])
            else:
                here.append((rows, key, member, boundary))
    return {
        edge: [
            (
                rows,
                build(
                    member, boundary, bases, table, params.get(table_name(boundary)), rows, outside, compiled
                ),
            )
            for rows, _, member, boundary in here
        ]
        for edge, here in at.items()
    }


def boundary_key(member: Member, boundary: int, bases: BasisSet) -> Key:
    basis = bases.key(member, boundary) if member.config.compressed else None
    return (member.config.wire, basis, bases.opening and member.config.compressed)


def forward_key(recipe: Recipe, member: Member, bases: BasisSet) -> Key:
    """Equal for two replicas whose forward passes are the same function."""
    edges = boundaries(recipe.model, member.config.stages)
    return tuple((edge, *boundary_key(member, b, bases)) for b, edge in enumerate(edges))


def build(
    member: Member,
    boundary: int,
    bases: BasisSet,
    table: Tensor,
    learned: Tensor | None,
    rows: slice,
    outside: Tensor | None,
    compiled: bool,
) -> BoundaryFunction:
    between = bases.boundary(member, boundary, table)
    num_tokens = bases.recipe.batch_of(member.config) * bases.recipe.model.context
    link = LocalLink(member.config.wire, num_tokens, None if outside is None else outside[rows], compiled)
    if learned is None or learned.dim() == 2 or rows == slice(0, len(learned)):
        return boundary_function(between, link, learned)
    return boundary_function(between, link, learned, rows)


def projected_names(recipe: Recipe, member: Member) -> tuple[str, ...]:
    """W_p1 and W_p2 of the layers before the replica's last boundary, which Table 5b projects."""
    if not member.config.compressed:
        return ()
    last = boundaries(recipe.model, member.config.stages)[-1]
    return tuple(
        f"layers.{i}.{matrix}.weight" for i in range(last) for matrix in ("attention.wo", "feed_forward.w2")
    )


def write_projection(weight: Tensor, basis: Tensor) -> Tensor:
    """U U^T W: project a d-sided matrix (D, in), so that it writes to the stream only within S."""
    return basis @ (basis.mT @ weight)


def projected(
    recipe: Recipe, member: Member, bases: BasisSet, params: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The matrices among these that a replica keeps in S (Table 5b), projected onto S."""
    if not recipe.subspace.weight_projection:
        return {}
    return {
        name: write_projection(params[name], bases.get(member, 0))
        for name in projected_names(recipe, member)
        if name in params
    }


def as_sent(
    recipe: Recipe,
    member: Member,
    bases: BasisSet,
    params: Mapping[str, Tensor],
    anchor: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The weights that a replica's pseudo-gradient uses. A replica that projects started its round from P W.
    The part of W that the projection removed was not learnt, so it is put back: otherwise it would be sent in
    every round."""
    start = projected(recipe, member, bases, anchor)
    return {
        name: params[name] + (anchor[name] - start[name]) if name in start else p
        for name, p in params.items()
    }
