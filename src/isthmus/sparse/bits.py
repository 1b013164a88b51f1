"""The bit string of each chunk: the positions of its kept entries and, for 2bit, signs and magnitudes.

Positions are in Elias-Fano code: with l = floor(log2(P / J)), the upper parts i >> l of a chunk's ascending
positions set bit (i >> l) + j of J + ceil(P / 2^l) - 1, and the l lower bits follow bit by bit. If a bitmap
of P bits is shorter, it is used instead. A bit string of n bytes has its bit b in byte b mod n, so that eight
slices make the bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.layout.chunks import IndexCode, Layout, index_code
from isthmus.sparse.bundle import Group
from isthmus.sparse.quantize import bits_of, dequantize
from isthmus.sparse.topk import in_padding

Levels = tuple[Tensor, Tensor]  # 2bit only: every chunk's scale, and the base of its tensor, (C,) each


def to_bytes(bits: Tensor) -> Tensor:
    """(C, 8 n) bits as uint8 -> (C, n) bytes."""
    weight = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)[:, None]
    return (bits.unflatten(1, (8, bits.shape[1] // 8)) * weight).sum(1, dtype=torch.uint8)


def from_bytes(data: Tensor) -> Tensor:
    """(C, n) bytes -> (C, 8 n) bits as uint8."""
    shift = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    return ((data[:, None] >> shift) & 1).flatten(1)


def write_bits(bits: Tensor, group: Group, levels: Levels | None, layout: Layout) -> None:
    """Write chunks into zeroed bits (C, 8 n), one byte per bit."""
    code, count = index_code(layout.entries, layout.kept), layout.kept
    _write_index(bits, group.index, code)
    if levels is not None:
        at = code.bits(count)
        bits[:, at : at + count], bits[:, at + count : at + 2 * count] = bits_of(group.values, *levels)


def read_bits(
    data: Tensor, values: Tensor | None, levels: Levels | None, layouts: Sequence[Layout], rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and values (R C, J) of R replicas' bit strings (R C, n); (R,) which are well formed.

    The values are given, or for 2bit their levels.
    """
    code, count = index_code(layouts[0].entries, layouts[0].kept), layouts[0].kept
    bits, at = from_bytes(data), code.bits(count)
    index = _read_index(bits, code, count)
    if values is None:
        assert levels is not None, "values are sent, or levels"
        negative, large = bits[:, at : at + 2 * count].bool().unflatten(1, (2, count)).unbind(1)
        values = dequantize(negative, large, *levels)
        at += 2 * count
    valid = _each(bits[:, at:] == 0, rows) & _well_formed(index, values, layouts, rows)
    return index, values, valid


def _write_index(bits: Tensor, index: Tensor, code: IndexCode) -> None:
    count = index.shape[1]
    if not code.marks:
        return
    upper = (index >> code.low).long()  # (C, J)
    if not code.bitmap:
        upper += torch.arange(count, device=index.device)
    bits[:, : code.marks].scatter_(1, upper, 1)
    if code.low:
        shift = torch.arange(code.low, dtype=torch.int16, device=index.device)[:, None]
        bits[:, code.marks : code.bits(count)].unflatten(1, (code.low, count)).copy_(
            (index[:, None] >> shift) & 1
        )


def _read_index(bits: Tensor, code: IndexCode, count: int) -> Tensor:
    """The positions (C, J) int32 that `_write_index` wrote."""
    chunks = len(bits)
    if not code.marks:
        return torch.arange(count, dtype=torch.int32, device=bits.device).expand(chunks, count)
    marks = bits[:, : code.marks]
    if not (marks.sum(1, dtype=torch.int32) == count).all():
        raise ValueError("the payload has a chunk that does not hold as many positions as its header says")
    index = marks.reshape(-1).nonzero().view(chunks, count)  # ascending, so rows of marks stay in order
    row = torch.arange(chunks, device=bits.device)[:, None] * code.marks
    if code.bitmap:
        return (index - row).int()
    index = (index - row - torch.arange(count, device=bits.device)).int() << code.low
    for bit in range(code.low):
        start = code.marks + bit * count
        index |= bits[:, start : start + count].int() << bit
    return index


def _well_formed(index: Tensor, values: Tensor, layouts: Sequence[Layout], rows: int) -> Tensor:
    """(R,) whether positions ascend, inside their chunk and outside padding, and values are finite."""
    valid = _each(values.isfinite(), rows) & _each(index < layouts[0].entries, rows)
    valid = valid & _each(index[:, 1:] > index[:, :-1], rows)
    if any(layout.padded for layout in layouts):
        counts = [layout.chunks for layout in layouts]
        parts = index.view(rows, sum(counts), layouts[0].kept).split(counts, 1)
        for layout, part in zip(layouts, parts, strict=True):
            if layout.padded:
                valid = valid & ~torch.stack([in_padding(row, layout).any() for row in part])
    return valid


def _each(test: Tensor, rows: int) -> Tensor:
    """(R,) whether each replica's part is all true."""
    return test.reshape(rows, test.numel() // rows).all(1)
