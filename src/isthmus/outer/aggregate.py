"""The mean of the replicas' payloads (eq. 2 of arXiv 2601.02360), with the same bits on every machine.

Payloads are added one after another, in the given order, by single rounded operations: read, add, write, and
at the end one division, by a tensor (CUDA multiplies by a reciprocal when it divides by a number). Weights
are whole numbers (`weights.round_weights`): each value is multiplied by its replica's weight before it is
added, and a sum is divided by the weights of the replicas in it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.layout.chunks import Layout
from isthmus.sparse.bundle import Bundle, Group, Shapes, SparseChunks, arrange, owners
from isthmus.sparse.topk import add_at, flat_positions, origins, to_grid

NORM_ENTRIES = 2**24  # per block of squares in memory


class RunningMean:
    """The mean of the payloads of a whole model, in one accumulator and one count for all replicas.

    "contributors" divides each coordinate's sum by the number of replicas that sent it, "all" by the number
    of replicas, as in eq. 2; with weights, by the sum of their weights. A zero does not count as sent, in a
    payload or in a dense tensor.
    """

    def __init__(self, how: str = "contributors", weights: Sequence[int] | None = None) -> None:
        """`weights`: those that `add` will be given, if they differ."""
        if how not in ("contributors", "all"):
            raise ValueError(f"aggregation is {how!r}; it is 'contributors' or 'all'")
        self.how, self.most = how, sum(weights or ()) if differ(weights) else 0
        self.num_added = self.weight = 0  # `weight` is the sum of their weights
        self.key: tuple = ()
        self.shapes: dict[str, torch.Size] = {}

    def _prepare(self, bundle: Bundle) -> None:
        """Allocate one flat accumulator for all tensors, and note where their chunks start in it."""
        self.key, self.shapes = bundle.key, bundle.shapes
        first = bundle.groups[0].values
        *starts, size = accumulate((shape.numel() for shape in self.shapes.values()), initial=0)
        self.offsets = dict(zip(self.shapes, starts, strict=True))
        self.total = torch.zeros(size, dtype=first.dtype, device=first.device)
        whole = torch.int16 if not self.most else torch.int32 if self.most < 2**31 else torch.int64
        contributors = self.how == "contributors"
        self.count = torch.zeros(size, dtype=whole, device=first.device) if contributors else None
        self.starts = _starts(*bundle.key, first.device)

    @torch.no_grad()
    def add(self, payloads: Mapping[str, SparseChunks], weight: int = 1) -> None:
        """Add one replica's payloads."""
        if not payloads:
            raise ValueError("a replica's payloads are empty")
        bundle = Bundle.of(payloads)
        if not self.num_added:
            self._prepare(bundle)
        if bundle.shapes.keys() != self.shapes.keys():
            odd = sorted(bundle.shapes.keys() ^ self.shapes.keys())
            raise ValueError(f"replicas sent different tensors: {', '.join(odd[:3])}")
        if list(bundle.shapes) != list(self.shapes):
            bundle = bundle.part(list(self.shapes))
        if bundle.key != self.key or bundle.groups[0].values.dtype != self.total.dtype:
            name = next((n for n, shape in bundle.shapes.items() if shape != self.shapes[n]), "")
            raise ValueError(f"replicas sent {name or 'tensors'} in different shapes, chunks or dtypes")
        arrangement = arrange(*self.key)
        for names, group, start in zip(arrangement.groups, bundle.groups, self.starts, strict=True):
            layout, values = arrangement.layouts[names[0]], _times(group.values, weight)
            if layout.kept == layout.entries:
                self._add_whole(names, values, weight)
            else:
                self._add_group(group.index, values, layout, *start, weight)
        self.num_added += 1
        self.weight += weight

    def _add_group(
        self, index: Tensor, values: Tensor, layout: Layout, origin: Tensor, skip: Tensor, weight: int
    ) -> None:
        """Add a group's chunks (C, J): each starts at `origin`, with `skip` entries between its rows. The
        values are already weighted."""
        position = flat_positions(index, layout.width, origin, skip[:, None])
        add_at(self.total, position, values)
        if self.count is not None:
            add_at(self.count, position, _times(values != 0, weight))

    def _add_whole(self, names: Sequence[str], values: Tensor, weight: int) -> None:
        """Add a group's chunks (C, P) that hold every entry, block by block: DiLoCo's. Such chunks have no
        padding, and their positions need not be computed."""
        arrangement = arrange(*self.key)
        for name in names:
            layout, at = arrangement.layouts[name], arrangement.locations[name]
            here = slice(self.offsets[name], self.offsets[name] + layout.chunks * layout.entries)
            blocks = to_grid(self.total[here], layout)  # (Y, X, h, w)
            own = values[at.first : at.stop].view(blocks.shape)
            blocks += own
            if self.count is not None:
                to_grid(self.count[here], layout).add_(_times(own != 0, weight))

    @torch.no_grad()
    def step(self, anchor: Mapping[str, Tensor], step_size: float) -> None:
        """anchor -= step_size * mean, in place. Consumes the accumulator.

        It divides, scales, then subtracts, each rounded: a fused multiply-add on one device could round
        differently on another.
        """
        for name, mean in self.result().items():
            anchor[name].sub_(mean * step_size)

    def result(self) -> dict[str, Tensor]:
        """The mean, by name: views of one buffer. Consumes the accumulator."""
        if not self.num_added:
            raise ValueError("there is nothing to aggregate")
        _divide(self.total, self.count, self.weight)
        parts = self.total.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def aggregate(
    payloads: Sequence[SparseChunks],
    how: str = "contributors",
    clip: str | None = None,
    weights: Sequence[int] | None = None,
) -> Tensor:
    """The mean of one parameter's payloads (eq. 2 of arXiv 2601.02360); see `aggregate_many`."""
    return aggregate_many([{"": payload} for payload in payloads], how, clip, weights)[""]


@torch.no_grad()
def aggregate_many(
    replicas: Iterable[Mapping[str, SparseChunks]],
    how: str = "contributors",
    clip: str | None = None,
    weights: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """The mean for every parameter of a model (eq. 2 of arXiv 2601.02360): views of one buffer.

    See `RunningMean` for `how`, `clip_factors` for `clip`, `weights` for `weights`. Sums are in float32, or
    in float64 if the payloads are.

    `replicas` may be a generator; then one replica's payloads are in memory at a time, unless clipping first
    needs the norms of all of them. Scaled copies are in memory one replica at a time.
    """
    return add_all(RunningMean(how, weights), replicas, clip, weights).result()


def add_all(
    mean: RunningMean,
    replicas: Iterable[Mapping[str, SparseChunks]],
    clip: str | None = None,
    weights: Sequence[int] | None = None,
) -> RunningMean:
    """Add the payloads of all replicas in the given order, clipped if `clip` is set, each by its weight."""
    added = replicas if clip is None else clipped(list(replicas), clip)
    if not differ(weights):
        for payloads in added:
            mean.add(payloads)
        return mean
    for payloads, weight in zip(added, weights or (), strict=True):
        mean.add(payloads, weight)
    return mean


def differ(weights: Sequence[int] | None) -> bool:
    """Whether the weighted mean differs from the plain one."""
    return len(set(weights or ())) > 1


def _times(values: Tensor, weight: int) -> Tensor:
    return values if weight == 1 else values * weight


def clipped(replicas: Sequence[Mapping[str, SparseChunks]], clip: str) -> Iterator[Bundle]:
    """The payloads of all replicas, one after another, each tensor scaled by its factor.

    A shard holds whole tensors, so every process with the shard computes the same factors.
    """
    names = list(replicas[0]) if replicas else []
    if any(payloads.keys() != replicas[0].keys() for payloads in replicas):
        raise ValueError("replicas sent different tensors")
    bundles = [Bundle.of(payloads) for payloads in replicas if payloads]
    if not bundles or len(bundles) < len(replicas):
        raise ValueError("there is nothing to aggregate")
    bundles = [one if list(one) == names else one.part(names) for one in bundles]
    factors = clip_factors(torch.stack([_norms(bundle) for bundle in bundles]), clip)
    for bundle, own in zip(bundles, factors, strict=True):
        yield scaled(bundle, own)


def scaled(bundle: Bundle, factors: Tensor) -> Bundle:
    """Multiply every tensor by its factor (T,); the values are as the receiver sees them."""
    arrangement, at = arrange(*bundle.key), {name: i for i, name in enumerate(bundle)}
    groups = []
    for names, group in zip(arrangement.groups, bundle.groups, strict=True):
        factor = torch.stack([factors[at[name]] for name in names]).to(group.values.dtype)  # (T,)
        owner = owners(tuple(arrangement.layouts[name].chunks for name in names), group.values.device)
        groups.append(Group(group.index, group.values * factor[owner][:, None]))
    return Bundle(bundle.shapes, bundle.side, bundle.keep, "fp32", groups)


def _divide(total: Tensor, count: Tensor | None, number: int) -> None:
    if count is None:
        total.view(-1).div_(torch.full((1,), number, dtype=total.dtype, device=total.device))
    else:
        total.div_(count.clamp_(min=1))


@lru_cache(maxsize=64)
def _starts(shapes: Shapes, side: int, keep: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """For each group, where its chunks start in the accumulator, and columns less a chunk's width: (C,)."""
    layouts, groups, _ = arrange(shapes, side, keep)
    offset, size = {}, 0
    for name, shape in shapes:
        offset[name], size = size, size + prod(shape)
    here = torch.device("cpu")
    starts = []
    for names in groups:
        origin = torch.cat([origins(layouts[name], here) + offset[name] for name in names])
        skip = torch.tensor([layouts[name].cols - layouts[name].width for name in names])
        owner = owners(tuple(layouts[name].chunks for name in names), here)
        starts.append((origin.to(device), skip[owner].to(device)))
    return tuple(starts)


def clip_factors(norms: Tensor, clip: str) -> Tensor:
    """The factors of each replica's tensors, from their norms: both (replicas, tensors).

    "median" scales a tensor down to the median norm of all replicas' (docs/method.md, Aggregation), by min(1,
    median / (norm + 1e-8)). For an even number it is the lower middle one: half of the replicas cannot make a
    step larger than the other half's.
    """
    if clip != "median":
        raise ValueError(f"clip is {clip!r}; it is 'median' or None")
    median = norms.sort(0).values[(len(norms) - 1) // 2]
    return (median / (norms + 1e-8)).clamp(max=1)


def _norms(bundle: Bundle) -> Tensor:
    """The 2-norm of every tensor (T,) in float64, in as few operations as the groups allow. Squares are
    summed by halving: a reduction's own order differs between devices."""
    found: dict[str, Tensor] = {}
    for names, group in zip(arrange(*bundle.key).groups, bundle.groups, strict=True):
        num_rows = max(1, NORM_ENTRIES // group.values.shape[1])  # a model's dense groups are large
        blocks = group.values.split(num_rows)
        squares = torch.cat([_halved(block) for block in blocks])  # (C,)
        alike: dict[int, list[tuple[str, Tensor]]] = {}  # by number of chunks
        for name in names:
            _, _, first, stop = arrange(*bundle.key).locations[name]
            alike.setdefault(stop - first, []).append((name, squares[first:stop]))
        for some in alike.values():
            sums = _sum_halves(torch.stack([own for _, own in some], dim=1))  # (C, n) -> (n,)
            found |= zip([name for name, _ in some], sums.sqrt().unbind(), strict=True)
    return torch.stack([found[name] for name in bundle])


def squared_norm(payloads: Mapping[str, SparseChunks]) -> Tensor:
    """The sum of squares of all tensors, with the same bits on every machine."""
    return _sum_halves(_norms(Bundle.of(payloads)).square())


def _halved(values: Tensor) -> Tensor:
    """The squares of each chunk's values (C, J), summed: (C,)"""
    return gpu.in_double(lambda wide: _sum_halves(wide.square().mT), values)


def _sum_halves(rows: Tensor) -> Tensor:
    """The sum over the first dimension, in an order that depends only on its length."""
    if len(rows) == 0:
        return rows.sum(0)
    while len(rows) > 1:
        half = len(rows) // 2
        rest = rows[2 * half :]
        rows = rows[:half] + rows[half : 2 * half]
        rows = torch.cat([rows, rest]) if len(rest) else rows
    return rows[0]
