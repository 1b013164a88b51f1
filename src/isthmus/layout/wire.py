"""How a stage link encodes a stream, and its bytes. Standard library only."""

FLOAT_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
INT_BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}

VERSION = 2  # of the few-bit wires; version 1 used a sequence's mean and largest step, and was not causal
GROUP = 8  # a sequence's codes are packed in groups of eight, which fill whole bytes
STEP_BYTES = 1


def frame_sizes(bits: int, rows: int, length: int, dim: int) -> tuple[int, int]:
    """Return the bytes of a frame's two parts, in order: the tokens' steps, and their codes."""
    return rows * length * STEP_BYTES, rows * -(-length * dim // GROUP) * bits


def stream_bytes(wire: str, rows: int, length: int, dim: int) -> int:
    """Return the bytes of a stream (rows, length, dim) on a wire, exactly as `subspace.wire` packs it."""
    if wire in FLOAT_BYTES:
        return rows * length * dim * FLOAT_BYTES[wire]
    return sum(frame_sizes(INT_BITS[wire], rows, length, dim))
