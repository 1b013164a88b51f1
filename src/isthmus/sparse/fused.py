"""The codec on a GPU in a few fused kernels (`kernels`).

Every function here has a plain torch form elsewhere, which is what a CPU runs and what the tests compare
with. What is decoded has the same bits either way.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from isthmus.gpu import usable as usable
from isthmus.layout.chunks import IndexCode, Layout, index_code
from isthmus.sparse.bundle import Group, owners
from isthmus.sparse.quantize import RATIO_OCTAVES, levels, scales

POWERS = {2**i for i in range(4, 13)}  # entries that one program holds
MAX_KEEP = 128  # levels are found by comparing all pairs of a chunk's values
MAX_REPLICAS = 32  # of which every entry of a chunk is looked up in all
APPLY_BLOCK = 4096
CHECK_BLOCK = 2048
CRC_BYTES, CRC_LANES = 64, 512  # of one lane, of one block
# Enough chunks in flight at once: a program that took more registers would leave too few.
SELECT = {True: {"num_warps": 4, "maxnreg": 128}, False: {"num_warps": 1}}
PLAIN = {"enable_fp_fusion": False}  # a multiply-add rounded once would differ from a CPU's


def fits(place: Layout) -> bool:
    """Whether chunks of this layout take the fused way: a power of two of entries, none of them padding."""
    return (
        place.entries in POWERS and not place.padded and 0 < place.kept <= MAX_KEEP and place.chunks > 0
        and not index_code(place.entries, place.kept).bitmap
    )  # fmt: skip


@lru_cache(maxsize=64)
def _chunk_table(places: tuple[Layout, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each chunk of a group its tensor's number and its start there; for each tensor its columns."""
    from isthmus.sparse.topk import origins

    owner = owners(tuple(place.chunks for place in places), device)
    origin = torch.cat([origins(place, torch.device("cpu")) for place in places])
    return owner, origin.to(device), torch.tensor([place.cols for place in places]).to(device)


def _wide(count: int) -> int:
    return max(2, 1 << (count - 1).bit_length())


def _blocks(num_chunks: int, block: int) -> tuple[int]:
    return (-(-num_chunks // block),)


def feed_back(
    anchor: Sequence[Tensor],
    params: Sequence[Tensor],
    feedback: Sequence[Tensor],
    places: Sequence[Layout],
    decay: float,
    scale: float,
    kind: str,
) -> tuple[Group, Tensor]:
    """e <- decay e + scale (anchor - params) in place; what is sent of it, which is taken out of it.

    Gives the group's payload and a flag that is not zero where an entry is not finite.
    """
    from isthmus.sparse import kernels

    device, place, keep = params[0].device, places[0], places[0].kept
    owner, origin, cols = _chunk_table(tuple(places), device)
    addresses = [t.data_ptr() for three in zip(anchor, params, feedback, strict=True) for t in three]
    pointers = torch.tensor(addresses).to(device, non_blocking=True)
    num_chunks = len(owner)
    index = torch.empty(num_chunks, keep, dtype=torch.int16, device=device)
    values = torch.empty(num_chunks, keep, dtype=torch.float32, device=device)
    odd = torch.zeros(1, dtype=torch.int32, device=device)
    kernels.select_kernel[(num_chunks,)](
        pointers, owner, origin, cols, index, values, odd, decay, scale,
        KEEP=keep, HEIGHT=place.height, WIDTH=place.width, KIND=kind,
        **SELECT[place.entries > 1024], **PLAIN,
    )  # fmt: skip
    if kind != "2bit":
        return Group(index, values), odd
    low, high, zeros = two_levels(values)
    codes, base = scales(low, high, zeros, high == 0, owner, len(places))
    low, high = (level[:, 0].contiguous() for level in levels(codes, base[owner]))
    kernels.round_kernel[_blocks(num_chunks, 16)](
        pointers, owner, origin, cols, index, values, codes, low, high, num_chunks,
        KEEP=keep, WIDE=_wide(keep), BLOCK=16, WIDTH=place.width, **PLAIN,
    )  # fmt: skip
    return Group(index, values, codes, base), odd


def two_levels(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize.two_levels` for values (C, J) with signs, in any order."""
    from isthmus.sparse import kernels

    num_chunks, keep = values.shape
    low, high = values.new_empty(num_chunks), values.new_empty(num_chunks)
    zeros = torch.empty(num_chunks, dtype=torch.int8, device=values.device)
    block = max(1, 4096 // _wide(keep) ** 2)
    kernels.levels_kernel[_blocks(num_chunks, block)](
        values, low, high, zeros, num_chunks,
        KEEP=keep, WIDE=_wide(keep), BLOCK=block, RATIO=2.0**-RATIO_OCTAVES, **PLAIN,
    )  # fmt: skip
    return low, high, zeros.bool()


def write_bits(bits: Tensor, index: Tensor, values: Tensor, low: Tensor | None, code: IndexCode) -> None:
    """Into zeroed bits (C, 8 n), one byte each: positions and, with the lower levels given, signs and
    magnitudes, as `wire` lays them out."""
    from isthmus.sparse import kernels

    num_chunks, keep = index.shape
    kernels.write_bits_kernel[_blocks(num_chunks, 16)](
        bits, index.contiguous(), values.contiguous(), values if low is None else low.contiguous(),
        num_chunks, bits.shape[1], MARKS=code.marks, LOW=code.low, KEEP=keep, WIDE=_wide(keep), BLOCK=16,
        SIGNED=low is not None, **PLAIN,
    )  # fmt: skip


def read(
    data: Tensor, levels_of: tuple[Tensor, Tensor] | None, place: Layout, code: IndexCode
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Positions and, with low and high levels given, values (C, J) of bit strings (C, n), and a flag that is
    not zero if one is malformed."""
    from isthmus.sparse import kernels

    num_chunks, width = data.shape
    index = torch.zeros(num_chunks, place.kept, dtype=torch.int16, device=data.device)
    odd = torch.zeros(1, dtype=torch.int32, device=data.device)
    values = None if levels_of is None else torch.zeros(index.shape, device=data.device)
    low, high = (index, index) if levels_of is None else (level.contiguous() for level in levels_of)
    kernels.read_kernel[_blocks(num_chunks, 8)](
        data, low, high, index, index if values is None else values, odd, num_chunks, WIDTH=width,
        MARKS=code.marks, WIDE=_wide(code.marks), LOW=code.low, KEEP=place.kept, BLOCK=8,
        SIGNED=values is not None, **PLAIN,
    )  # fmt: skip
    return index, values, odd


def check(index: Tensor, values: Tensor, entries: int, odd: Tensor) -> None:
    """Set the flag unless every chunk's positions (C, J) ascend below `entries` and its values are finite."""
    from isthmus.sparse import kernels

    kernels.check_kernel[_blocks(index.numel(), CHECK_BLOCK)](
        index, values, odd, index.numel(), entries, KEEP=index.shape[1], BLOCK=CHECK_BLOCK
    )


def add(
    total: Tensor,
    count: Tensor | None,
    origin: Tensor,
    skip: Tensor,
    width: int,
    index: Tensor,
    values: Tensor,
) -> None:
    """What `RunningMean` does with one payload's chunks."""
    from isthmus.sparse import kernels

    num_chunks, keep = index.shape
    kernels.add_kernel[_blocks(num_chunks, 16)](
        total, total if count is None else count, origin, skip, index.contiguous(), values.contiguous(),
        num_chunks, KEEP=keep, WIDE=_wide(keep), BLOCK=16, WIDTH=width, COUNTED=count is not None, **PLAIN,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _block_table(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each block of a buffer cut into tensors: its tensor, its place there; for each tensor its start."""
    counts = torch.tensor([-(-size // APPLY_BLOCK) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    first = torch.cat([torch.arange(count) * APPLY_BLOCK for count in counts.tolist()])
    start = torch.tensor([0, *sizes]).cumsum(0)
    return owner.to(device), first.to(device), start.to(device)


def apply(
    anchor: Sequence[Tensor], total: Tensor, count: Tensor | None, number: int, step_size: float
) -> None:
    """anchor -= step_size * mean, where `total` holds the sums of all the tensors one after the other."""
    from isthmus.sparse import kernels

    sizes = tuple(tensor.numel() for tensor in anchor)
    owner, first, start = _block_table(sizes, total.device)
    pointers = torch.tensor([tensor.data_ptr() for tensor in anchor]).to(total.device, non_blocking=True)
    kernels.apply_kernel[(len(owner),)](
        pointers, owner, first, start, total, total if count is None else count, float(number), step_size,
        COUNTED=count is not None, BLOCK=APPLY_BLOCK, num_warps=8, **PLAIN,
    )  # fmt: skip


def step(
    anchor: Sequence[Tensor],
    payloads: Sequence[Group],
    places: Sequence[Layout],
    step_size: float,
    contributors: bool,
) -> None:
    """anchor -= step_size * mean of a group's payloads, of at most MAX_REPLICAS replicas, in order."""
    from isthmus.sparse import kernels

    device, place = anchor[0].device, places[0]
    owner, origin, cols = _chunk_table(tuple(places), device)
    tensors = [tensor.contiguous() for group in payloads for tensor in (group.index, group.values)]
    pointers = torch.tensor([tensor.data_ptr() for tensor in (*tensors, *anchor)]).to(
        device, non_blocking=True
    )
    replicas, wide = 1 << (len(payloads) - 1).bit_length(), _wide(place.kept)
    kernels.step_kernel[(len(owner),)](
        pointers, owner, origin, cols, pointers[len(tensors) :], len(payloads), float(len(payloads)),
        step_size, KEEP=place.kept, WIDE=wide, LOG=wide.bit_length() - 1, REPLICAS=replicas,
        WIDTH=place.width, COUNTED=contributors, num_warps=4, **PLAIN,
    )  # fmt: skip


# CRC-32 of bytes that lie on the device.

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31  # the polynomial 1, lowest bit = highest power


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _shift(num_bytes: int) -> int:
    """x^(8 num_bytes): multiplying by it puts so many zero bytes behind."""
    power, result = 1 << 23, ONE  # x^8
    while num_bytes:
        if num_bytes & 1:
            result = _times(result, power)
        power = _times(power, power)
        num_bytes >>= 1
    return result


def _signed(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).to(device)


@lru_cache(maxsize=8)
def _crc_tables(num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    inside = [_shift(CRC_BYTES * (CRC_LANES - 1 - lane)) for lane in range(CRC_LANES)]
    between, step = [ONE], _shift(CRC_BYTES * CRC_LANES)
    while len(between) < num_blocks:
        between.append(_times(between[-1], step))
    return _signed(table, device), _signed(inside, device), _signed(between, device)


def crc_share(data: Tensor) -> Tensor:
    """What `finish_crc` needs of rows (R, n) of uint8 data on a device, as (R,) int32 there."""
    from isthmus.sparse import kernels

    rows, size = data.shape
    (num_blocks,) = _blocks(size, CRC_BYTES * CRC_LANES)
    # Tables grow by doubling, so that a run asks for few different ones.
    table, inside, between = _crc_tables(_wide(max(1, num_blocks)), data.device)
    out = torch.zeros(rows, dtype=torch.int32, device=data.device)
    if num_blocks:
        kernels.crc_kernel[(num_blocks, rows)](
            data, size, data.stride(0), table, inside, between, out, BYTES=CRC_BYTES, LANES=CRC_LANES
        )
    return out


def finish_crc(before: bytes | memoryview, share: int, num_bytes: int) -> int:
    """zlib.crc32 of `before` followed by the `num_bytes` bytes of `crc_share`."""
    # The register that zlib holds after `before` is shifted through the bytes; their share is added.
    register = zlib.crc32(before) ^ 0xFFFFFFFF
    return _times(register, _shift(num_bytes)) ^ (share & 0xFFFFFFFF) ^ 0xFFFFFFFF
