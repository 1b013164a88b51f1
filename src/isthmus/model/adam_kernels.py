"""Triton kernels for stacks of replicas on a GPU: AdamW with clipping, and both ends of a Muon step; `inner`
and `muon` have the plain forms.

Each number is read and written once: the gradient is scaled on use, and the bf16 copy that the next forward
reads is written together with its weight.
"""

import triton
import triton.language as tl


@triton.jit
def squares_kernel(grads, each, out, width, BLOCK: tl.constexpr):
    """Write the sum of squares of one block of one replica's gradient to out (R, width)."""
    block, row = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grads + row.to(tl.int64) * each + at, mask=at < each, other=0.0).to(tl.float32)
    tl.store(out + row * width + block, tl.sum(grad * grad, 0))


@triton.jit
def sums_kernel(parts, starts, width, out, num_tensors, BLOCK: tl.constexpr):
    """Sum one tensor's blocks of one replica; the order depends only on their number."""
    tensor, row = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + tensor), tl.load(starts + tensor + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(parts + row * width + at, mask=at < stop, other=0.0)
    tl.store(out + row * num_tensors + tensor, tl.sum(total, 0))


@triton.jit
def adamw_kernel(
    weights, firsts, seconds, grads, copies, scales, each, width, now, decay, beta1, beta2, eps,
    BLOCK: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """Update one block of one replica's weight by AdamW; its gradient is multiplied by scales[row * width].

    `now` holds the values that change from step to step.
    """
    lr, unbias1, unbias2 = tl.load(now), tl.load(now + 1), tl.load(now + 2)
    row = tl.program_id(1)
    at = row.to(tl.int64) * each + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < each
    grad = tl.load(grads + at, mask=there, other=0.0).to(tl.float32) * tl.load(scales + row * width)
    weight = tl.load(weights + at, mask=there, other=0.0) * (1 - lr * decay)
    moment = tl.load(firsts + at, mask=there, other=0.0)
    moment += (grad - moment) * (1 - beta1)
    second = tl.load(seconds + at, mask=there, other=0.0) * beta2 + grad * grad * (1 - beta2)
    weight -= lr * unbias1 * moment / (tl.sqrt(second) * unbias2 + eps)
    tl.store(weights + at, weight, mask=there)
    tl.store(firsts + at, moment, mask=there)
    tl.store(seconds + at, second, mask=there)
    if COPIED:
        tl.store(copies + at, weight.to(tl.bfloat16), mask=there)


@triton.jit
def momentum_kernel(
    firsts, grads, updates, scales, each, width, momentum, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply Muon's Nesterov momentum to one block of one replica's matrix; write what to orthogonalise."""
    row = tl.program_id(1)
    at = row.to(tl.int64) * each + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < each
    grad = tl.load(grads + at, mask=there, other=0.0).to(tl.float32) * tl.load(scales + row * width)
    first = tl.load(firsts + at, mask=there, other=0.0)
    first += (grad - first) * (1 - momentum)
    tl.store(firsts + at, first, mask=there)
    tl.store(updates + at, (grad + (first - grad) * momentum).to(tl.bfloat16), mask=there)


@triton.jit
def move_kernel(
    weights, steps, copies, each, now, decay, factor, BLOCK: tl.constexpr, COPIED: tl.constexpr
):  # fmt: skip
    """weight <- (1 - lr decay) weight - lr factor step, for one block of one replica's matrix."""
    lr = tl.load(now)
    at = tl.program_id(1).to(tl.int64) * each + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < each
    weight = tl.load(weights + at, mask=there, other=0.0) * (1 - lr * decay)
    weight -= tl.load(steps + at, mask=there, other=0.0).to(tl.float32) * (lr * factor)
    tl.store(weights + at, weight, mask=there)
    if COPIED:
        tl.store(copies + at, weight.to(tl.bfloat16), mask=there)
