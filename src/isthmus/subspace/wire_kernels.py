"""The few-bit wire as Triton kernels, started by `wire_launch`; `wire` has the plain form, and these have its
bits.

A program takes TILE tokens of one sequence, each as G groups of eight values, which fill whole bytes. What
belongs to a whole sequence, its mean and its largest step, is left in parts by the programs of one kernel and
put together by every program of the next: there is nothing to set to zero first, and nothing to wait for.
bf16 is read and written as its bits, because Triton's interpreter does not round to it.
"""

import triton
import triton.language as tl


@triton.jit
def _from_bf16(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16(x):
    """The bits of the nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, nearest).to(tl.uint16)


@triton.jit
def _load(z, at, there, BF16: tl.constexpr):
    if BF16:
        return _from_bf16(tl.load(z + at, mask=there, other=0))
    else:
        return tl.load(z + at, mask=there, other=0.0)


@triton.jit
def _mean(sums, row, at, there, length, dim, PARTS: tl.constexpr):
    """The mean of each dimension as bf16 has it, from sums (rows, PARTS, K)."""
    total = tl.load(sums + row * PARTS * dim + at, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + (row * PARTS + part) * dim + at, mask=there, other=0.0)
    return _from_bf16(_to_bf16((total / length).to(tl.float32)))


@triton.jit
def _rest(
    z,
    sums,
    row,
    length,
    dim,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BF16: tl.constexpr,
):
    """What is left of a tile (TILE, GROUPS, 8) without its mean, with the mean and where they are."""
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None, None]
    at = tl.arange(0, GROUPS)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    there = (token < length) & (at < dim)
    where = (row * length + token) * dim + at
    x = _load(z, where, there, BF16)
    if PARTS:
        mean = _mean(sums, row, at, at < dim, length, dim, PARTS)
        return tl.where(there, x - mean, 0.0), mean, where, there
    else:
        return x, tl.zeros((1, GROUPS, 8), tl.float32), where, there


@triton.jit
def sums_kernel(
    z, sums, length, dim, TILE: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, BF16: tl.constexpr
):
    """The sum over one part of a sequence's tokens. In float64 its order hardly ever shows in a bf16 mean."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, SPAN, TILE):
        token = part * SPAN + first + tl.arange(0, TILE)[:, None]
        there = (token < length) & (at[None, :] < dim)
        x = _load(z, (row * length + token) * dim + at[None, :], there, BF16)
        total += tl.sum(x.to(tl.float64), 0)
    tl.store(sums + (row * parts + part) * dim + at, total, mask=at < dim)


@triton.jit
def largest_kernel(
    z, sums, largest, length, dim,
    TILE: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """A tile's largest magnitude as its bits: their order is that of numbers, with nan above all."""
    row = tl.program_id(0).to(tl.int64)
    rest, _, _, _ = _rest(z, sums, row, length, dim, TILE, GROUPS, PARTS, BF16)
    bits = tl.abs(rest).to(tl.int32, bitcast=True)
    tl.store(largest + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.max(tl.max(bits, 2), 1), 0))


@triton.jit
def _store_bytes(data, at, bits, there, NUM: tl.constexpr):
    for i in tl.static_range(NUM):
        tl.store(data + at + i, ((bits >> (8 * i)) & 255).to(tl.uint8), mask=there)


@triton.jit
def round_kernel(
    z, sums, largest, fractions, out, rows, length, dim, num_groups,
    TILE: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, BF16: tl.constexpr, TILES: tl.constexpr,
    BITS: tl.constexpr, MOST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A tile to codes, in the frame `out`, or to the values that they stand for, in a stream `out`."""
    row = tl.program_id(0).to(tl.int64)
    rest, mean, where, there = _rest(z, sums, row, length, dim, TILE, GROUPS, PARTS, BF16)
    tiles = tl.num_programs(1)
    tile = tl.arange(0, TILES)
    peak = tl.max(tl.load(largest + row * tiles + tile, mask=tile < tiles, other=0), 0).to(
        tl.float32, bitcast=True
    )
    top = tl.div_rn(peak, tl.full((), MOST, tl.float32))
    bits = tl.max(tl.max(tl.abs(rest).to(tl.int32, bitcast=True), 2), 1)  # (TILE,)
    needed = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full((TILE,), MOST, tl.float32))
    share = tl.div_rn(needed, tl.broadcast_to(top, (TILE,)))
    # The last of the descending fractions that is not below the share; for nan the first.
    steps = tl.zeros((TILE,), tl.int32)
    for i in tl.static_range(8):
        further = steps + (128 >> i)
        steps = tl.where(tl.load(fractions + further) >= share, further, steps)
    step = (top * tl.load(fractions + steps))[:, None, None]
    code = tl.div_rn(rest, tl.broadcast_to(step, (TILE, GROUPS, 8)))
    code = tl.minimum(tl.maximum(tl.where(code == code, code, 0.0), -1.0 * MOST), 1.0 * MOST)
    code = (code + 12582912.0) - 12582912.0  # 3 * 2^22: to nearest, ties to even
    if PACKED:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        group = tl.arange(0, GROUPS)
        step_at = rows * 4 + (rows * dim * 2 if PARTS else 0)
        if tl.program_id(1) == 0:
            _store_bytes(out, row * 4, top.to(tl.int32, bitcast=True), True, 4)
            if PARTS:
                at = group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
                _store_bytes(out, rows * 4 + (row * dim + at) * 2, _to_bf16(mean).to(tl.int32), at < dim, 2)
        tl.store(out + step_at + row * length + token, steps.to(tl.uint8), mask=token < length)
        lane = tl.arange(0, 8)[None, None, :].to(tl.int64)
        word = tl.sum(tl.where(there, (code + MOST).to(tl.int64), 0) << (lane * BITS), 2)  # (TILE, GROUPS)
        at = step_at + rows * length + ((row * length + token[:, None]) * num_groups + group[None, :]) * BITS
        _store_bytes(out, at, word, (token[:, None] < length) & (group[None, :] < num_groups), BITS)
    else:
        value = code * step
        if PARTS:
            value += mean
        if BF16:
            tl.store(out + where, _to_bf16(value), mask=there)
        else:
            tl.store(out + where, value, mask=there)


@triton.jit
def _load_bytes(data, at, there, TYPE: tl.constexpr, NUM: tl.constexpr):
    word = tl.load(data + at, mask=there, other=0).to(TYPE)
    for i in tl.static_range(1, NUM):
        word |= tl.load(data + at + i, mask=there, other=0).to(TYPE) << (8 * i)
    return word


@triton.jit
def check_kernel(
    data, odd, rows, dim, codes_at, num_words, limit,
    BLOCK: tl.constexpr, HEAD: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Whether some of a frame's codes, means and tops are none that are sent, into odd[program]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    word = _load_bytes(data, codes_at + at.to(tl.int64) * BITS, at < num_words, tl.int64, BITS)
    lane = tl.arange(0, 8)[None, :].to(tl.int64)
    found = tl.max((((word[:, None] >> (lane * BITS)) & (2 * MOST + 1)) > 2 * MOST).to(tl.int32))
    share = tl.arange(0, HEAD)
    for first in range(program * HEAD, rows, programs * HEAD):
        top = _load_bytes(data, (first + share) * 4, first + share < rows, tl.int32, 4).to(
            tl.float32, bitcast=True
        )
        found |= 1 - tl.min(((top >= 0) & (top <= limit)).to(tl.int32))
    if CENTRED:
        for first in range(program * HEAD, rows * dim, programs * HEAD):
            mean = _from_bf16(
                _load_bytes(data, rows * 4 + (first + share) * 2, first + share < rows * dim, tl.int32, 2)
            )
            found |= 1 - tl.min((tl.abs(mean) <= limit).to(tl.int32))
    tl.store(odd + program, found)


@triton.jit
def decode_kernel(
    data, odd, num_odd, fractions, out, sound, rows, length, dim, num_groups, steps_at, codes_at,
    TILE: tl.constexpr, GROUPS: tl.constexpr, ODD: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr,
    CENTRED: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """A tile of the stream; zero where anything in the frame is odd."""
    row = tl.program_id(0).to(tl.int64)
    flag = tl.arange(0, ODD)
    fine = tl.max(tl.load(odd + flag, mask=flag < num_odd, other=0), 0) == 0
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(sound, fine.to(tl.uint8))
    token, group = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, GROUPS)
    at = codes_at + ((row * length + token[:, None]) * num_groups + group[None, :]) * BITS
    there = (token[:, None] < length) & (group[None, :] < num_groups)
    word = _load_bytes(data, at, there, tl.int64, BITS)[:, :, None]
    lane = tl.arange(0, 8)[None, None, :].to(tl.int64)
    code = ((word >> (lane * BITS)) & (2 * MOST + 1)).to(tl.float32) - MOST
    top = _load_bytes(data, row * 4, True, tl.int32, 4).to(tl.float32, bitcast=True)
    steps = tl.load(data + steps_at + row * length + token, mask=token < length, other=0)
    value = code * (top * tl.load(fractions + steps.to(tl.int32)))[:, None, None]
    at = group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    if CENTRED:
        value += _from_bf16(_load_bytes(data, rows * 4 + (row * dim + at) * 2, at < dim, tl.int32, 2))
    value = tl.where(fine, value, 0.0)
    there = (token[:, None, None] < length) & (at < dim)
    where = (row * length + token[:, None, None]) * dim + at
    if BF16:
        tl.store(out + where, _to_bf16(value), mask=there)
    else:
        tl.store(out + where, value, mask=there)
