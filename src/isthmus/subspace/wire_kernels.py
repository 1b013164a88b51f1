"""The few-bit wire as Triton kernels, started by `wire_launch`; `wire` has the plain form, and these have its
bits.

A program takes TILE tokens of one sequence, each as GROUPS of eight values, or a number of words: eight codes
of a sequence, which fill whole bytes. What belongs to a whole sequence, its mean and its largest step, is
left in parts by the programs of one kernel and put together by every program of the next: there is nothing
to set to zero first, and nothing to wait for. bf16 is read and written as its bits, because Triton's
interpreter does not round to it.
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
def _store(z, at, x, there, BF16: tl.constexpr):
    if BF16:
        tl.store(z + at, _to_bf16(x), mask=there)
    else:
        tl.store(z + at, x, mask=there)


@triton.jit
def _load_words(codes, at, there, BITS: tl.constexpr):
    """(..., 8) int64: the codes of words, BITS bytes each."""
    word = tl.load(codes + at * BITS, mask=there, other=0).to(tl.int64)
    for i in tl.static_range(1, BITS):
        word |= tl.load(codes + at * BITS + i, mask=there, other=0).to(tl.int64) << (8 * i)
    lane = tl.arange(0, 8).to(tl.int64)
    return (tl.expand_dims(word, -1) >> (lane * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _store_words(codes, at, code, there, BITS: tl.constexpr):
    """int64 codes (..., 8), eight to a word."""
    lane = tl.arange(0, 8).to(tl.int64)
    word = tl.sum(code << (lane * BITS), len(code.shape) - 1)
    for i in tl.static_range(BITS):
        tl.store(codes + at * BITS + i, ((word >> (8 * i)) & 255).to(tl.uint8), mask=there)


@triton.jit
def _rest(
    z, sums, row, length, dim,
    TILE: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """A tile (TILE, GROUPS, 8) without its mean, the mean as bf16 has it, and where they are."""
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None, None]
    at = tl.arange(0, GROUPS)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    there = (token < length) & (at < dim)
    where = (row * length + token) * dim + at
    x = _load(z, where, there, BF16)
    if PARTS:  # sums (rows, PARTS, K)
        total = tl.load(sums + row * PARTS * dim + at, mask=at < dim, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(sums + (row * PARTS + part) * dim + at, mask=at < dim, other=0.0)
        mean = _from_bf16(_to_bf16((total * (tl.full((), 1.0, tl.float64) / length)).to(tl.float32)))
        return tl.where(there, x - mean, 0.0), mean, where, there
    else:
        return x, tl.zeros((1, GROUPS, 8), tl.float32), where, there


@triton.jit
def sums_kernel(
    z, sums, length, dim, TILE: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, BF16: tl.constexpr
):  # fmt: skip
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
def round_kernel(
    z, sums, largest, fractions, frame, out, length, dim, num_words, means_at, steps_at,
    TILE: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, BF16: tl.constexpr, TILES: tl.constexpr,
    BITS: tl.constexpr, MOST: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """A tile to its codes, with the frame's top, mean and steps, or to the values that these stand for.

    HOW `out` takes them: "values"; "words", where a token's codes fill whole words; else "codes", for
    `pack_kernel`.
    """
    row, tiles = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    rest, mean, where, there = _rest(z, sums, row, length, dim, TILE, GROUPS, PARTS, BF16)
    tile = tl.arange(0, TILES)
    peak = tl.max(tl.load(largest + row * tiles + tile, mask=tile < tiles, other=0), 0)
    top = peak.to(tl.float32, bitcast=True) * (1.0 / MOST)
    bits = tl.max(tl.max(tl.abs(rest).to(tl.int32, bitcast=True), 2), 1)  # (TILE,)
    needed = bits.to(tl.float32, bitcast=True) * (1.0 / MOST)
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
    if HOW == "values":
        value = code * step
        if PARTS:
            value += mean
        _store(out, where, value, there, BF16)
    else:
        token, group = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, GROUPS)
        tl.store(frame + steps_at + row * length + token, steps.to(tl.uint8), mask=token < length)
        if tl.program_id(1) == 0:
            tl.store(frame.to(tl.pointer_type(tl.float32)) + row, top)
            if PARTS:
                means = (frame + means_at).to(tl.pointer_type(tl.uint16))
                at = group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
                tl.store(means + row * dim + at, _to_bf16(mean), mask=at < dim)
        if HOW == "codes":
            tl.store(out + where, (code + MOST).to(tl.uint8), mask=there)
        else:
            at = row * num_words + token[:, None] * (dim // 8) + group[None, :]
            whole = (token[:, None] < length) & (group[None, :] < dim // 8)
            _store_words(out, at, (code + MOST).to(tl.int64), whole, BITS)


@triton.jit
def pack_kernel(codes, out, number, num_words, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """A sequence's codes, a byte each, to words."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    code = tl.load(codes + row * number + at, mask=at < number, other=0).to(tl.int64)
    _store_words(out, row * num_words + word, code, word < num_words, BITS)


@triton.jit
def decode_kernel(
    data, fractions, out, sound, length, dim, num_words, limit, means_at, steps_at, codes_at,
    BLOCK: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr, CENTRED: tl.constexpr, WHOLE: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """The values of some words, and whether all that they are made of can have been sent; what cannot is read
    as zero. WHOLE: no word has codes of two tokens."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    code = _load_words(data + codes_at, row * num_words + word, word < num_words, BITS)
    lane = tl.arange(0, 8)[None, :]
    at = word[:, None] * 8 + lane
    if WHOLE:
        token = word[:, None] // (dim // 8)
        within = (word[:, None] - token * (dim // 8)) * 8 + lane
    else:
        token = at // dim
        within = at - token * dim
    there = at < length * dim
    odd = code > tl.where(there, 2 * MOST, 0)
    top = tl.load(data.to(tl.pointer_type(tl.float32)) + row)
    small = (top >= 0) & (top <= limit)
    steps = tl.load(data + steps_at + row * length + token, mask=token < length, other=0)
    step = tl.where(small, top, 0.0) * tl.load(fractions + steps.to(tl.int32))
    value = tl.where(odd, 0.0, code.to(tl.float32) - MOST) * step
    if CENTRED:
        means = (data + means_at).to(tl.pointer_type(tl.uint16))
        mean = _from_bf16(tl.load(means + row * dim + within, mask=there, other=0))
        far = (tl.abs(mean) <= limit) == 0  # nan too
        value += tl.where(far, 0.0, mean)
        odd = odd | far
    found = tl.max(tl.max(odd.to(tl.int32), 1), 0)
    tl.store(sound + row * tl.num_programs(1) + tl.program_id(1), (found == 0) & small)
    _store(out, row * length * dim + at, value, there, BF16)
