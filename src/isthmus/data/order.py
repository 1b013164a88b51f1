"""A shuffled order without a table: any position is computed, so there is nothing to store or resume."""

import hashlib
import math

import numpy as np

NUM_ROUNDS = 8


class Permutation:
    """A pseudo-random bijection of range(size), keyed by (seed, number of the pass).

    A Feistel network on pairs (left, right) with left < columns and right < rows. Each round shifts one half
    by a hash of the other. That can be undone, so pairs map one to one. columns * rows slightly exceeds
    `size`; an image outside goes through again until it falls inside (cycle walking), still one to one.
    """

    def __init__(self, size: int, seed: int, pass_number: int) -> None:
        self.size = size
        self.columns = math.isqrt(size - 1) + 1
        self.rows = -(-size // self.columns)
        digest = hashlib.blake2b(f"{seed}/{pass_number}".encode(), digest_size=8 * NUM_ROUNDS).digest()
        self.keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        image = self._once(index.astype(np.uint64))
        while (outside := image >= self.size).any():
            image[outside] = self._once(image[outside])
        return image.astype(np.int64)

    def _once(self, index: np.ndarray) -> np.ndarray:
        columns, rows = np.uint64(self.columns), np.uint64(self.rows)
        right, left = np.divmod(index, columns)
        for number, key in enumerate(self.keys):
            if number % 2:
                left = (left + mix(right ^ key) % columns) % columns
            else:
                right = (right + mix(left ^ key) % rows) % rows
        return right * columns + left


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64 bits: multiply by odd constants, fold the high half onto the low one; overflow wraps."""
    for multiplier in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        x = x * np.uint64(multiplier)
        x = x ^ (x >> np.uint64(32))
    return x
