"""AdamW with clipping as Triton kernels, for stacks of replicas on a GPU; `inner` has the plain form.

Each number is read once and written once: the gradient is scaled where it is used, and the bf16 copy of a
weight that the next forward reads is written with the weight itself.
"""

import triton
import triton.language as tl


@triton.jit
def squares_kernel(pointers, tensor, first, size, out, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """The sum of squares of one block of one gradient."""
    block = tl.program_id(0)
    which = tl.load(tensor + block).to(tl.int64)
    at = tl.load(first + block) + tl.arange(0, BLOCK)
    there = at < tl.load(size + block)
    start = tl.load(pointers + which)
    if HALF:
        grad = tl.load(start.to(tl.pointer_type(tl.bfloat16)) + at, mask=there, other=0.0).to(tl.float32)
    else:
        grad = tl.load(start.to(tl.pointer_type(tl.float32)) + at, mask=there, other=0.0)
    tl.store(out + block, tl.sum(grad * grad, 0))


@triton.jit
def gather_kernel(parts, begin, out, WIDTH: tl.constexpr):
    """The sum of a run of parts, in an order that its length alone decides."""
    row = tl.program_id(0)
    start, stop = tl.load(begin + row), tl.load(begin + row + 1)
    total = tl.zeros((WIDTH,), tl.float32)
    for at in range(start, stop, WIDTH):
        place = at + tl.arange(0, WIDTH)
        total += tl.load(parts + place, mask=place < stop, other=0.0)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit
def adamw_kernel(
    pointers, tensor, first, size, scale_at, scales, lr, decay, beta1, beta2, eps, unbias1, unbias2,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One AdamW update of one block: weight, moments, gradient and, if HALF, the weight's bf16 copy."""
    block = tl.program_id(0)
    which = tl.load(tensor + block).to(tl.int64)
    at = tl.load(first + block) + tl.arange(0, BLOCK)
    there = at < tl.load(size + block)
    weights = tl.load(pointers + 5 * which).to(tl.pointer_type(tl.float32)) + at
    firsts = tl.load(pointers + 5 * which + 1).to(tl.pointer_type(tl.float32)) + at
    seconds = tl.load(pointers + 5 * which + 2).to(tl.pointer_type(tl.float32)) + at
    start = tl.load(pointers + 5 * which + 3)
    if HALF:
        grad = tl.load(start.to(tl.pointer_type(tl.bfloat16)) + at, mask=there, other=0.0).to(tl.float32)
    else:
        grad = tl.load(start.to(tl.pointer_type(tl.float32)) + at, mask=there, other=0.0)
    grad *= tl.load(scales + tl.load(scale_at + block))
    weight = tl.load(weights, mask=there, other=0.0) * (1 - lr * decay)
    moment = tl.load(firsts, mask=there, other=0.0)
    moment += (grad - moment) * (1 - beta1)
    second = tl.load(seconds, mask=there, other=0.0) * beta2 + grad * grad * (1 - beta2)
    weight -= lr * unbias1 * moment / (tl.sqrt(second) * unbias2 + eps)
    tl.store(weights, weight, mask=there)
    tl.store(firsts, moment, mask=there)
    tl.store(seconds, second, mask=there)
    if HALF:
        copy = tl.load(pointers + 5 * which + 4).to(tl.pointer_type(tl.bfloat16)) + at
        tl.store(copy, weight.to(tl.bfloat16), mask=there)
