"""Starts the kernels of the few-bit wire, which do what `wire` does in plain torch. Encoding takes two
launches, one more for a mean, and one more where K is no multiple of eight; decoding takes one.

Nothing waits for the device and no shape depends on values, so a CUDA graph can hold it. Only `wire` imports
this module, because it needs Triton.
"""

from typing import Any

import torch
from torch import Tensor

from isthmus.layout.wire import GROUP, frame_sizes
from isthmus.subspace import wire_kernels

ENTRIES = 4096  # of a stream, that one program rounds
PARTS, TOKENS, WIDTH = 8, 64, 64  # of a sequence; tokens and dimensions that one program sums at a time
WORDS = 512  # of eight codes, that one program reads or writes
HALF = {torch.bfloat16: True, torch.float32: False}
kernels: Any = wire_kernels  # pyright sees functions where Triton makes kernels


def fits(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether kernels take a stream (..., L, K) of this kind."""
    return dtype in HALF and 0 < shape[-1] <= 4 * ENTRIES and min(shape) > 0 and shape[-1] * shape[-2] < 2**30


def _run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, enable_fp_fusion=False, **constants)  # each operation rounds by itself, as in torch


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _raw(z: Tensor) -> Tensor:
    """bf16 as its bits."""
    return z.view(torch.uint16) if z.dtype == torch.bfloat16 else z


def _parts(bits: int, shape: tuple[int, int, int], centred: bool) -> tuple[int, int, int, int, int]:
    """Of a frame: where its means, steps and codes begin and where it ends, and the words of a sequence."""
    tops, means, steps, codes = frame_sizes(bits, *shape, centred)
    steps_at = tops + means
    return tops, steps_at, steps_at + steps, steps_at + steps + codes, codes // (shape[0] * bits)


def _round(
    z: Tensor, bits: int, centred: bool, fractions: Tensor, how: str, out: Tensor, frame: Tensor,
    means_at: int = 0, steps_at: int = 0,
) -> None:  # fmt: skip
    """Into `out`, and the other parts into the frame, unless `out` takes values."""
    length, dim = z.shape[-2:]
    rows, half = z.numel() // (length * dim), HALF[z.dtype]
    groups = _power_of_two(-(-dim // GROUP))
    tile = max(1, ENTRIES // (groups * GROUP))  # tokens
    grid = (rows, -(-length // tile))
    z = _raw(z.contiguous())
    largest = sums = torch.empty(grid, dtype=torch.int32, device=z.device)
    if centred:
        sums = torch.empty(rows, PARTS, dim, dtype=torch.float64, device=z.device)
        span = -(-length // (PARTS * TOKENS)) * TOKENS
        _run(
            kernels.sums_kernel, (rows, PARTS, -(-dim // WIDTH)), z, sums, length, dim,
            TILE=TOKENS, WIDTH=WIDTH, SPAN=span, BF16=half,
        )  # fmt: skip
    tiles = {"TILE": tile, "GROUPS": groups, "PARTS": PARTS if centred else 0, "BF16": half}
    tiles["num_warps"] = max(4, groups * GROUP // 1024)  # a wide token is one program's alone
    _run(kernels.largest_kernel, grid, z, sums, largest, length, dim, **tiles)
    _run(
        kernels.round_kernel, grid, z, sums, largest, fractions, frame, out, length, dim,
        length * dim // GROUP, means_at, steps_at, TILES=_power_of_two(grid[1]), BITS=bits,
        MOST=2 ** (bits - 1) - 1, HOW=how, **tiles,
    )  # fmt: skip


def encode(z: Tensor, bits: int, centred: bool, fractions: Tensor) -> Tensor:
    """z (B, L, K) as the frame that crosses."""
    rows, length, dim = z.shape
    means_at, steps_at, codes_at, end, num_words = _parts(bits, (rows, length, dim), centred)
    frame = torch.empty(end, dtype=torch.uint8, device=z.device)
    packed = frame[codes_at:]
    if dim % GROUP == 0:
        _round(z, bits, centred, fractions, "words", packed, frame, means_at, steps_at)
        return frame
    codes = torch.empty(rows, length, dim, dtype=torch.uint8, device=z.device)
    _round(z, bits, centred, fractions, "codes", codes, frame, means_at, steps_at)
    grid = (rows, -(-num_words // WORDS))
    _run(kernels.pack_kernel, grid, codes, packed, length * dim, num_words, BLOCK=WORDS, BITS=bits)
    return frame


def carried(z: Tensor, bits: int, centred: bool, fractions: Tensor) -> Tensor:
    """z (..., L, K) as the other side reads it."""
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    raw = _raw(out)
    _round(z, bits, centred, fractions, "values", raw, raw)
    return out


def decode(
    data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, bits: int, centred: bool,
    fractions: Tensor, limit: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The stream of a frame, and of each part of it whether it can have been sent."""
    rows, length, dim = shape
    means_at, steps_at, codes_at, _, num_words = _parts(bits, shape, centred)
    if not data.is_contiguous() or data.data_ptr() % 4:
        data = data.clone(memory_format=torch.contiguous_format)
    grid = (rows, -(-num_words // WORDS))
    out = torch.empty(shape, dtype=dtype, device=data.device)
    sound = torch.empty(grid, dtype=torch.bool, device=data.device)
    _run(
        kernels.decode_kernel, grid, data, fractions, _raw(out), sound, length, dim, num_words, limit,
        means_at, steps_at, codes_at, BLOCK=WORDS, BITS=bits, MOST=2 ** (bits - 1) - 1, CENTRED=centred,
        WHOLE=dim % GROUP == 0, BF16=HALF[dtype],
    )  # fmt: skip
    return out, sound
