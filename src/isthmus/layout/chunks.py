"""Chunks and packed sizes as plain arithmetic, so that `isthmus plan` counts bytes without torch."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

MAX_SIDE = 181  # a position inside a chunk is an int16
MAX_ENTRIES = 2**40  # of one tensor; its flat positions stay well inside int64
MAX_DIMS = 8
MAX_TENSORS = 2**16
MAX_NAME_BYTES = 512

VALUE_BYTES = {"fp32": 4, "bf16": 2, "2bit": 0, "fp64": 8}  # whole bytes per kept value
KINDS = tuple(VALUE_BYTES)  # a kind's position here is its number on the wire

HEADER_BYTES = 12  # magic, version, kind, side, keep, number of tensors
CRC_BYTES = 4
BASE_BYTES = 4  # per tensor, 2bit only
SCALE_BYTES = 2  # per chunk, 2bit only


class Layout(NamedTuple):
    """How a tensor splits into chunks, all of one shape; see `layout`."""

    rows: int
    cols: int
    height: int
    width: int
    down: int
    across: int
    whole_down: int  # the first block rows, which are full; the others end in one row of padding
    whole_across: int
    kept: int

    @property
    def chunks(self) -> int:
        return self.down * self.across

    @property
    def entries(self) -> int:
        return self.height * self.width

    @property
    def padded(self) -> bool:
        return self.chunks > 0 and (self.whole_down, self.whole_across) != (self.down, self.across)

    @property
    def group(self) -> tuple[int, int, int]:
        """Tensors with equal groups can be selected, quantised and packed as one."""
        return self.height, self.width, self.kept


@lru_cache(maxsize=4096)
def _blocks(length: int, side: int, pad: bool) -> tuple[int, int, int]:
    """Return a block's size along one axis, the number of blocks, and how many need no padding."""
    size = next(size for size in range(min(side, length) or 1, 0, -1) if length % size == 0)
    if pad and length > side and 2 * size < side:
        count = -(-length // side)
        size = -(-length // count)
        return size, count, count - (count * size - length)
    return size, length // size, length // size


def kept(entries: int, keep: int, side: int) -> int:
    """Return how many of a chunk's `entries` to keep: `keep` per side * side of them, at least one."""
    return min(entries, max(1, round(entries * keep / side**2)))


@lru_cache(maxsize=4096)
def layout(shape: tuple[int, ...], side: int, keep: int) -> Layout:
    """Divide a tensor into equal chunks of at most side x side, for TOP-kappa in eq. 2 of arXiv 2601.02360.

    N dimensions fold into two (the first; all others); one dimension is a single row. A block is as long as
    the largest divisor of its axis up to `side`; multiples of 64 give 64 x 64. If that divisor is below side
    / 2 (for a prime, say), the axis is instead cut into the fewest blocks of at most `side`, equal to within
    one. The shorter blocks end in one row or column of padding, which is never kept. With keep == side**2
    everything is sent, nothing is selected, and plain divisors suffice.
    """
    rows, cols = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    pad = keep < side**2
    height, down, whole_down = _blocks(rows, side, pad)
    width, across, whole_across = _blocks(cols, side, pad)
    fewest = (height - (whole_down < down)) * (width - (whole_across < across))
    count = min(kept(height * width, keep, side), fewest)
    return Layout(rows, cols, height, width, down, across, whole_down, whole_across, count)


def chunk_shape(shape: Sequence[int], side: int) -> tuple[int, int]:
    """Return rows and columns of one chunk of a tensor of this shape; one row for vectors and scalars."""
    chunks = layout(tuple(shape), side, keep=0)
    return chunks.height, chunks.width


def check_codec(side: int, keep: int, values: str) -> None:
    """Raise ValueError unless these are valid settings of a TopK codec."""
    if not 1 <= side <= MAX_SIDE:
        raise ValueError(f"side is {side}; a chunk is 1 to {MAX_SIDE} entries wide")
    if not 1 <= keep <= side**2:
        raise ValueError(f"keep is {keep}; a chunk of side {side} holds 1 to {side**2} entries")
    if values not in VALUE_BYTES:
        raise ValueError(f"values is {values!r}; known kinds are {', '.join(KINDS)}")


def check_shape(shape: Sequence[int]) -> None:
    """Raise ValueError unless a tensor of this shape can be sent."""
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions; at most {MAX_DIMS} can be sent")
    if prod(max(1, dim) for dim in shape) > MAX_ENTRIES:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} is too large; at most {MAX_ENTRIES} entries can be sent"
        )


class IndexCode(NamedTuple):
    """Elias-Fano: the `low` lowest bits of each position as they are, the rest in unary, in `marks` bits."""

    low: int
    marks: int
    bitmap: bool  # use one bit per entry of the chunk instead, if that takes no more bits

    def bits(self, count: int) -> int:
        return count * self.low + self.marks


def index_code(entries: int, count: int) -> IndexCode:
    """Choose the code for `count` ascending positions among `entries`; no bits if every entry is kept."""
    if count == entries:
        return IndexCode(0, 0, True)
    low = (entries // count).bit_length() - 1
    code = IndexCode(low, count + -(-entries >> low) - 1, False)
    # Elias-Fano beats a plain bitmap when fewer than about a quarter of the entries are kept.
    return code if code.bits(count) < entries else IndexCode(0, entries, True)


def bit_bytes(entries: int, count: int, values: str) -> int:
    """Return the bytes of a chunk's bit string: positions, and for 2bit each value's sign and magnitude."""
    bits = index_code(entries, count).bits(count) + (2 * count if values == "2bit" else 0)
    return -(-bits // 8)


def chunk_bytes(entries: int, count: int, values: str) -> int:
    """Return all the bytes that one chunk puts on the wire."""
    scale = SCALE_BYTES if values == "2bit" else 0
    return bit_bytes(entries, count, values) + scale + VALUE_BYTES[values] * count


def packed_bytes(shape: Sequence[int], side: int = 64, keep: int = 32, values: str = "2bit") -> int:
    """Return len(pack(payload)) for a tensor of this shape."""
    return packed_many_bytes({"": shape}, side, keep, values)


def packed_many_bytes(
    shapes: Mapping[str, Sequence[int]], side: int = 64, keep: int = 32, values: str = "2bit"
) -> int:
    """Return len(pack_many(payloads)) for tensors of these names and shapes."""
    check_codec(side, keep, values)
    total = HEADER_BYTES + CRC_BYTES
    for name, shape in shapes.items():
        chunks = layout(tuple(shape), side, keep)
        total += 2 + len(name.encode()) + 1 + 4 * len(shape) + (BASE_BYTES if values == "2bit" else 0)
        total += chunks.chunks * chunk_bytes(chunks.entries, chunks.kept, values)
    return total
