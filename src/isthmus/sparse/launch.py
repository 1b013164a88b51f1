"""Start the kernels: each function does for one group of chunks what a plain torch form does elsewhere.

Decoded values and sums have the same bits either way. Only `outer.fused` imports this module, because it
needs Triton.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isthmus.layout.chunks import Layout, index_code
from isthmus.sparse import crc, kernels
from isthmus.sparse.bundle import Group, owners
from isthmus.sparse.quantize import RATIO_OCTAVES, levels, scales
from isthmus.sparse.topk import origins

ENTRIES = {2**i for i in range(4, 13)}  # sizes that one program holds
MAX_KEEP = 2048  # per chunk
FEW = 128  # up to this many values are compared pairwise; more are sorted
MAX_REPLICAS = 32  # every entry of a chunk is looked up in all of them
APPLY_BLOCK = 4096
CHECK_BLOCK = 2048
CRC_BYTES, CRC_LANES = 64, 512  # per lane; lanes per block
# Keeps enough chunks in flight: a program with more registers would leave too few.
SELECT = {True: {"num_warps": 4, "maxnreg": 128}, False: {"num_warps": 1}}


def fits(layout: Layout) -> bool:
    """Whether kernels accept chunks of this layout: a power of two of entries, none of them padding, and not
    all of them kept."""
    return (
        layout.entries in ENTRIES and not layout.padded and layout.chunks > 0
        and 0 < layout.kept <= min(MAX_KEEP, layout.entries - 1)
    )  # fmt: skip


def contiguous_fp32(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels can read these tensors as arrays of fp32."""
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    # A fused multiply-add, rounded once, would differ from a CPU's.
    kernel[grid](*args, enable_fp_fusion=False, **constants)


def _power_of_two(count: int) -> int:
    return max(2, 1 << (count - 1).bit_length())


def _blocks(number: int, block: int) -> tuple[int]:
    return (-(-number // block),)


def _together(most: int, columns: int) -> int:
    """How many chunks one program takes: at most `most`, with at most 2048 numbers."""
    return max(1, min(most, 2048 // columns))


def _pointers(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors]).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _chunk_table(layouts: tuple[Layout, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each chunk of a group its tensor's number and its start there; for each tensor its columns."""
    owner = owners(tuple(layout.chunks for layout in layouts), device)
    origin = torch.cat([origins(layout, torch.device("cpu")) for layout in layouts])
    return owner, origin.to(device), torch.tensor([layout.cols for layout in layouts]).to(device)


def feed_back(
    anchor: Sequence[Tensor],
    params: Sequence[Tensor],
    feedback: Sequence[Tensor],
    layouts: Sequence[Layout],
    decay: float,
    scale: float,
    kind: str,
    subtract: bool = True,
) -> tuple[Group, Tensor]:
    """e <- decay e + scale (anchor - params); select what is sent; with `subtract`, subtract that from e. All
    in place.

    Return the group's payload and a flag that is nonzero if an entry is not finite.
    """
    device, layout, keep = params[0].device, layouts[0], layouts[0].kept
    owner, origin, cols = _chunk_table(tuple(layouts), device)
    pointers = _pointers([t for three in zip(anchor, params, feedback, strict=True) for t in three], device)
    num_chunks = len(owner)
    index = torch.empty(num_chunks, keep, dtype=torch.int16, device=device)
    values = torch.empty(num_chunks, keep, dtype=torch.float32, device=device)
    odd = torch.zeros(1, dtype=torch.int32, device=device)
    _launch(
        kernels.select_kernel, (num_chunks,),
        pointers, owner, origin, cols, index, values, odd, decay, scale,
        KEEP=keep, HEIGHT=layout.height, WIDTH=layout.width, KIND=kind, SUBTRACT=subtract,
        **SELECT[layout.entries > 1024],
    )  # fmt: skip
    if kind != "2bit":
        return Group(index, values), odd
    low, high, zeros = two_levels(values)
    codes, base = scales(low, high, zeros, high == 0, owner, len(layouts))
    low, high = (level[:, 0].contiguous() for level in levels(codes, base[owner]))
    pow2 = _power_of_two(keep)
    block = _together(16, pow2)
    _launch(
        kernels.round_kernel, _blocks(num_chunks, block),
        pointers, owner, origin, cols, index, values, codes, low, high, num_chunks,
        KEEP=keep, POW2=pow2, BLOCK=block, WIDTH=layout.width, SUBTRACT=subtract,
    )  # fmt: skip
    return Group(index, values, codes, base), odd


def two_levels(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize.two_levels` for values (C, J) with signs, in any order."""
    num_chunks, keep = values.shape
    low, high = values.new_empty(num_chunks), values.new_empty(num_chunks)
    zeros = torch.empty(num_chunks, dtype=torch.int8, device=values.device)
    pow2, ratio = _power_of_two(keep), 2.0**-RATIO_OCTAVES
    if keep > FEW:
        _launch(
            kernels.many_levels_kernel, (num_chunks,), values, low, high, zeros,
            KEEP=keep, POW2=pow2, RATIO=ratio,
        )  # fmt: skip
    else:
        block = max(1, 4096 // pow2**2)
        _launch(
            kernels.levels_kernel, _blocks(num_chunks, block), values, low, high, zeros, num_chunks,
            KEEP=keep, POW2=pow2, BLOCK=block, RATIO=ratio,
        )  # fmt: skip
    return low, high, zeros.bool()


def write_bits(bits: Tensor, index: Tensor, values: Tensor, low: Tensor | None, layout: Layout) -> None:
    """`bits.write_bits`, with the lower levels (C,) of 2bit values."""
    code, (num_chunks, keep) = index_code(layout.entries, layout.kept), index.shape
    pow2 = _power_of_two(keep)
    block = _together(16, pow2)
    _launch(
        kernels.write_bits_kernel, _blocks(num_chunks, block),
        bits, index.contiguous(), values.contiguous(), values if low is None else low.contiguous(),
        num_chunks, bits.shape[1], MARKS=code.marks, LOW=code.low, BITMAP=code.bitmap, KEEP=keep, POW2=pow2,
        BLOCK=block, SIGNED=low is not None,
    )  # fmt: skip


def read_bits(
    data: Tensor, values: Tensor | None, pair: tuple[Tensor, Tensor] | None, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and values (C, J) of bit strings (C, n), and a flag that is nonzero if one is malformed.

    The values are given, or for 2bit the chunks' low and high levels (C,).
    """
    code, (num_chunks, width) = index_code(layout.entries, layout.kept), data.shape
    index = torch.zeros(num_chunks, layout.kept, dtype=torch.int16, device=data.device)
    odd = torch.zeros(1, dtype=torch.int32, device=data.device)
    signed = values is None
    if values is None:
        values = torch.zeros(index.shape, device=data.device)
    low, high = (index, index) if pair is None else (pair[0].contiguous(), pair[1].contiguous())
    pow2 = _power_of_two(code.marks)
    block = _together(8, pow2)
    _launch(
        kernels.read_kernel, _blocks(num_chunks, block), data, low, high, index, values, odd, num_chunks,
        WIDTH=width, MARKS=code.marks, POW2=pow2, LOW=code.low, BITMAP=code.bitmap, KEEP=layout.kept,
        BLOCK=block, SIGNED=signed,
    )  # fmt: skip
    _launch(
        kernels.check_kernel, _blocks(index.numel(), CHECK_BLOCK), index, values, odd, index.numel(),
        layout.entries, KEEP=layout.kept, BLOCK=CHECK_BLOCK,
    )  # fmt: skip
    return index, values, odd


def add(
    total: Tensor,
    count: Tensor | None,
    origin: Tensor,
    skip: Tensor,
    width: int,
    index: Tensor,
    values: Tensor,
) -> None:
    """Add one payload's chunks, as `RunningMean` does."""
    num_chunks, keep = index.shape
    pow2 = _power_of_two(keep)
    block = _together(16, pow2)
    _launch(
        kernels.add_kernel, _blocks(num_chunks, block),
        total, total if count is None else count, origin, skip, index.contiguous(), values.contiguous(),
        num_chunks, KEEP=keep, POW2=pow2, BLOCK=block, WIDTH=width, COUNTED=count is not None,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _block_table(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each block of a buffer cut into tensors: its tensor, its start there; for each tensor its start."""
    counts = torch.tensor([-(-size // APPLY_BLOCK) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    first = torch.cat([torch.arange(count) * APPLY_BLOCK for count in counts.tolist()])
    start = torch.tensor([0, *sizes]).cumsum(0)
    return owner.to(device), first.to(device), start.to(device)


def apply(
    anchor: Sequence[Tensor], total: Tensor, count: Tensor | None, number: int, step_size: float
) -> None:
    """anchor -= step_size * mean; `total` holds the sums of all tensors, one after the other."""
    owner, first, start = _block_table(tuple(tensor.numel() for tensor in anchor), total.device)
    _launch(
        kernels.apply_kernel, (len(owner),), _pointers(anchor, total.device), owner, first, start,
        total, total if count is None else count, float(number), step_size,
        COUNTED=count is not None, BLOCK=APPLY_BLOCK, num_warps=8,
    )  # fmt: skip


def step(
    anchor: Sequence[Tensor],
    payloads: Sequence[Group],
    layouts: Sequence[Layout],
    step_size: float,
    contributors: bool,
) -> None:
    """anchor -= step_size * mean of a group's payloads, of at most MAX_REPLICAS replicas, in order."""
    device, layout = anchor[0].device, layouts[0]
    owner, origin, cols = _chunk_table(tuple(layouts), device)
    tensors = [tensor.contiguous() for group in payloads for tensor in (group.index, group.values)]
    pointers = _pointers([*tensors, *anchor], device)
    replicas, pow2 = 1 << (len(payloads) - 1).bit_length(), _power_of_two(layout.kept)
    _launch(
        kernels.step_kernel, (len(owner),),
        pointers, owner, origin, cols, pointers[len(tensors) :], len(payloads), float(len(payloads)),
        step_size, KEEP=layout.kept, POW2=pow2, LOG=pow2.bit_length() - 1, REPLICAS=replicas,
        WIDTH=layout.width, COUNTED=contributors, num_warps=4,
    )  # fmt: skip


def signed(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Unsigned 32-bit numbers as int32 with the same bits."""
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).to(device)


@lru_cache(maxsize=8)
def _crc_tables(num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    inside = [crc.shift(CRC_BYTES * (CRC_LANES - 1 - lane)) for lane in range(CRC_LANES)]
    between, shift = [crc.ONE], crc.shift(CRC_BYTES * CRC_LANES)
    while len(between) < num_blocks:
        between.append(crc.times(between[-1], shift))
    return signed(crc.byte_table(), device), signed(inside, device), signed(between, device)


def crc_shares(data: Tensor) -> Tensor:
    """The shares of rows (R, n) of uint8 data in their checksums, as (R,) int32; see `crc`."""
    rows, size = data.shape
    (num_blocks,) = _blocks(size, CRC_BYTES * CRC_LANES)
    # Tables grow by doubling, so that a run needs few different ones.
    table, inside, between = _crc_tables(_power_of_two(max(1, num_blocks)), data.device)
    out = torch.zeros(rows, dtype=torch.int32, device=data.device)
    if num_blocks:
        _launch(
            kernels.crc_kernel, (num_blocks, rows), data, size, data.stride(0), table, inside, between, out,
            BYTES=CRC_BYTES, LANES=CRC_LANES,
        )  # fmt: skip
    return out
