"""Whose update points against the others' (docs/protocol.md, A round).

Where two honest replicas send the same entry, they nearly always send the same sign: both go down the same
hill. Each replica has one vote about each other one, so that a minority, however it chooses its entries,
gets nobody refused. Signs say nothing of sizes: those are for the norms, and for outer.clip.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.config import Recipe
from isthmus.layout.chunks import layout
from isthmus.sparse import SparseChunks

# How many entries are compared: of all replicas, and of each. Of a large model it is every so many-th chunk.
MOST_ENTRIES, FEWEST_ENTRIES = 2**18, 2**14
FEWEST_REPLICAS = 3  # of two, neither is a majority
FEWEST_SHARED = 64  # entries that two replicas must both send before one can speak about the other
CHUNK_ENTRIES = 4096  # at most
BLOCK_ENTRIES = 2**20  # of the matrix that compares all with all


class SignReader:
    """The signs of an update: (n,) int64, an entry's place in the model times two, plus one if positive."""

    def __init__(self, recipe: Recipe) -> None:
        self.needed = recipe.num_replicas >= FEWEST_REPLICAS and recipe.bucket.sign_agreement > 0
        self.first: dict[str, int] = {}  # tensor -> the number of its first chunk
        outer, chunks, entries = recipe.outer, 0, 0
        keep = outer.chunk_side**2 if outer.method == "diloco" else outer.keep
        for name, shape in recipe.model.shapes().items():
            cut = layout(tuple(shape), outer.chunk_side, keep)
            self.first[name] = chunks
            chunks, entries = chunks + cut.chunks, entries + cut.chunks * cut.kept
        self.every = -(-entries // max(MOST_ENTRIES // recipe.num_replicas, FEWEST_ENTRIES))

    def read(self, payloads: Mapping[str, SparseChunks]) -> Tensor:
        found = [torch.zeros(0, dtype=torch.int64)]
        for name, payload in payloads.items() if self.needed else ():
            skip = -self.first[name] % self.every
            number = torch.arange(self.first[name], self.first[name] + len(payload.index))
            number, index = number[skip :: self.every, None], payload.index[skip :: self.every].cpu().long()
            values = payload.values[skip :: self.every].cpu()
            keys = ((number * CHUNK_ENTRIES + index) * 2 + (values > 0))[values != 0]
            found.append(keys)
        return torch.cat(found)


def compare_signs(signs: Mapping[str, Tensor], agreement: float) -> dict[str, str]:
    """Who is refused, and why: more than half of the replicas share entries with it, of which fewer than this
    share have the same sign, and too few for chance."""
    names = list(signs)
    if len(names) < FEWEST_REPLICAS or not agreement:
        return {}
    same, shared = _agreements([signs[name] for name in names])
    chance = shared - 2 * same > 3 * shared.sqrt()  # three standard deviations of a fair coin
    against = (shared >= FEWEST_SHARED) & (same < agreement * shared) & chance
    refused = {}
    for name, votes in zip(names, against, strict=True):
        number = int(votes.sum())
        if 2 * number > len(names):
            refused[name] = f"it points against {number} of the other {len(names) - 1} updates"
    return refused


def _agreements(signs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of every two replicas (M, M): the entries that both send with the same sign, and those that both
    send."""
    keys = torch.cat(signs)
    owners = torch.repeat_interleave(torch.arange(len(signs)), torch.tensor([len(own) for own in signs]))
    _, place, counts = (keys >> 1).unique(return_inverse=True, return_counts=True)
    common = counts > 1
    column = common.cumsum(0) - 1
    chosen = common[place]
    owners, column, signed = owners[chosen], column[place[chosen]], (keys[chosen] & 1).double() * 2 - 1
    same = shared = torch.zeros(len(signs), len(signs), dtype=torch.float64)
    width = max(1, BLOCK_ENTRIES // len(signs))
    for first in range(0, int(common.sum()), width):
        here = (column >= first) & (column < first + width)
        matrix = torch.zeros(len(signs), width, dtype=torch.float64)
        matrix[owners[here], column[here] - first] = signed[here]
        both = matrix.abs() @ matrix.abs().T
        same, shared = same + (matrix @ matrix.T + both) / 2, shared + both
    return same, shared.fill_diagonal_(0)
