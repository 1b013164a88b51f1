"""A stage link's effect on a stream in both directions: it rounds it to the wire's type, or to a few bits.

A few-bit wire sends for each token a step and one code per dimension, symmetric and uniform: a value is a
whole number of its token's steps. The step depends on that token alone, so the wire is causal: no token's
values reveal a later one (docs/method.md, The boundary).

A step is one byte, a small float: five bits of exponent and three of mantissa, rounded up. Its bits are the
leading bits of a float32: no table, logarithm or order of a sum matters, and all devices agree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from isthmus.layout.wire import GROUP, INT_BITS, frame_sizes, stream_bytes
from isthmus.model.parts import allow_variants

FLOAT_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
Direction = Literal["forward", "back"]
# The exponent of the least step of each direction; steps reach 32 octaves up from there. The one for "back"
# is divided by the tokens of an inner step, since the gradient is that of their mean loss. With `nano`,
# tokens needed 2^-14 to 2^-2 forward, and 2^-13 to 2^1 back.
LEAST: dict[Direction, int] = {"forward": -22, "back": -24}
LARGEST, NOT_FINITE = 254, 255  # the largest step; the mark of a token that is not finite
SHIFT = 20  # the bits of a float32 that a step omits: 3 of 23 bits of mantissa stay


def largest_code(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _base(least: int) -> int:
    """The first bits of the float32 2^least."""
    return (127 + least) << 3


def step_of(at: Tensor, least: int) -> Tensor:
    """The steps (float32) of these bytes, from 2^least up; nan for a token that is not finite."""
    step = ((at.int() + _base(least)) << SHIFT).view(torch.float32)
    return torch.where(at == NOT_FINITE, torch.nan, step)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A stream (..., L, K) as a few-bit wire carries it."""

    codes: Tensor  # (..., L, K) in the precision of the work, from minus to plus the largest code
    at: Tensor  # (..., L) uint8, the tokens' steps as bytes
    step: Tensor  # (..., L, 1), the same as numbers
    outside: Tensor  # (..., L) bool: whether the token's step is outside the wire's range

    def values(self, dtype: torch.dtype) -> Tensor:
        return (self.codes * self.step).to(dtype)


def rounded(z: Tensor, bits: int, least: int) -> Rounded:
    """z (..., L, K) to codes of `bits` bits, to nearest.

    The step is the least one with which the token's largest value has a code. Zeros stay zero. A token above
    the wire's range is cut off at the largest code of the largest step; one below it is rounded to the least
    step. A token that is not finite becomes nan on the other side.
    """
    most = largest_code(bits)
    x = z if z.dtype == torch.float64 else z.float()
    peak = torch.linalg.vector_norm(x, torch.inf, dim=-1).float()  # (..., L)
    needed = (peak * (1 / most)).view(torch.int32)  # on a GPU torch divides by numbers like this
    at = ((needed + ((1 << SHIFT) - 1)) >> SHIFT) - _base(least)  # rounded up
    finite = peak.isfinite()
    outside = finite & ((at > LARGEST) | ((at < 0) & (peak > 0)))
    byte = torch.where(finite, at.clamp(0, LARGEST), NOT_FINITE).to(torch.uint8)
    step = step_of(byte, least).to(x.dtype).unsqueeze(-1)
    codes = (x / step).nan_to_num(0.0).round().clamp(-most, most)
    return Rounded(codes, byte, step, outside)


LANES = (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF)  # every other 1, 2, 4 bytes of a word


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 (..., N), each below 2^bits -> uint8 (..., ceil(N / 8) * bits): eight codes in `bits` bytes, the
    first in the lowest bits. Eight bytes are one int64, whose halves move together three times."""
    if short := -codes.shape[-1] % GROUP:
        codes = torch.nn.functional.pad(codes, (0, short))
    if bits == 8:
        return codes
    words = codes.view(torch.int64)
    for i, lane in enumerate(LANES):
        words = (words & lane) | (((words >> (8 << i)) & lane) << (bits << i))
    return words.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)


def unpack_codes(data: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`, including the padding zeros of the last bytes."""
    if bits == 8:
        return data
    words = torch.nn.functional.pad(data.unflatten(-1, (-1, bits)), (0, 8 - bits)).flatten(-2)
    words = words.view(torch.int64)
    for i in (2, 1, 0):
        lane = LANES[i] & (LANES[i] >> ((8 - bits) << i))
        words = (words & lane) | (((words >> (bits << i)) & lane) << (8 << i))
    return words.view(torch.uint8)


def encoded(z: Tensor, bits: int, least: int) -> tuple[Tensor, Tensor]:
    """z (B, L, K) as the frame to send, and how many of its tokens were outside the wire's range."""
    sent = rounded(z, bits, least)
    codes = (sent.codes + largest_code(bits)).to(torch.uint8)
    packed = pack_codes(codes.flatten(-2), bits)
    return torch.cat([sent.at.flatten(), packed.flatten()]), sent.outside.sum()


def decoded(
    data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, bits: int, least: int
) -> tuple[Tensor, Tensor]:
    """The stream of a frame, and whether a sound stage could have sent it. Invalid parts are read as zero, so
    that the reader does not get the blame for them."""
    rows, length, dim = shape
    most, work = largest_code(bits), torch.float64 if dtype == torch.float64 else torch.float32
    at, packed = data.split(frame_sizes(bits, *shape))
    codes, filling = unpack_codes(packed.view(rows, -1), bits).tensor_split([length * dim], 1)
    known = codes <= 2 * most
    sound = known.all() & (filling == 0).all() & (at != NOT_FINITE).all()
    signed = torch.where(known, codes, most).reshape(shape).to(work) - most
    step = step_of(at.view(rows, length, 1), least).nan_to_num(0.0)
    return (signed * step.to(work)).to(dtype), sound


def carried(z: Tensor, bits: int, least: int, outside: Tensor | None = None) -> Tensor:
    """z (..., L, K) as the other side of a link reads it. Adds to `outside` (B,) a count for each row of the
    leading axis."""
    sent = rounded(z, bits, least)
    if outside is not None:
        outside += sent.outside.flatten(1).sum(1)
    return sent.values(z.dtype)


class Functions(NamedTuple):
    encode: Callable[..., tuple[Tensor, Tensor]]
    decode: Callable[..., tuple[Tensor, Tensor]]
    carry: Callable[..., Tensor]


@lru_cache(maxsize=2)
def functions(compiled: bool) -> Functions:
    """The functions of a few-bit wire: plain torch, or a few kernels from torch.compile."""
    if not compiled:
        return Functions(encoded, decoded, carried)
    allow_variants()
    made = partial(torch.compile, dynamic=False)
    return Functions(made(encoded), made(decoded), made(carried))


class FloatWire:
    """Sends numbers in the wire's type."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, FLOAT_TYPES[name]

    def spec(self, shape: tuple[int, int, int]) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of the frame for a stream (B, L, K)."""
        return shape, self.dtype

    def encode(self, z: Tensor, direction: Direction) -> tuple[Tensor, Tensor | None]:
        """The frame, and how many tokens were outside the wire's range; None if it has no relevant range."""
        return z.to(self.dtype), None

    def decode(
        self, data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, direction: Direction
    ) -> tuple[Tensor, Tensor | None]:
        """The stream, and whether the frame is sound; None if bad training could cause the same."""
        return data.to(dtype), None

    def carry(self, z: Tensor, outside: Tensor | None = None) -> Tensor:
        # A wire of higher precision than the stream changes nothing.
        return as_on_wire(z, self.dtype) if self.dtype.itemsize < z.dtype.itemsize else z


class IntWire:
    """Sends packed few-bit codes: the steps of all tokens, then their codes.

    The codes of a sequence are packed as one run, whatever K is; zeros fill its last byte.
    """

    def __init__(self, name: str, num_tokens: int = 1, compiled: bool = False) -> None:
        """`num_tokens`: the tokens of an inner step; gradients are those of their mean loss."""
        self.name, self.bits, self.work = name, INT_BITS[name], functions(compiled)
        self.least = LEAST | {"back": LEAST["back"] - (num_tokens - 1).bit_length()}

    def spec(self, shape: tuple[int, int, int]) -> tuple[tuple[int, ...], torch.dtype]:
        return (stream_bytes(self.name, *shape),), torch.uint8

    def encode(self, z: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
        """The frame, and how many tokens were outside the wire's range; both still on the device."""
        return self.work.encode(z.detach(), self.bits, self.least[direction])

    def decode(
        self, data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """The stream, and whether a sound stage could have sent this frame. The second tensor is on the
        device; this does not wait for it."""
        return self.work.decode(data, shape, dtype, self.bits, self.least[direction])

    def carry(self, z: Tensor, outside: Tensor | None = None) -> Tensor:
        return _Carried.apply(z, self, outside)


Wire = FloatWire | IntWire


def wire_of(name: str, num_tokens: int = 1, compiled: bool = False) -> Wire:
    return IntWire(name, num_tokens, compiled) if name in INT_BITS else FloatWire(name)


class LocalLink:
    """A stage link inside one process: it rounds as a real link does.

    `outside` (B,) counts the tokens outside the wire's range, for each row of the leading axis.
    """

    def __init__(
        self, wire: str, num_tokens: int = 1, outside: Tensor | None = None, compiled: bool = False
    ) -> None:
        self.wire, self.outside = wire_of(wire, num_tokens, compiled), outside

    def carry(self, z: Tensor) -> Tensor:
        return self.wire.carry(z, self.outside)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return z.to(dtype).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, wire: IntWire, outside: Tensor | None) -> Tensor:
        ctx.wire, ctx.outside = wire, outside
        return wire.work.carry(z, wire.bits, wire.least["forward"], outside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        wire = ctx.wire
        return wire.work.carry(grad, wire.bits, wire.least["back"], ctx.outside), None, None


def as_on_wire(z: Tensor, dtype: torch.dtype) -> Tensor:
    """z as the next stage reads it, and its gradient as this stage does: both rounded to the wire's type."""
    return z if z.dtype == dtype else _Cast.apply(z, dtype)
