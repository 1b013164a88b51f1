"""What a stage link does to a stream in both directions: it rounds it to the wire's type, or to a few bits.

A wire of few bits sends for each token a step and one code a dimension, symmetric and uniform: the step is
the token's largest magnitude over the largest code. Forward, the sequence's mean of each dimension is taken
off first and sent beside: the stream has dimensions that are far from zero in every token. Everything is for
one sequence, so micro-batches do not change it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.layout.wire import GROUP, INT_BITS, frame_sizes, stream_bytes

FLOAT_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
LARGEST = 1e30  # no stream comes near it, and nothing below it overflows
STEPS_PER_OCTAVE = 8  # a token's step is the sequence's largest, divided by a power of 2^(1/8)


def largest_code(bits: int) -> int:
    return 2 ** (bits - 1) - 1


@dataclass(frozen=True, slots=True)
class Rounded:
    """A stream (..., L, K) as a wire of few bits carries it."""

    bits: int
    codes: Tensor  # (..., L, K) uint8, from 0 to twice the largest code
    steps: Tensor  # (..., L) uint8, in eighths of an octave below the top
    top: Tensor  # (...) float32, the largest step of the sequence
    mean: Tensor | None  # (..., K) bf16, of the sequence, where it was taken off

    def values(self, dtype: torch.dtype) -> Tensor:
        work = torch.float64 if dtype == torch.float64 else torch.float32
        step = self.top[..., None].to(work) * fractions(self.top.device)[self.steps.int()].to(work)
        values = (self.codes.to(work) - largest_code(self.bits)) * step[..., None]
        return (values if self.mean is None else values + self.mean[..., None, :].to(work)).to(dtype)


def _fractions(device: torch.device) -> Tensor:
    at = torch.device("cpu") if device.type in gpu.NO_DOUBLE else device
    powers = torch.arange(256, dtype=torch.float64, device=at) / -STEPS_PER_OCTAVE
    return torch.exp2(powers).float().to(device)


_kept_fractions = lru_cache(maxsize=8)(_fractions)


def fractions(device: torch.device) -> Tensor:
    """(256,) of the top, descending: what a step says. None of them is near the middle between two numbers of
    float32, so every device has the same bits."""
    return _fractions(device) if torch.compiler.is_compiling() else _kept_fractions(device)


def _mean(z: Tensor) -> Tensor:
    """Over a sequence's tokens, summed in float64: its order hardly ever shows."""
    if z.device.type in gpu.NO_DOUBLE:
        return gpu.in_double(lambda wide: wide.sum(-2) * (1 / z.shape[-2]), z)
    return (z.sum(-2, dtype=torch.float64) * (1 / z.shape[-2])).float()


def rounded(z: Tensor, bits: int, centred: bool) -> Rounded:
    """z (..., L, K) to codes of so many bits, to nearest."""
    most = largest_code(bits)
    x = z if z.dtype == torch.float64 else z.float()
    mean = _mean(z).bfloat16() if centred else None
    rest = x if mean is None else x - mean[..., None, :].to(x.dtype)
    needed = rest.abs().amax(-1) * (
        1 / most
    )  # (..., L); on a GPU torch divides by a number so, elsewhere not
    top = needed.amax(-1).float()
    share = (needed / top[..., None].to(x.dtype)).nan_to_num(1.0)  # nan where all is 0
    # The last fraction that is not below the share: a smaller step would cut off the largest value.
    told = fractions(z.device)
    steps = (torch.bucketize(-share, -told.to(x.dtype), right=True) - 1).clamp(0, 255).to(torch.uint8)
    step = top[..., None].to(x.dtype) * told[steps.int()].to(x.dtype)
    codes = (rest / step[..., None]).nan_to_num(0.0).round().clamp(-most, most) + most
    return Rounded(bits, codes.to(torch.uint8), steps, top, mean)


def carried(z: Tensor, bits: int, centred: bool) -> Tensor:
    """z (..., L, K) as the other side of a link reads it."""
    kernels = _kernels(z.device, z.shape, z.dtype)
    if kernels:
        return kernels.carried(z, bits, centred, fractions(z.device))
    return rounded(z, bits, centred).values(z.dtype)


def _kernels(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """`wire_launch`, where a GPU can run it; a compiler makes kernels of its own from the plain form."""
    if torch.compiler.is_compiling() or not gpu.usable(device):
        return None
    from isthmus.subspace import wire_launch

    return wire_launch if wire_launch.fits(shape, dtype) else None


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 (..., N), each below 2^bits -> uint8 (..., ceil(N / 8) * bits): eight codes in `bits` bytes."""
    if bits == 8 and codes.shape[-1] % GROUP == 0:
        return codes
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    shifts = torch.arange(GROUP, device=codes.device) * bits
    words = (padded.long() << shifts).sum(-1)  # eight times eight bits fill an int64
    return words.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)


def unpack_codes(data: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`, with the zeros that it fills the last bytes with."""
    if bits == 8:
        return data
    groups = torch.nn.functional.pad(data.unflatten(-1, (-1, bits)), (0, 8 - bits)).contiguous()
    shifts = torch.arange(GROUP, device=data.device) * bits
    codes = (groups.view(torch.int64) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)


class FloatWire:
    """Numbers of the wire's type."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, FLOAT_TYPES[name]

    def spec(self, shape: tuple[int, int, int], centred: bool) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of the tensor that crosses for a stream (B, L, K)."""
        return shape, self.dtype

    def encode(self, z: Tensor, centred: bool) -> Tensor:
        return z.to(self.dtype)

    def decode(
        self, data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, centred: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The stream, and whether the frame is sound, where that can be told apart from bad training."""
        return data.to(dtype), None

    def carry(self, z: Tensor) -> Tensor:
        # A wire of higher precision than the stream changes nothing.
        return as_on_wire(z, self.dtype) if self.dtype.itemsize < z.dtype.itemsize else z


class IntWire:
    """Codes of a few bits, packed: the sequences' tops, means, steps and codes, one after the other.

    The codes of a sequence are packed as one run, whatever K is; zeros fill its last byte.
    """

    def __init__(self, name: str) -> None:
        self.name, self.bits = name, INT_BITS[name]

    def spec(self, shape: tuple[int, int, int], centred: bool) -> tuple[tuple[int, ...], torch.dtype]:
        return (stream_bytes(self.name, *shape, centred),), torch.uint8

    def encode(self, z: Tensor, centred: bool) -> Tensor:
        z = z.detach()
        kernels = _kernels(z.device, z.shape, z.dtype)
        if kernels:
            return kernels.encode(z, self.bits, centred, fractions(z.device))
        sent = rounded(z, self.bits, centred)
        parts = [sent.top, sent.mean, sent.steps, pack_codes(sent.codes.flatten(-2), self.bits)]
        return torch.cat([p.contiguous().flatten().view(torch.uint8) for p in parts if p is not None])

    def decode(
        self, data: Tensor, shape: tuple[int, int, int], dtype: torch.dtype, centred: bool
    ) -> tuple[Tensor, Tensor]:
        """The stream, and whether we could have sent this frame: then all of the second tensor is true. It is
        on the device, and nothing waits for it.

        What we could not have sent is read as zero: whoever computes with it must not be blamed.
        """
        kernels = _kernels(data.device, shape, dtype)
        if kernels:
            return kernels.decode(data, shape, dtype, self.bits, centred, fractions(data.device), LARGEST)
        rows, length, dim = shape
        most = largest_code(self.bits)
        tops, means, steps, packed = data.split(frame_sizes(self.bits, *shape, centred))
        codes, filling = unpack_codes(packed.view(rows, -1), self.bits).tensor_split([length * dim], 1)
        known = codes <= 2 * most
        top, small = _checked(tops.clone().view(torch.float32), 0.0)
        sound, mean = known.all() & small.all() & (filling == 0).all(), None
        if centred:
            mean, near = _checked(means.clone().view(torch.bfloat16).view(rows, dim), -LARGEST)
            sound &= near.all()
        codes = torch.where(known, codes, most).reshape(shape)
        return Rounded(self.bits, codes, steps.view(rows, length), top, mean).values(dtype), sound

    def carry(self, z: Tensor) -> Tensor:
        return _Carried.apply(z, self.bits)


def _checked(x: Tensor, least: float) -> tuple[Tensor, Tensor]:
    fine = (x >= least) & (x <= LARGEST)  # nan is not
    return torch.where(fine, x, 0), fine


Wire = FloatWire | IntWire


def wire_of(name: str) -> Wire:
    return IntWire(name) if name in INT_BITS else FloatWire(name)


class LocalLink:
    """A stage link inside one process: it rounds as a real link does."""

    def __init__(self, wire: str) -> None:
        self.wire = wire_of(wire)

    def carry(self, z: Tensor) -> Tensor:
        return self.wire.carry(z)


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
    def forward(ctx: Any, z: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return carried(z, bits, centred=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return carried(grad, ctx.bits, centred=False), None


def as_on_wire(z: Tensor, dtype: torch.dtype) -> Tensor:
    """z as the next stage reads it, and its gradient as this stage does: both rounded to the wire's type."""
    return z if z.dtype == dtype else _Cast.apply(z, dtype)
