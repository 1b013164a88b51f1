"""CRC-32 as arithmetic on polynomials over GF(2), so that a device can checksum the bytes that it holds.

A polynomial is 32 bits, the lowest bit its highest power. `launch.crc_shares` computes the share that a body
adds to the checksum; `expected_share` computes what it must be.
"""

import zlib
from functools import lru_cache

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31  # the polynomial 1
INVERTED = 0xFFFFFFFF  # zlib inverts the register before the first byte and after the last


def times(a: int, b: int) -> int:
    """The product modulo the polynomial of CRC-32."""
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=256)
def shift(num_bytes: int) -> int:
    """x^(8 num_bytes): multiplying by it appends that many zero bytes."""
    power, result = 1 << 23, ONE  # x^8
    while num_bytes:
        if num_bytes & 1:
            result = times(result, power)
        power = times(power, power)
        num_bytes >>= 1
    return result


def byte_table() -> list[int]:
    """The remainder of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


def crc_of(before: bytes | memoryview, share: int, num_bytes: int) -> int:
    """zlib.crc32 of `before`, followed by `num_bytes` bytes with this share."""
    register = zlib.crc32(before) ^ INVERTED
    return times(register, shift(num_bytes)) ^ (share & 0xFFFFFFFF) ^ INVERTED


def expected_share(before: bytes | memoryview, crc: int, num_bytes: int) -> int:
    """The share of `num_bytes` bytes for which zlib.crc32 of `before` and these bytes is `crc`."""
    return crc_of(before, crc, num_bytes)  # an exclusive or: share and checksum are interchangeable
