"""The inner loops of eq. 2 as Triton kernels, started by `launch`.

The plain torch form (topk, quantize, bits, outer.aggregate) is the reference in their tests. One chunk of up
to 64 x 64 entries stays in the registers of one program, so that anchor, parameters and feedback are read
once and the feedback is written once. Kernels run with fused multiply-add off: decoded values and sums must
be the same on every device.
"""

import triton
import triton.language as tl


@triton.jit
def select_kernel(
    pointers, owner, origin, cols, index_out, values_out, odd, decay, scale,
    KEEP: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    SUBTRACT: tl.constexpr,
):  # fmt: skip
    """e <- decay e + scale (anchor - params), and its KEEP largest magnitudes of one chunk (eq. 2).

    The KEEP-th largest is found by bisection on the bits of |e|, which order as the numbers do. It starts
    within three octaves of the largest, which nearly always contain it, and ends when KEEP entries are above.
    With SUBTRACT, what is sent as fp32 or bf16 (KIND) leaves the feedback at once.
    """
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(owner + chunk).to(tl.int64)
    start = tl.load(origin + chunk)
    anchor = tl.load(pointers + 3 * tensor).to(tl.pointer_type(tl.float32)) + start
    params = tl.load(pointers + 3 * tensor + 1).to(tl.pointer_type(tl.float32)) + start
    feedback = tl.load(pointers + 3 * tensor + 2).to(tl.pointer_type(tl.float32)) + start
    position = tl.arange(0, HEIGHT * WIDTH)
    row_size = tl.load(cols + tensor).to(tl.int32)  # 64 rows stay below 2^31
    at = (position // WIDTH) * row_size + position % WIDTH
    carried = tl.load(feedback + at) * decay + (tl.load(anchor + at) - tl.load(params + at)) * scale
    key = tl.abs(carried).to(tl.int32, bitcast=True)
    top = tl.max(key, 0)
    if top >= 0x7F800000:  # infinity or NaN
        tl.atomic_or(odd, 1)
    low = tl.maximum(top - 3 * 0x800000, 0)  # at least KEEP entries are >= low, fewer are >= high
    low = tl.where(tl.sum((key >= low).to(tl.int32), 0) >= KEEP, low, 0)
    high = top + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        above = tl.sum((key >= middle).to(tl.int32), 0)
        high = tl.where(above >= KEEP, high, middle)
        high = tl.where(above == KEEP, middle + 1, high)
        low = tl.where(above >= KEEP, middle, low)
    # Among entries equal to the last one kept, take the first: one running count of both in 2 x 16 bits.
    larger = (key > low).to(tl.int32)
    equal = (key == low).to(tl.int32)
    wanted = KEEP - tl.sum(larger, 0)
    running = tl.cumsum(larger + (equal << 16), 0)
    kept = (larger == 1) | ((equal == 1) & ((running >> 16) <= wanted))
    rank = (running & 0xFFFF) + tl.minimum(running >> 16, wanted) - 1
    if KIND == "bf16":  # values beyond its range are sent as its largest
        sent = tl.minimum(tl.maximum(carried, -3.3895313892515355e38), 3.3895313892515355e38)
        sent = sent.to(tl.bfloat16).to(tl.float32)
    else:
        sent = carried
    tl.store(index_out + chunk * KEEP + rank, position.to(tl.int16), mask=kept)
    tl.store(values_out + chunk * KEEP + rank, sent, mask=kept)
    if KIND == "2bit" or not SUBTRACT:  # 2bit values are rounded later, when the levels are known
        tl.store(feedback + at, carried)
    else:
        tl.store(feedback + at, tl.where(kept, carried - sent, carried))


@triton.jit
def levels_kernel(
    values, low_out, high_out, zeros_out, num_chunks,
    KEEP: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """`quantize.two_levels` of chunks' values in any order: it tries each as the last above the cut."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, POW2)
    there = (chunk < num_chunks)[:, None] & (j < KEEP)[None, :]
    at = chunk.to(tl.int64)[:, None] * KEEP + j[None, :]
    size = tl.where(there, tl.abs(tl.load(values + at, mask=there, other=0.0)), -1.0)  # (B, J)
    peak = tl.max(size, 1)
    safe = tl.where(peak > 0, peak, 1.0)
    unit = tl.where(there, tl.div_rn(size, tl.broadcast_to(safe[:, None], size.shape)), 0.0)
    total = tl.sum(unit, 1)
    above = size[:, None, :] >= size[:, :, None]  # (B, cut, J)
    above = above & there[:, None, :]
    number = tl.sum(above.to(tl.float32), 2)  # (B, cut)
    upper = tl.sum(tl.where(above, unit[:, None, :], 0.0), 2)
    lower = tl.maximum(total[:, None] - upper, 0.0)
    rest = KEEP - number
    lower = tl.where(rest > 0, lower, 0.0)
    mean_high = upper / tl.maximum(number, 1.0)
    mean_low = tl.where(rest > 0, lower / tl.maximum(rest, 1.0), mean_high)
    score = upper * mean_high + lower * tl.where(rest > 0, mean_low, 0.0)
    score = tl.where(there & (score == score), score, -1.0)  # NaN, refused later, must not win
    chosen = j[None, :] == tl.argmax(score, 1)[:, None]
    high = tl.sum(tl.where(chosen, mean_high, 0.0), 1)
    low = tl.sum(tl.where(chosen, mean_low, 0.0), 1)
    low = tl.minimum(tl.maximum(low, high * RATIO), high)
    least = tl.min(tl.where(there, size, float("inf")), 1)
    zeros = (least == 0) & (peak > 0)
    single = total / tl.maximum(tl.sum((unit > 0).to(tl.float32), 1), 1.0)
    mine = chunk < num_chunks
    tl.store(low_out + chunk, tl.where(zeros, single, low) * peak, mask=mine)
    tl.store(high_out + chunk, tl.where(zeros, single, high) * peak, mask=mine)
    tl.store(zeros_out + chunk, zeros.to(tl.int8), mask=mine)


@triton.jit
def many_levels_kernel(
    values, low_out, high_out, zeros_out,
    KEEP: tl.constexpr, POW2: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """`levels_kernel` for one chunk of more values, sorted: the sums above all cuts are running sums."""
    chunk = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, POW2)
    there = j < KEEP
    size = tl.where(there, tl.abs(tl.load(values + chunk * KEEP + j, mask=there, other=0.0)), -1.0)
    size = tl.sort(size, descending=True)  # missing values come last
    peak = tl.max(size, 0)
    safe = tl.where(peak > 0, peak, 1.0)
    unit = tl.where(there, tl.div_rn(size, tl.zeros((POW2,), tl.float32) + safe), 0.0)
    total = tl.sum(unit, 0)
    upper = tl.cumsum(unit, 0)
    number = (j + 1).to(tl.float32)
    rest = KEEP - number
    lower = tl.where(rest > 0, tl.maximum(total - upper, 0.0), 0.0)
    mean_high = upper / number
    mean_low = tl.where(rest > 0, lower / tl.maximum(rest, 1.0), mean_high)
    score = upper * mean_high + lower * tl.where(rest > 0, mean_low, 0.0)
    score = tl.where(there & (score == score), score, -1.0)  # NaN, refused later, must not win
    chosen = j == tl.argmax(score, 0)
    high = tl.sum(tl.where(chosen, mean_high, 0.0), 0)
    low = tl.sum(tl.where(chosen, mean_low, 0.0), 0)
    low = tl.minimum(tl.maximum(low, high * RATIO), high)
    nonzero = tl.sum((unit > 0).to(tl.float32), 0)
    zeros = (nonzero < KEEP) & (peak > 0)
    single = total / tl.maximum(nonzero, 1.0)
    tl.store(low_out + chunk, tl.where(zeros, single, low) * peak)
    tl.store(high_out + chunk, tl.where(zeros, single, high) * peak)
    tl.store(zeros_out + chunk, zeros.to(tl.int8))


@triton.jit
def round_kernel(
    pointers, owner, origin, cols, index, values, scale, low, high, num_chunks,
    KEEP: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """Round every kept value to its chunk's low or high level as decoded; with SUBTRACT it leaves the
    feedback."""
    chunk = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mine = chunk < num_chunks
    j = tl.arange(0, POW2)
    there = mine[:, None] & (j < KEEP)[None, :]
    at = chunk[:, None] * KEEP + j[None, :]
    value = tl.load(values + at, mask=there, other=0.0)
    low_level = tl.load(low + chunk, mask=mine, other=0.0)[:, None]
    high_level = tl.load(high + chunk, mask=mine, other=0.0)[:, None]
    zeros = ((tl.load(scale + chunk, mask=mine, other=0) & 63) == 63)[:, None]
    size = tl.abs(value)
    large = (size - low_level > high_level - size) | ((size > 0) & zeros)
    level = tl.where(large, high_level, low_level)
    sent = tl.where(value.to(tl.int32, bitcast=True) < 0, -level, level)
    tl.store(values + at, sent, mask=there)
    if SUBTRACT:
        tensor = tl.load(owner + chunk, mask=mine, other=0).to(tl.int64)
        feedback = tl.load(pointers + 3 * tensor + 2, mask=mine, other=0).to(tl.pointer_type(tl.float32))
        position = tl.load(index + at, mask=there, other=0).to(tl.int64)
        step = tl.load(cols + tensor, mask=mine, other=0)[:, None]
        start = tl.load(origin + chunk, mask=mine, other=0)[:, None]
        slot = feedback[:, None] + (start + (position // WIDTH) * step + position % WIDTH)
        tl.store(slot, value - sent, mask=there)


@triton.jit
def write_bits_kernel(
    bits, index, values, low, num_chunks, width,
    MARKS: tl.constexpr, LOW: tl.constexpr, BITMAP: tl.constexpr, KEEP: tl.constexpr, POW2: tl.constexpr,
    BLOCK: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Write positions (`bits`), signs and magnitudes of chunks into zeroed `bits`, one byte per bit."""
    chunk = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    j = tl.arange(0, POW2)
    there = (chunk < num_chunks)[:, None] & (j < KEEP)[None, :]
    at = chunk[:, None] * KEEP + j[None, :]
    position = tl.load(index + at, mask=there, other=0).to(tl.int32)
    row = bits + chunk[:, None] * width
    one = tl.full((BLOCK, POW2), 1, tl.uint8)
    if BITMAP:
        tl.store(row + position, one, mask=there)
    else:
        # Two additions to the pointer. Triton 3.6 compiles `row + ((position >> LOW) + j)` wrongly for some
        # KEEP that are not a power of two: marks from the 64th on are written 64 places too early.
        tl.store(row + (position >> LOW) + j[None, :], one, mask=there)
    for bit in tl.static_range(LOW):
        tl.store(row + MARKS + bit * KEEP + j[None, :], ((position >> bit) & 1).to(tl.uint8), mask=there)
    if SIGNED:
        value = tl.load(values + at, mask=there, other=0.0)
        level = tl.load(low + chunk, mask=chunk < num_chunks, other=0.0)[:, None]
        signs = row + MARKS + LOW * KEEP + j[None, :]
        tl.store(signs, (value.to(tl.int32, bitcast=True) < 0).to(tl.uint8), mask=there)
        tl.store(signs + KEEP, (tl.abs(value) > level).to(tl.uint8), mask=there)


@triton.jit
def _bit(row, at, WIDTH: tl.constexpr, there):
    """Bit `at` of a bit string of WIDTH bytes, whose bit b is in byte b mod WIDTH."""
    return (tl.load(row + at % WIDTH, mask=there, other=0).to(tl.int32) >> (at // WIDTH)) & 1


@triton.jit
def read_kernel(
    data, low, high, index_out, values_out, odd, num_chunks,
    WIDTH: tl.constexpr, MARKS: tl.constexpr, POW2: tl.constexpr, LOW: tl.constexpr, BITMAP: tl.constexpr,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Positions and, for 2bit, values of packed chunks; sets `odd` if a bit string is malformed."""
    chunk = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mine = chunk < num_chunks
    b = tl.arange(0, POW2)
    row = data + chunk[:, None] * WIDTH
    there = mine[:, None] & (b < MARKS)[None, :]
    mark = _bit(row, tl.broadcast_to(b[None, :], (BLOCK, POW2)), WIDTH, there)
    j = tl.cumsum(mark, 1) - 1
    number = tl.sum(mark, 1)
    bad = mine & (number != KEEP)
    for at in tl.static_range(MARKS + (LOW + 2 * SIGNED) * KEEP, 8 * WIDTH):  # padding bits are zero
        bad = bad | (_bit(data + chunk * WIDTH, at, WIDTH, mine) == 1)
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.atomic_or(odd, 1)
    kept = there & (mark == 1) & (j < KEEP)
    position = tl.broadcast_to(b[None, :], (BLOCK, POW2)) if BITMAP else (b[None, :] - j) << LOW
    for bit in tl.static_range(LOW):
        position += _bit(row, MARKS + bit * KEEP + j, WIDTH, kept) << bit
    out = chunk[:, None] * KEEP + j
    tl.store(index_out + out, position.to(tl.int16), mask=kept)
    if SIGNED:
        negative = _bit(row, MARKS + LOW * KEEP + j, WIDTH, kept)
        large = _bit(row, MARKS + (LOW + 1) * KEEP + j, WIDTH, kept)
        low_level = tl.load(low + chunk, mask=mine, other=0.0)[:, None]
        high_level = tl.load(high + chunk, mask=mine, other=0.0)[:, None]
        level = tl.where(large == 1, high_level, low_level)
        tl.store(values_out + out, tl.where(negative == 1, -level, level), mask=kept)


@triton.jit
def check_kernel(index, values, odd, size, entries, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """Set `odd` if a chunk's positions do not ascend below `entries`, or a value is not finite."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    position = tl.load(index + at, mask=there, other=0)
    before = tl.load(index + at - 1, mask=there & (at % KEEP != 0), other=-1)
    value = tl.load(values + at, mask=there, other=0.0)
    good = (position > before) & (position < entries) & (tl.abs(value) < float("inf"))
    if tl.max((there & (good == 0)).to(tl.int32), 0) > 0:
        tl.atomic_or(odd, 1)


@triton.jit
def add_kernel(
    total, count, origin, skip, index, values, num_chunks,
    KEEP: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """total[position] += value; count[position] += 1 if it is not zero. Positions do not repeat."""
    chunk = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mine = chunk < num_chunks
    j = tl.arange(0, POW2)
    there = mine[:, None] & (j < KEEP)[None, :]
    at = chunk[:, None] * KEEP + j[None, :]
    position = tl.load(index + at, mask=there, other=0).to(tl.int64)
    value = tl.load(values + at, mask=there, other=0.0)
    start = tl.load(origin + chunk, mask=mine, other=0)[:, None]
    step = tl.load(skip + chunk, mask=mine, other=0)[:, None]
    slot = start + position + (position // WIDTH) * step
    tl.store(total + slot, tl.load(total + slot, mask=there, other=0.0) + value, mask=there)
    if COUNTED:
        sent = there & (value != 0)
        tl.store(count + slot, tl.load(count + slot, mask=sent, other=0) + 1, mask=sent)


@triton.jit
def apply_kernel(
    pointers, owner, first, start, total, count, number, step_size,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """anchor -= step_size * (total / count), rounded three times; skips entries that nobody sent."""
    block = tl.program_id(0).to(tl.int64)
    tensor = tl.load(owner + block).to(tl.int64)
    anchor = tl.load(pointers + tensor).to(tl.pointer_type(tl.float32))
    begin = tl.load(start + tensor)
    at = tl.load(first + block) + tl.arange(0, BLOCK)
    there = at < tl.load(start + tensor + 1) - begin
    value = tl.load(total + begin + at, mask=there, other=0.0)
    if COUNTED:
        many = tl.maximum(tl.load(count + begin + at, mask=there, other=0), 1).to(tl.float32)
    else:
        many = tl.zeros((BLOCK,), tl.float32) + number
    update = tl.div_rn(value, many) * step_size
    moved = there & (value != 0)
    tl.store(anchor + at, tl.load(anchor + at, mask=moved, other=0.0) - update, mask=moved)


@triton.jit
def step_kernel(
    pointers, owner, origin, cols, anchors, num_replicas, number, step_size,
    KEEP: tl.constexpr, POW2: tl.constexpr, LOG: tl.constexpr, REPLICAS: tl.constexpr, WIDTH: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """anchor -= step_size * mean for one chunk, directly from the payloads of some replicas.

    `pointers` point to each replica's positions and values. Every entry looks up its position in the
    ascending positions of all replicas, in order, and adds what was sent there; the first entry at a position
    moves the anchor. It rounds as if the payloads were added one after another into an accumulator.
    """
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(owner + chunk).to(tl.int64)
    entry = tl.arange(0, REPLICAS * POW2)
    replica, j = entry // POW2, entry % POW2
    there = (replica < num_replicas) & (j < KEEP)
    index = tl.load(pointers + 2 * replica, mask=there, other=0).to(tl.pointer_type(tl.int16))
    position = tl.load(index + chunk * KEEP + j, mask=there, other=-1).to(tl.int32)  # (E,)
    total = tl.zeros((REPLICAS * POW2,), tl.float32)
    count = tl.zeros((REPLICAS * POW2,), tl.int32)
    for r in range(num_replicas):
        indices = tl.load(pointers + 2 * r).to(tl.pointer_type(tl.int16)) + chunk * KEEP
        values = tl.load(pointers + 2 * r + 1).to(tl.pointer_type(tl.float32)) + chunk * KEEP
        at = tl.zeros((REPLICAS * POW2,), tl.int32)  # index of the last entry up to the position
        for bit in tl.static_range(LOG):
            further = at + (POW2 >> (bit + 1))
            there_too = tl.load(indices + further, mask=further < KEEP, other=32767).to(tl.int32)
            at = tl.where(there_too <= position, further, at)
        found = tl.load(indices + at).to(tl.int32) == position
        value = tl.load(values + at, mask=found, other=0.0)
        total += value
        count += (value != 0).to(tl.int32)
        there = there & ((r >= replica) | (found == 0))
    if COUNTED:
        many = tl.maximum(count, 1).to(tl.float32)
    else:
        many = tl.zeros((REPLICAS * POW2,), tl.float32) + number
    update = tl.div_rn(total, many) * step_size
    start = tl.load(origin + chunk)
    anchor = tl.load(anchors + tensor).to(tl.pointer_type(tl.float32)) + start
    slot = anchor + (position // WIDTH) * tl.load(cols + tensor).to(tl.int32) + position % WIDTH
    there = there & (total != 0)
    tl.store(slot, tl.load(slot, mask=there, other=0.0) - update, mask=there)


@triton.jit
def crc_kernel(
    data, size, stride, table, inside, between, out,
    BYTES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add (xor) one block's share of the CRC-32 of a row of `data`, with register and result not inverted.

    A CRC is linear over GF(2) and leading zeros do not change it, so blocks are laid out from the end. Each
    lane's remainder is multiplied by x to the number of bits after it: `inside` its block, `between` blocks.
    """
    block = tl.program_id(0)
    data += tl.program_id(1).to(tl.int64) * stride
    out += tl.program_id(1)
    lane = tl.arange(0, LANES)
    first = size - (block + 1).to(tl.int64) * (BYTES * LANES) + lane.to(tl.int64) * BYTES
    crc = tl.zeros((LANES,), tl.uint32)
    for k in range(BYTES):
        byte = tl.load(data + first + k, mask=first + k >= 0, other=0).to(tl.uint32)
        crc = tl.load(table + ((crc ^ byte) & 255)).to(tl.uint32, bitcast=True) ^ (crc >> 8)
    crc = _times(crc, tl.load(inside + lane).to(tl.uint32, bitcast=True))
    crc = _times(crc, tl.load(between + block).to(tl.uint32, bitcast=True) + tl.zeros((LANES,), tl.uint32))
    tl.atomic_xor(out, tl.xor_sum(crc, 0).to(tl.int32, bitcast=True))


@triton.jit
def _times(a, b):
    """The product of two polynomials over GF(2) modulo CRC-32's, lowest bit = highest power."""
    product = a ^ a
    for i in tl.static_range(32):
        product ^= tl.where(((a >> (31 - i)) & 1) == 1, b, 0)
        b = (b >> 1) ^ tl.where((b & 1) == 1, 0xEDB88320, 0).to(tl.uint32)
    return product
