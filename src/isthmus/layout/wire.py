"""What a stage link carries a stream as, and the bytes of it. Standard library only."""

FLOAT_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
INT_BITS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}

GROUP = 8  # a sequence's codes are packed by eights, which fill whole bytes
MEAN_BYTES, TOP_BYTES, STEP_BYTES = 2, 4, 1


def frame_sizes(bits: int, rows: int, length: int, dim: int, centred: bool) -> tuple[int, int, int, int]:
    """Bytes of a frame's parts, in their order: the sequences' tops, means, steps and codes."""
    codes = -(-length * dim // GROUP) * bits
    each = (TOP_BYTES, dim * MEAN_BYTES if centred else 0, length * STEP_BYTES, codes)
    return rows * each[0], rows * each[1], rows * each[2], rows * each[3]


def stream_bytes(wire: str, rows: int, length: int, dim: int, centred: bool) -> int:
    """Of a stream (rows, length, dim) on a wire, exactly as `subspace.wire` packs it.

    A wire of few bits sends each value as a code, and beside the codes of each token its step; for each
    sequence the largest step, and its mean where the stream is `centred`: forward, not back.
    """
    if wire in FLOAT_BYTES:
        return rows * length * dim * FLOAT_BYTES[wire]
    return sum(frame_sizes(INT_BITS[wire], rows, length, dim, centred))
