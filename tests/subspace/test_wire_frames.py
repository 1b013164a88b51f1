"""Frames of a few-bit wire from a neighbour that is broken or hostile: every part of them, changed."""

import pytest
import torch

from isthmus.layout.wire import INT_BITS, frame_sizes
from isthmus.subspace.wire import LEAST, NOT_FINITE, IntWire, largest_code, step_of

SHAPE = (2, 5, 13)  # 65 codes a sequence: its last byte is filled up
every_wire = pytest.mark.parametrize("wire", INT_BITS)
both_ways = pytest.mark.parametrize("direction", ["forward", "back"])


def frame(wire, direction, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(SHAPE, generator=generator) * torch.exp(torch.randn(*SHAPE[:2], 1, generator=generator))
    return IntWire(wire).encode(z, direction)[0]


def split(wire, data):
    steps, codes = data.split(frame_sizes(INT_BITS[wire], *SHAPE))
    return {"steps": steps, "codes": codes}


def read(wire, data, direction, dtype=torch.float32):
    values, sound = IntWire(wire).decode(data, SHAPE, dtype, direction)
    return values, bool(sound)


def plainly_sound(wire, data):
    """Whether a sound stage could have sent a frame, value by value."""
    bits, parts = INT_BITS[wire], split(wire, data)
    if NOT_FINITE in parts["steps"].tolist():
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
@pytest.mark.parametrize("part", ["steps", "codes"])
def test_a_frame_with_bytes_changed_is_read_as_finite_numbers_and_noticed_if_it_could_not_be_sent(
    wire, direction, part
):
    """500 frames for each wire, direction and part, with one to three of its bytes changed."""
    generator, noticed = torch.Generator().manual_seed(0), 0
    good = frame(wire, direction)
    for _ in range(500):
        bad = good.clone()
        own = split(wire, bad)[part]  # a view
        for at in torch.randint(
            len(own), (int(torch.randint(1, 4, (1,), generator=generator)),), generator=generator
        ):
            own[at] = torch.randint(256, (1,), generator=generator, dtype=torch.uint8)[0]
        values, sound = read(wire, bad, direction)
        assert sound == plainly_sound(wire, bad)
        assert torch.isfinite(values).all()
        noticed += not sound
        if sound:
            steps = step_of(split(wire, bad)["steps"].view(*SHAPE[:2], 1), LEAST[direction])
            assert (values.abs() <= largest_code(INT_BITS[wire]) * steps).all()
    assert noticed > 0


@every_wire
@both_ways
def test_noise_is_read_as_finite_numbers(wire, direction):
    generator, size = torch.Generator().manual_seed(1), len(frame(wire, direction))
    for fill in (0, 255, None):
        for _ in range(100 if fill is None else 1):
            noise = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
            data = noise if fill is None else torch.full((size,), fill, dtype=torch.uint8)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                values, sound = read(wire, data, direction, dtype)
                assert values.dtype == dtype
                assert torch.isfinite(values).all()
                assert sound == plainly_sound(wire, data)


@every_wire
def test_a_step_that_stands_for_no_number_spoils_its_own_token_only(wire):
    good = frame(wire, "forward")
    bad = good.clone()
    bad[7] = NOT_FINITE  # of the second sequence's third token
    values, sound = read(wire, bad, "forward")
    wanted = read(wire, good, "forward")[0]
    wanted[1, 2] = 0.0
    assert not sound
    assert torch.equal(values, wanted)


@every_wire
def test_the_filling_of_a_last_byte_is_zero(wire):
    bits, good = INT_BITS[wire], frame(wire, "back")
    assert read(wire, good, "back")[1]
    bad = good.clone()
    bad[-1] |= 0x80  # the last bit of seven codes that are none
    values, sound = read(wire, bad, "back")
    assert not sound
    assert torch.equal(values, read(wire, good, "back")[0])
    assert 65 % 8 == 1
    assert len(good) == 2 * (5 + 9 * bits)
