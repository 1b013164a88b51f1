"""Starts the kernels of the few-bit wire: what `wire` does in plain torch, in two or three launches.

Nothing waits for the device and no shape depends on values, so a CUDA graph can hold it. Only `wire` imports
this module, because it needs Triton.
"""

from typing import Any

import torch
from torch import Tensor

from isthmus.layout.wire import GROUP, frame_sizes
from isthmus.subspace import wire_kernels

ENTRIES = 4096  # of a stream, that one program holds
PARTS, TOKENS, WIDTH = 8, 64, 64  # of a sequence; tokens and dimensions that one program sums at a time
CHECKED, HEAD = 2048, 512  # groups of eight codes that one program checks; tops or means at a time
TYPES = {torch.bfloat16: True, torch.float32: False}
kernels: Any = wire_kernels  # pyright sees functions where Triton makes kernels


def fits(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether kernels take a stream (..., L, K) of this kind."""
    return dtype in TYPES and 0 < shape[-1] <= 4 * ENTRIES and min(shape) > 0


def _run(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, enable_fp_fusion=False, **constants)  # each operation rounds by itself, as in torch


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _raw(z: Tensor) -> Tensor:
    """bf16 as its bits."""
    return z.view(torch.uint16) if z.dtype == torch.bfloat16 else z


class _Tiles:
    """How programs share a stream of `rows` sequences (L, K)."""

    def __init__(self, rows: int, length: int, dim: int) -> None:
        self.num_groups = -(-dim // GROUP)
        self.groups = _power_of_two(self.num_groups)
        self.tile = max(1, ENTRIES // (self.groups * GROUP))  # tokens
        self.number = -(-length // self.tile)  # for each sequence
        self.grid = (rows, self.number)


def _round(z: Tensor, out: Tensor, bits: int, centred: bool, fractions: Tensor, packed: bool) -> None:
    length, dim = z.shape[-2:]
    rows = z.numel() // (length * dim)
    tiles, half = _Tiles(rows, length, dim), TYPES[z.dtype]
    z = _raw(z.contiguous())
    largest = torch.empty(rows, tiles.number, dtype=torch.int32, device=z.device)
    sums = largest  # not read
    if centred:
        sums = torch.empty(rows, PARTS, dim, dtype=torch.float64, device=z.device)
        span = -(-length // (PARTS * TOKENS)) * TOKENS
        grid = (rows, PARTS, -(-dim // WIDTH))
        _run(kernels.sums_kernel, grid, z, sums, length, dim, TILE=TOKENS, WIDTH=WIDTH, SPAN=span, BF16=half)
    how = {"TILE": tiles.tile, "GROUPS": tiles.groups, "PARTS": PARTS if centred else 0, "BF16": half}
    _run(kernels.largest_kernel, tiles.grid, z, sums, largest, length, dim, **how)
    how |= {"TILES": _power_of_two(tiles.number), "BITS": bits, "MOST": 2 ** (bits - 1) - 1}
    _run(
        kernels.round_kernel, tiles.grid, z, sums, largest, fractions, out, rows, length, dim,
        tiles.num_groups, PACKED=packed, **how,
    )  # fmt: skip


def encode(z: Tensor, bits: int, centred: bool, fractions: Tensor) -> Tensor:
    """z (B, L, K) as the frame that crosses."""
    rows, length, dim = z.shape
    num_bytes = sum(frame_sizes(bits, rows, length, dim, centred))
    frame = torch.empty(num_bytes, dtype=torch.uint8, device=z.device)
    _round(z, frame, bits, centred, fractions, packed=True)
    return frame


def carried(z: Tensor, bits: int, centred: bool, fractions: Tensor) -> Tensor:
    """z (..., L, K) as the other side reads it."""
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    _round(z, _raw(out), bits, centred, fractions, packed=False)
    return out


def decode(
    data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, bits: int, centred: bool,
    fractions: Tensor, limit: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The stream of a frame, and whether all of it can have been sent."""
    rows, length, dim = shape
    tiles = _Tiles(rows, length, dim)
    tops, means, steps, _ = frame_sizes(bits, *shape, centred)
    steps_at, codes_at = tops + means, tops + means + steps
    num_words = rows * length * tiles.num_groups
    data, checks, most = data.contiguous(), -(-num_words // CHECKED), 2 ** (bits - 1) - 1
    odd = torch.empty(checks, dtype=torch.int32, device=data.device)
    how = {"BITS": bits, "MOST": most, "CENTRED": centred}
    _run(
        kernels.check_kernel, (checks,), data, odd, rows, dim, codes_at, num_words, limit,
        BLOCK=CHECKED, HEAD=HEAD, **how,
    )  # fmt: skip
    out = torch.empty(shape, dtype=dtype, device=data.device)
    sound = torch.empty((), dtype=torch.bool, device=data.device)
    _run(
        kernels.decode_kernel, tiles.grid, data, odd, checks, fractions, _raw(out), sound.view(torch.uint8),
        rows, length, dim, tiles.num_groups, steps_at, codes_at,
        TILE=tiles.tile, GROUPS=tiles.groups, ODD=_power_of_two(checks), BF16=TYPES[dtype], **how,
    )  # fmt: skip
    return out, sound
