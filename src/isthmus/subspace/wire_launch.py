"""Starts the kernels of the few-bit wire: what `wire` does in plain torch, in two or three launches, and in
one more where K is no multiple of eight.

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
WORDS, ODD = 512, 1024  # that one program reads or writes; flags that it looks at together
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


class _Frame:
    """The parts of a frame, as kernels read and write them."""

    def __init__(self, data: Tensor, shape: tuple[int, int, int], bits: int, centred: bool) -> None:
        tops, means, self.steps, self.codes = data.split(frame_sizes(bits, *shape, centred))
        self.tops = tops.view(torch.float32)
        self.means = means.view(torch.uint16) if centred else means
        self.num_words = len(self.codes) // (shape[0] * bits)  # of a sequence


def _round(
    z: Tensor, bits: int, centred: bool, fractions: Tensor, how: str, out: Tensor, frame: _Frame | None = None
) -> None:
    """The rest of the `frame` is written too, where `out` does not take values."""
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
    _run(kernels.largest_kernel, grid, z, sums, largest, length, dim, **tiles)
    parts = (out, out, out) if frame is None else (frame.tops, frame.means, frame.steps)
    _run(
        kernels.round_kernel, grid, z, sums, largest, fractions, *parts, out, length, dim,
        length * dim // GROUP, TILES=_power_of_two(grid[1]), BITS=bits, MOST=2 ** (bits - 1) - 1,
        HOW=how, **tiles,
    )  # fmt: skip


def encode(z: Tensor, bits: int, centred: bool, fractions: Tensor) -> Tensor:
    """z (B, L, K) as the frame that crosses."""
    rows, length, dim = z.shape
    shape = (rows, length, dim)
    data = torch.empty(sum(frame_sizes(bits, *shape, centred)), dtype=torch.uint8, device=z.device)
    frame = _Frame(data, shape, bits, centred)
    if dim % GROUP == 0:
        _round(z, bits, centred, fractions, "words", frame.codes, frame)
        return data
    codes = torch.empty(shape, dtype=torch.uint8, device=z.device)
    _round(z, bits, centred, fractions, "codes", codes, frame)
    grid = (rows, -(-frame.num_words // WORDS))
    _run(kernels.pack_kernel, grid, codes, frame.codes, length * dim, frame.num_words, BLOCK=WORDS, BITS=bits)
    return data


def carried(z: Tensor, bits: int, centred: bool, fractions: Tensor) -> Tensor:
    """z (..., L, K) as the other side reads it."""
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    _round(z, bits, centred, fractions, "values", _raw(out))
    return out


def decode(
    data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, bits: int, centred: bool,
    fractions: Tensor, limit: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The stream of a frame, and whether all of it can have been sent."""
    rows, length, dim = shape
    if not data.is_contiguous() or data.data_ptr() % 4:
        data = data.clone(memory_format=torch.contiguous_format)
    frame = _Frame(data, shape, bits, centred)
    grid, num_words = (rows, -(-frame.num_words // WORDS)), frame.num_words
    odd = torch.empty(grid, dtype=torch.int32, device=data.device)
    out = torch.empty(shape, dtype=dtype, device=data.device)
    sound = torch.empty((), dtype=torch.bool, device=data.device)
    how = {"BLOCK": WORDS, "BITS": bits, "MOST": 2 ** (bits - 1) - 1, "CENTRED": centred}
    _run(
        kernels.check_kernel, grid, frame.tops, frame.means, frame.codes, odd, dim, length * dim, num_words,
        limit, **how,
    )  # fmt: skip
    _run(
        kernels.decode_kernel, grid, frame.tops, frame.means, frame.steps, frame.codes, odd, odd.numel(),
        fractions, _raw(out), sound.view(torch.uint8), length, dim, num_words,
        ODD=min(ODD, _power_of_two(odd.numel())), WHOLE=dim % GROUP == 0, BF16=HALF[dtype], **how,
    )  # fmt: skip
    return out, sound
