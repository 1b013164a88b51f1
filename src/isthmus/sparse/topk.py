"""TOP-kappa of eq. 2 of arXiv 2601.02360: the largest entries of every chunk of a weight."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from isthmus.layout.chunks import Layout, check_codec, check_shape
from isthmus.layout.chunks import layout as layout_of
from isthmus.sparse.bundle import Bundle, Group, SparseChunks, arrange, owners
from isthmus.sparse.quantize import quantize

# Entries copied and searched at a time: few enough for the cache of a CPU core, enough to fill a GPU. On both
# this bounds the memory that encoding takes in addition to the tensors.
ENTRIES_PER_THREAD, ENTRIES_PER_GPU = 2**19, 2**26


def _stretch(matrix: Tensor, dim: int, size: int, whole: int) -> Tensor:
    """Append a line of zeros to every block after the first `whole`, so that all are `size` long."""
    head = matrix.narrow(dim, 0, whole * size)
    tail = matrix.narrow(dim, whole * size, matrix.shape[dim] - whole * size).unflatten(dim, (-1, size - 1))
    tail = torch.cat([tail, torch.zeros_like(tail.narrow(dim + 1, 0, 1))], dim + 1)
    return torch.cat([head, tail.flatten(dim, dim + 1)], dim)


def _shrink(matrix: Tensor, dim: int, size: int, whole: int) -> Tensor:
    """The inverse of `_stretch`."""
    head = matrix.narrow(dim, 0, whole * size)
    tail = matrix.narrow(dim, whole * size, matrix.shape[dim] - whole * size).unflatten(dim, (-1, size))
    return torch.cat([head, tail.narrow(dim + 1, 0, size - 1).flatten(dim, dim + 1)], dim)


def to_grid(dense: Tensor, layout: Layout) -> Tensor:
    """The chunks (Y, X, h, w); a view if there is no padding."""
    matrix = dense.reshape(layout.rows, layout.cols)
    if layout.whole_down < layout.down:
        matrix = _stretch(matrix, 0, layout.height, layout.whole_down)
    if layout.whole_across < layout.across:
        matrix = _stretch(matrix, 1, layout.width, layout.whole_across)
    return (
        matrix.unflatten(0, (layout.down, layout.height))
        .unflatten(2, (layout.across, layout.width))
        .transpose(1, 2)
    )


def to_chunks(dense: Tensor, side: int) -> Tensor:
    """All chunks of a tensor, one per row (C, P), in the order (y, x) of blocks and (h, w) inside them."""
    layout = layout_of(tuple(dense.shape), side, keep=0)
    return to_grid(dense, layout).reshape(layout.chunks, layout.entries)


def from_chunks(chunks: Tensor, shape: torch.Size | tuple[int, ...], side: int) -> Tensor:
    """The inverse of `to_chunks`; drops the padding."""
    layout = layout_of(tuple(shape), side, keep=0)
    grid = chunks.reshape(layout.down, layout.across, layout.height, layout.width)
    matrix = grid.transpose(1, 2).reshape(layout.down * layout.height, layout.across * layout.width)
    if layout.whole_across < layout.across:
        matrix = _shrink(matrix, 1, layout.width, layout.whole_across)
    if layout.whole_down < layout.down:
        matrix = _shrink(matrix, 0, layout.height, layout.whole_down)
    return matrix.reshape(shape)


def in_padding(index: Tensor, layout: Layout) -> Tensor:
    """Whether positions (C, J) are padding: the last row or column of a block past the whole ones."""
    chunk = torch.arange(layout.chunks, device=index.device)[:, None]  # (C, 1)
    short_down = chunk // layout.across >= layout.whole_down
    short_across = chunk % layout.across >= layout.whole_across
    last_row = index // layout.width == layout.height - 1
    last_col = index % layout.width == layout.width - 1
    return (short_down & last_row) | (short_across & last_col)


def origins(layout: Layout, device: torch.device) -> Tensor:
    """The position of each chunk's first entry in the flattened tensor: (C,)."""
    y = torch.arange(layout.down, device=device)
    x = torch.arange(layout.across, device=device)
    row = y * layout.height - (y - layout.whole_down).clamp(min=0)
    col = x * layout.width - (x - layout.whole_across).clamp(min=0)
    return (row[:, None] * layout.cols + col).flatten()


def flat_positions(index: Tensor, width: int, origin: Tensor, skip: Tensor | int) -> Tensor:
    """Positions inside chunks (C, J) -> in the flattened tensor; `skip` is its columns less `width`."""
    index = index.long()
    return origin[:, None] + index + index.div(width, rounding_mode="floor") * skip


def add_at(flat: Tensor, position: Tensor, values: Tensor) -> None:
    """flat[position] += values for positions that do not repeat.

    It reads, adds and writes instead of a scatter-add: CUDA's atomic add flushes subnormals, and the sum must
    be the same everywhere.
    """
    position, values = position.reshape(-1), values.reshape(-1)
    flat.index_put_((position,), flat[position] + values.to(flat.dtype))


def add_payload(dense: Tensor, payload: SparseChunks, sign: int = 1) -> None:
    """Add (or, with sign -1, subtract) a decoded payload, changing only the entries it holds."""
    layout = payload.layout
    position = flat_positions(
        payload.index, layout.width, origins(layout, payload.index.device), layout.cols - layout.width
    )
    add_at(dense.view(-1), position, payload.values if sign > 0 else -payload.values)


def clear_payload(dense: Tensor, payload: SparseChunks) -> None:
    """Set the entries that a payload holds to zero."""
    layout = payload.layout
    position = flat_positions(
        payload.index, layout.width, origins(layout, payload.index.device), layout.cols - layout.width
    )
    dense.view(-1).index_fill_(0, position[payload.values != 0], 0.0)  # padding is never sent


def decode(payload: SparseChunks) -> Tensor:
    """The decoded tensor, zero where no entry was kept."""
    dense = payload.values.new_zeros(payload.shape)
    add_payload(dense, payload)
    return dense


def largest(magnitude: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of (C, P), descending, and where; NaN counts as largest.

    A row is cut into lists of `fold` entries. The `count` lists with the largest maxima hold the `count`
    largest entries: if another list held one, each of those lists would have an entry at least as large. So
    most of a row is read once, by a maximum, and P / fold + fold * count entries are ranked.
    """
    entries = magnitude.shape[1]
    fold = 1
    while entries % (2 * fold) == 0 and 8 * fold * fold * count <= entries:
        fold *= 2
    if fold == 1:
        found = magnitude.topk(count, dim=1)
        return found.values, found.indices
    lists = entries // fold
    top = magnitude.unflatten(1, (fold, lists)).amax(1).topk(count, dim=1, sorted=False).indices  # (C, J)
    start = torch.arange(0, entries, lists, device=magnitude.device)[:, None]
    position = (top[:, None, :] + start).flatten(1)  # (C, fold * J)
    found = magnitude.gather(1, position).topk(count, dim=1)
    return found.values, position.gather(1, found.indices)


class TopK:
    """Keep the `keep` largest magnitudes of each side x side chunk (TOP-kappa in eq. 2 of arXiv 2601.02360).

    Smaller chunks keep in proportion, at least one. `values` is their format: "fp32", "bf16", "2bit" (see
    `quantize`), or "fp64", which is lossless for float64 tensors.
    """

    def __init__(self, side: int = 64, keep: int = 32, values: str = "fp32") -> None:
        check_codec(side, keep, values)
        self.side, self.keep, self.values = side, keep, values

    def __repr__(self) -> str:
        return f"{type(self).__name__}(side={self.side}, keep={self.keep}, values={self.values!r})"

    def encode(self, dense: Tensor) -> SparseChunks:
        """The payload of one tensor; ValueError if an entry is not finite."""
        return self.encode_many({"": dense})[""]

    def decode(self, payload: SparseChunks) -> Tensor:
        """The decoded tensor, zero where no entry was kept."""
        return decode(payload)

    @torch.no_grad()
    def encode_many(self, dense: Mapping[str, Tensor]) -> Bundle:
        """The payloads of many tensors, each as from `encode`, in a few passes over all together."""
        for tensor in dense.values():
            check_shape(tensor.shape)
        if len({(tensor.dtype, tensor.device) for tensor in dense.values()}) > 1:
            raise ValueError("tensors encoded together must share a dtype and a device")
        shapes = {name: tuple(tensor.shape) for name, tensor in dense.items()}
        arrangement = arrange(tuple(shapes.items()), self.side, self.keep)
        finite: list[Tensor] = []
        groups = [
            self._encode_group(names, dense, arrangement.layouts, finite) for names in arrangement.groups
        ]
        # One answer from the device for the whole model. NaN and infinity are always among the largest.
        if finite and not torch.stack(finite).all():
            refuse_not_finite(dense)
        return Bundle(shapes, self.side, self.keep, self.values, groups)

    def _encode_group(
        self,
        names: Sequence[str],
        dense: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        finite: list[Tensor],
    ) -> Group:
        ranked, layout = self.values == "2bit", layouts[names[0]]
        parts = [_select(slab, pads, layout, ranked) for slab, pads in _slabs(names, dense, layouts)]
        index, values, magnitude = (
            torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True)
        )
        finite.append(values.isfinite().all())
        if self.values != "2bit":
            return Group(index, as_sent(values, self.values))
        owner = owners(tuple(layouts[name].chunks for name in names), index.device)
        return Group(index, *quantize(values, magnitude, owner, len(names)))


def refuse_not_finite(dense: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that names a tensor with an entry that is not finite, if there is one."""
    name = next((name for name, tensor in dense.items() if not tensor.isfinite().all()), None)
    if name is None:
        return
    raise ValueError(f"{name or 'the tensor'} has entries that are not finite; nothing was encoded")


def as_sent(values: Tensor, kind: str) -> Tensor:
    """Round to the wire's kind. A value out of range is sent as the largest; the rest is feedback."""
    if kind == "fp64":
        return values.double()
    if kind == "bf16":
        limit = torch.finfo(torch.bfloat16).max
        return values.clamp(-limit, limit).bfloat16().float()
    if values.dtype == torch.float64:
        limit = torch.finfo(torch.float32).max
        values = values.clamp(-limit, limit)
    return values.float()


def _slabs(
    names: Sequence[str], dense: Mapping[str, Tensor], layouts: Mapping[str, Layout]
) -> Iterator[tuple[Tensor, list[tuple[slice, Layout, int]]]]:
    """Yield a group's chunks in order, some (C, P) at a time, with the padded rows and their first y."""
    device = dense[names[0]].device
    limit = ENTRIES_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else ENTRIES_PER_GPU
    entries = layouts[names[0]].entries
    bands: list[tuple[Tensor, Layout, int]] = []
    size = 0

    def slab() -> tuple[Tensor, list[tuple[slice, Layout, int]]]:
        rows = torch.empty(size // entries, entries, dtype=dense[names[0]].dtype, device=device)
        pads, start = [], 0
        for grid, layout, y in bands:
            at = slice(start, start + grid.shape[0] * grid.shape[1])
            rows[at].view(grid.shape).copy_(grid)
            if layout.padded:
                pads.append((at, layout, y))
            start = at.stop
        return rows, pads

    for name in names:
        layout = layouts[name]
        grid = to_grid(dense[name].detach(), layout)  # (Y, X, h, w)
        step = max(1, limit // max(1, layout.across * entries))
        for y in range(0, layout.down, step):
            band = grid[y : y + step]
            if bands and size + band.numel() > limit:
                yield slab()
                bands, size = [], 0
            bands.append((band, layout, y))
            size += band.numel()
    yield slab()


def _select(
    chunks: Tensor, pads: list[tuple[slice, Layout, int]], layout: Layout, ranked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions kept (C, J) int16, ascending; the values there; and their magnitudes, descending if `ranked`.
    If all are kept and no levels are needed (DiLoCo), ranking would take most of the time."""
    magnitude = chunks.abs()  # (C, P)
    for at, padded, y in pads:
        grid = magnitude[at].view(-1, padded.across, padded.height, padded.width)
        if padded.whole_down < padded.down:
            grid[max(0, padded.whole_down - y) :, :, -1, :] = -1
        if padded.whole_across < padded.across:
            grid[:, padded.whole_across :, :, -1] = -1
    if layout.kept == layout.entries:
        index = torch.arange(layout.entries, device=chunks.device).expand(chunks.shape[0], -1)
        return index.short(), chunks, magnitude.sort(1, descending=True).values if ranked else magnitude
    magnitude, index = largest(magnitude, layout.kept)
    index = index.sort(1).values
    return index.short(), chunks.gather(1, index), magnitude
