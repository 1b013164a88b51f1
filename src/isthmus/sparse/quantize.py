"""Q of eq. 2 of arXiv 2601.02360: two bits per kept value, a sign and a choice of two levels per chunk.

A chunk's two levels share 16 bits. The upper 10 are the lower level on a logarithmic scale below the tensor's
largest (its `base`, fp32), over 32 octaves; 0 marks a chunk of zeros. The lower 6 are the ratio of the two
levels, 1 to 1024, in steps that widen with the ratio; the last code marks a chunk that keeps zeros among
other values, whose levels are 0 and one other. So a value that is not zero never loses its sign, and a zero
stays zero.

Decoding looks levels up in constant tables and multiplies twice, so every device computes the same bits.
"""

from functools import lru_cache

import torch
from torch import Tensor

OCTAVES = 32
TOP_CODE = 1023
RATIO_OCTAVES = 10
TOP_RATIO = 62
WITH_ZEROS = 63
MIN_BASE = 2.0**-90  # 32 octaves below it is still a normal fp32 number
FLOAT_MAX = torch.finfo(torch.float32).max


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The base's factor by code (1024,), and the level's by ratio code, for low and for high (64,)."""
    code = torch.arange(TOP_CODE + 1, dtype=torch.float64)
    level = torch.exp2((code - TOP_CODE) * OCTAVES / (TOP_CODE - 1))
    level[0] = 0
    high = torch.exp2(RATIO_OCTAVES * (torch.arange(WITH_ZEROS + 1, dtype=torch.float64) / TOP_RATIO) ** 2)
    high[WITH_ZEROS] = 1
    low = torch.ones_like(high)
    low[WITH_ZEROS] = 0
    return level.float().to(device), low.float().to(device), high.float().to(device)


def levels(scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high level (C, 1) of chunks with these scales (C,), from their tensors' bases (C,)."""
    level_table, low_table, high_table = _tables(scale.device)
    level = base * level_table[scale >> 6]  # (C,)
    ratio = scale & 63
    # The clamp: a ratio rounded up must not turn a level near the end of fp32 into infinity.
    return (level * low_table[ratio])[:, None], (level * high_table[ratio]).clamp(max=FLOAT_MAX)[:, None]


def dequantize(negative: Tensor, large: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """Values (C, J) from their sign and magnitude bits (bool), with the chunks' scales and bases (C,)."""
    low, high = levels(scale, base)
    magnitude = torch.where(large, high, low)
    return torch.where(negative, -magnitude, magnitude)


def _running_sum(rows: Tensor) -> Tensor:
    """cumsum(1) in log2(J) additions: CUDA has no deterministic one, and fails if that is required."""
    step = 1
    while step < rows.shape[1]:
        rows = torch.cat([rows[:, :step], rows[:, step:] + rows[:, :-step]], 1)
        step *= 2
    return rows


def two_levels(magnitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two levels (C,) with the least squared error, for magnitudes (C, J) in descending order.

    For sorted values the best assignment is a cut. The error of a cut after j of J values is the sum of
    squares less S1^2 / j + S2^2 / (J - j), with S1 and S2 the sums on either side: it compares all J cuts.
    Third: whether the chunk keeps zeros among other values, whose mean is then its only level.
    """
    count = magnitude.shape[1]
    peak = magnitude[:, :1]  # (C, 1)
    unit = magnitude / torch.where(peak > 0, peak, 1)  # keeps squares in range
    above = torch.arange(1, count + 1, dtype=unit.dtype, device=unit.device)  # (J,)
    below = (count - above).clamp(min=1)
    upper = _running_sum(unit)  # (C, J)
    lower = (upper[:, -1:] - upper).clamp(min=0)
    lower[:, -1] = 0
    cut = (upper.square() / above + lower.square() / below).argmax(1, keepdim=True)  # (C, 1)
    high = upper.gather(1, cut) / above[cut]
    low = torch.where(cut == count - 1, high, lower.gather(1, cut) / below[cut])
    # A ratio beyond the last code would lower the high level, which matters more.
    low = torch.minimum(torch.maximum(low, high * 2.0**-RATIO_OCTAVES), high)
    zeros = (magnitude[:, -1:] == 0) & (peak > 0)
    single = upper[:, -1:] / (unit > 0).sum(1, keepdim=True).clamp(min=1)
    low, high = torch.where(zeros, single, low) * peak, torch.where(zeros, single, high) * peak
    return low[:, 0], high[:, 0], zeros[:, 0]


def quantize(
    values: Tensor, magnitude: Tensor, owner: Tensor, num_tensors: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Many tensors at once: values as they will be decoded (C, J) fp32, scale (C,) int32, base (T,) fp32.

    `magnitude` holds the values without signs, in descending order; `owner` (C,) is the tensor of a chunk.
    """
    if magnitude.dtype not in (torch.float32, torch.float64):
        values, magnitude = values.float(), magnitude.float()
    low, high, zeros = two_levels(magnitude)
    scale, base = scales(low, high, zeros, magnitude[:, 0] == 0, owner, num_tensors)
    base_of = base[owner]
    low, high = levels(scale, base_of)
    size = values.abs()
    large = (size - low > high - size) | ((size > 0) & zeros[:, None])
    return dequantize(torch.signbit(values), large, scale, base_of), scale, base


def scales(
    low: Tensor, high: Tensor, zeros: Tensor, nothing: Tensor, owner: Tensor, num_tensors: int
) -> tuple[Tensor, Tensor]:
    """The codes (C,) of chunks with these two levels, and the bases (T,) of their tensors.

    `zeros` marks chunks that keep zeros among other values, `nothing` those that keep only zeros.
    """
    base = low.new_zeros(num_tensors).scatter_reduce_(0, owner, low, "amax")  # (T,)
    base = base.clamp(MIN_BASE, FLOAT_MAX).float()
    base_of = base[owner]  # (C,)
    code = TOP_CODE + torch.log2(low / base_of) * ((TOP_CODE - 1) / OCTAVES)
    code = code.nan_to_num(1).round().clamp(1, TOP_CODE).int()
    code = torch.where(nothing, 0, code)
    # The ratio is relative to the coded level, so that its rounding does not reach the high level.
    coded = levels(code << 6, base_of)[0][:, 0]
    octaves = torch.log2(high / coded).clamp(0, RATIO_OCTAVES)
    ratio = ((octaves / RATIO_OCTAVES).sqrt() * TOP_RATIO).nan_to_num(0).round().int()
    return (code << 6) | torch.where(zeros, WITH_ZEROS, ratio), base


def bits_of(values: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The sign and magnitude bits (C, J) of values from `dequantize`."""
    low, _ = levels(scale, base)
    return torch.signbit(values), values.abs() > low
