"""Frames of a few-bit wire from a neighbour that is broken or hostile: every part of them, changed."""

import math

import pytest
import torch

from isthmus.layout.wire import INT_BITS, frame_sizes
from isthmus.subspace.wire import LARGEST, IntWire, largest_code

SHAPE = (2, 5, 13)  # 65 codes a sequence: its last byte is filled up
PARTS = ("tops", "means", "steps", "codes")
every_wire = pytest.mark.parametrize("wire", INT_BITS)
both_ways = pytest.mark.parametrize("centred", [True, False])


def frame(wire, centred, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(SHAPE, generator=generator) * torch.exp(torch.randn(*SHAPE[:2], 1, generator=generator))
    return IntWire(wire).encode(z, centred)


def split(wire, data, centred):
    return dict(zip(PARTS, data.split(frame_sizes(INT_BITS[wire], *SHAPE, centred)), strict=True))


def read(wire, data, centred, dtype=torch.float32):
    values, sound = IntWire(wire).decode(data, SHAPE, dtype, centred)
    return values, bool(sound.all())


def plainly_sound(wire, data, centred):
    """Whether a frame could have been sent, value by value."""
    bits, parts = INT_BITS[wire], split(wire, data, centred)
    tops = parts["tops"].clone().view(torch.float32).tolist()
    means = parts["means"].clone().view(torch.bfloat16).tolist()
    if not all(0 <= top <= LARGEST for top in tops) or not all(abs(mean) <= LARGEST for mean in means):
        return False
    for packed in parts["codes"].view(SHAPE[0], -1).tolist():
        run = int.from_bytes(bytes(packed), "little")
        codes = [run >> (i * bits) & (2**bits - 1) for i in range(len(packed) * 8 // bits)]
        own, filling = codes[: SHAPE[1] * SHAPE[2]], codes[SHAPE[1] * SHAPE[2] :]
        if max(own) > 2 * largest_code(bits) or any(filling):
            return False
    return True


@every_wire
@both_ways
@pytest.mark.parametrize("part", PARTS)
def test_a_frame_with_bytes_changed_is_read_as_finite_numbers_and_noticed_if_it_could_not_be_sent(
    wire, centred, part
):
    """500 frames for each wire, direction and part, with one to three of its bytes changed."""
    generator, noticed = torch.Generator().manual_seed(0), 0
    good = frame(wire, centred)
    if not len(split(wire, good, centred)[part]):
        return  # no mean is sent back
    for _ in range(500):
        bad = good.clone()
        own = split(wire, bad, centred)[part]  # a view
        for at in torch.randint(
            len(own), (int(torch.randint(1, 4, (1,), generator=generator)),), generator=generator
        ):
            own[at] = torch.randint(256, (1,), generator=generator, dtype=torch.uint8)[0]
        values, sound = read(wire, bad, centred)
        assert sound == plainly_sound(wire, bad, centred)
        assert torch.isfinite(values).all()
        noticed += not sound
        if not sound:
            continue
        parts = split(wire, bad, centred)
        bound = largest_code(INT_BITS[wire]) * parts["tops"].clone().view(torch.float32)[:, None, None]
        if centred:
            bound = bound + parts["means"].clone().view(torch.bfloat16).view(SHAPE[0], 1, -1).float().abs()
        assert (values.abs() <= bound * (1 + 1e-6)).all()
    assert (noticed > 0) == (part != "steps")  # every byte is a step


@every_wire
@both_ways
def test_noise_is_read_as_finite_numbers(wire, centred):
    generator, size = torch.Generator().manual_seed(1), len(frame(wire, centred))
    for fill in (0, 255, None):
        for _ in range(100 if fill is None else 1):
            noise = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
            data = noise if fill is None else torch.full((size,), fill, dtype=torch.uint8)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                values, sound = read(wire, data, centred, dtype)
                assert values.dtype == dtype
                assert torch.isfinite(values).all()
                assert sound == plainly_sound(wire, data, centred)


@every_wire
@pytest.mark.parametrize("top", [math.nan, math.inf, -math.inf, -1.0, 2e30])
def test_a_largest_step_that_no_one_sends_spoils_its_own_sequence_only(wire, top):
    good = frame(wire, True)
    bad = good.clone()
    bad[4:8] = torch.tensor([top]).view(torch.uint8)  # of the second sequence
    values, sound = read(wire, bad, True)
    assert not sound
    assert torch.equal(values[0], read(wire, good, True)[0][0])
    means = split(wire, good, True)["means"].clone().view(torch.bfloat16).view(SHAPE[0], -1).float()
    assert torch.equal(values[1], means[1].expand(SHAPE[1], -1))


@every_wire
def test_the_filling_of_a_last_byte_is_zero(wire):
    bits, good = INT_BITS[wire], frame(wire, False)
    assert read(wire, good, False)[1]
    bad = good.clone()
    bad[-1] |= 0x80  # the last bit of seven codes that are none
    values, sound = read(wire, bad, False)
    assert not sound
    assert torch.equal(values, read(wire, good, False)[0])
    assert 65 % 8 == 1
    assert len(good) == 2 * (4 + 5 + 9 * bits)
