"""A link that carries a few bits: what is lost, what is exact, and that bytes are those counted."""

import math

import pytest
import torch
from small_recipes import pipelined, recipe_text

from isthmus.config import parse_recipe
from isthmus.config.fleet import WIRES
from isthmus.layout.traffic import inner_step_bytes
from isthmus.layout.wire import FLOAT_BYTES, INT_BITS, stream_bytes
from isthmus.subspace.wire import (
    LEAST,
    LocalLink,
    carried,
    largest_code,
    pack_codes,
    rounded,
    unpack_codes,
    wire_of,
)

every_wire = pytest.mark.parametrize("wire", INT_BITS)
both_ways = pytest.mark.parametrize("direction", ["forward", "back"])
SHAPES = [(2, 7, 5), (3, 16, 24), (1, 1, 8), (2, 33, 64)]


def stream(shape, seed=0, dtype=torch.float32, direction="forward"):
    """Tokens of very different sizes, with dimensions that are far from zero."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(*shape, generator=generator, dtype=torch.float64)
    z *= torch.exp(2 * torch.randn(*shape[:2], 1, generator=generator, dtype=torch.float64))
    z += 20 * torch.randn(1, 1, shape[2], generator=generator, dtype=torch.float64)
    return (z / 1000 if direction == "back" else z).to(dtype)


def plain(token, bits, direction):
    """One token (K,) in plain Python: the least step of the wire with which its largest value has a code."""
    most, largest = largest_code(bits), max(map(abs, token.tolist()))
    steps = [2.0 ** (LEAST[direction] + i // 8) * (1 + i % 8 / 8) for i in range(255)]
    needed = torch.tensor(largest / most).item()  # in float32
    step = next((step for step in steps if step >= needed), steps[-1])
    codes = [max(-most, min(most, round(x / step))) for x in token.tolist()]
    return torch.tensor([code * step for code in codes])


@every_wire
@both_ways
def test_it_rounds_as_the_plain_rule_says(wire, direction):
    for shape in SHAPES:
        z = stream(shape, direction=direction)
        ours = rounded(z, INT_BITS[wire], LEAST[direction]).values(torch.float32)
        for token, value in zip(z.flatten(0, 1), ours.flatten(0, 1), strict=True):
            # A value half-way between two codes may go either way.
            off = (value - plain(token, INT_BITS[wire], direction)).abs() > 1e-5 * token.abs().max()
            assert off.float().mean() < 0.1


@every_wire
@both_ways
def test_no_value_is_off_by_more_than_half_a_step_of_its_token(wire, direction):
    bits = INT_BITS[wire]
    z = stream((4, 40, 32), dtype=torch.float64, direction=direction)
    got = rounded(z, bits, LEAST[direction])
    step = z.abs().amax(-1, keepdim=True) / largest_code(bits) * 9 / 8  # steps are at most an eighth apart
    assert ((got.values(torch.float64) - z).abs() <= step / 2 * (1 + 1e-6)).all()
    assert not got.outside.any()


@every_wire
@both_ways
def test_a_token_outside_the_range_is_cut_off_and_counted(wire, direction):
    bits = INT_BITS[wire]
    most, low, high = largest_code(bits), 2.0 ** LEAST[direction], 2.0 ** (LEAST[direction] + 31) * 14 / 8
    signs = torch.tensor([1.0, -1.0, 0.5])
    # The least and the largest step fit; a quarter and four times as much do not, nor does a little less than
    # the least; zeros need no step.
    shares = torch.tensor([low, high, low / 4, high * 4, 0.0, low * 0.9])
    peaks = 0.9999 * most * shares
    z = (peaks[:, None] * signs).view(2, 3, 3)
    count = torch.zeros(2, dtype=torch.long)
    value = carried(z, bits, LEAST[direction], count)
    assert rounded(z, bits, LEAST[direction]).outside.flatten().tolist() == [
        False,
        False,
        True,
        True,
        False,
        True,
    ]
    assert count.tolist() == [1, 2]
    assert wire_of(wire).encode(z, direction)[1] == 3
    assert value[0, 0, 0] == most * low
    assert torch.equal(value[1, 0, :2], torch.tensor([most * high, -most * high]))
    assert ((value[0, 2] - z[0, 2]).abs() <= low / 2).all()
    assert not value[1, 1].any()


@every_wire
@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_token_that_is_not_finite_is_nan_and_does_not_touch_another(wire, direction, dtype):
    z = stream((2, 6, 8), dtype=dtype, direction=direction)
    good = carried(z, INT_BITS[wire], LEAST[direction])
    z[0, 1, 3], z[0, 4, 2], z[1, 0, 7], z[1, 5] = math.nan, math.inf, -math.inf, math.nan
    bad = [(0, 1), (0, 4), (1, 0), (1, 5)]
    count = torch.zeros(2, dtype=torch.long)
    value = carried(z, INT_BITS[wire], LEAST[direction], count)
    for b, t in ((b, t) for b in range(2) for t in range(6)):
        assert value[b, t].isnan().all() if (b, t) in bad else torch.equal(value[b, t], good[b, t])
    assert not count.any()  # whoever looks at the loss sees these
    own = wire_of(wire)
    arrived, sound = own.decode(own.encode(z, direction)[0], (2, 6, 8), dtype, direction)
    assert not sound
    assert torch.equal(arrived, value.nan_to_num(0.0))


@every_wire
@both_ways
def test_numbers_too_small_for_a_normal_float_are_read_as_zero(wire, direction):
    tiny = torch.tensor([1e-45, -3e-42, 1.1754943508222875e-38, 0.0]).expand(1, 3, 4)
    for z in (tiny, tiny.double() * 1e-280):
        assert torch.equal(carried(z, INT_BITS[wire], LEAST[direction]), torch.zeros_like(z))


@pytest.mark.parametrize("bits", INT_BITS.values())
def test_packing_loses_nothing_and_fills_every_bit(bits):
    for number in (1, 7, 8, 24, 33):
        codes = torch.randint(0, 2**bits, (3, 5, number), dtype=torch.uint8)
        packed = pack_codes(codes, bits)
        assert packed.shape == (3, 5, -(-number // 8) * bits)
        read = unpack_codes(packed, bits)
        assert torch.equal(read[..., :number], codes)
        assert not read[..., number:].any()


@pytest.mark.parametrize("wire", WIRES)
@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_arrives_is_what_the_simulator_has_and_has_the_bytes_that_are_counted(wire, direction, dtype):
    link = wire_of(wire)
    for shape in SHAPES:
        z = stream(shape, dtype=dtype, direction=direction).requires_grad_()
        sent, _ = link.encode(z, direction)
        assert (tuple(sent.shape), sent.dtype) == link.spec(shape)
        assert sent.numel() * sent.element_size() == stream_bytes(wire, *shape)
        arrived, sound = link.decode(sent, shape, dtype, direction)
        assert sound is None or bool(sound)
        carried = LocalLink(wire).carry(z)
        if direction == "back":
            (carried,) = torch.autograd.grad(carried, z, z.detach())
        assert torch.equal(arrived, carried)


@pytest.mark.parametrize("wire", WIRES)
def test_a_token_is_carried_alike_alone_and_beside_any_others(wire):  # so the wire is causal
    z = stream((3, 12, 16))
    whole = LocalLink(wire).carry(z)
    for t in range(12):
        assert torch.equal(LocalLink(wire).carry(z[:, t : t + 1]), whole[:, t : t + 1])
        changed = torch.cat([z[:, : t + 1], 1e3 * stream((3, 11 - t, 16), seed=1)], dim=1)
        assert torch.equal(LocalLink(wire).carry(changed)[:, : t + 1], whole[:, : t + 1])


def test_sequences_do_not_change_each_other():  # so micro-batches, stacks and parts of a batch do not either
    z = stream((6, 12, 16))
    whole = LocalLink("int4").carry(z)
    parts = [LocalLink("int4").carry(part) for part in (z[:2], z[2:5], z[5:])]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(LocalLink("int4").carry(z.view(2, 3, 12, 16)), whole.view(2, 3, 12, 16))


def test_more_bits_lose_less_and_none_loses_a_stream_of_zeros():
    z = stream((4, 64, 32))
    lost = [float((LocalLink(wire).carry(z) - z).square().sum()) for wire in ("int4", "int5", "int6", "int8")]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < lost[0] / 100
    assert torch.equal(LocalLink("int4").carry(torch.zeros(1, 3, 8)), torch.zeros(1, 3, 8))


def test_the_traffic_of_a_step_is_what_its_frames_hold():
    text = recipe_text(pipelined("edge", stages=2, compression="1/4", wire="int5"))
    recipe = parse_recipe(text)
    member, model, inner = recipe.fleet()[0], recipe.model, recipe.inner
    crossing = inner_step_bytes(recipe, member)
    shape = (inner.batch, model.context, member.config.subspace_dim(model.width))
    assert crossing["activations"] == crossing["gradients"] == stream_bytes("int5", *shape)
    assert crossing["activations"] < stream_bytes("bf16", *shape) / 2


def test_every_wire_is_known_everywhere():
    assert set(WIRES) == {*FLOAT_BYTES, *INT_BITS}


@pytest.mark.parametrize("wire", ["int5", "bf16"])
def test_a_link_is_compiled_whole(wire):  # so nothing in it waits for a value: a CUDA graph can hold it too
    link, z = LocalLink(wire), stream((2, 9, 13)).requires_grad_()
    compiled = torch.compile(link.carry, backend="eager", fullgraph=True)
    for carry in (compiled, link.carry):
        carried = carry(z)
        (grad,) = torch.autograd.grad(carried.square().sum(), z)
        if carry is compiled:
            wanted = carried, grad
        assert torch.equal(carried, wanted[0])
        assert torch.equal(grad, wanted[1])
    own = wire_of(wire)
    encode, decode = (torch.compile(f, backend="eager", fullgraph=True) for f in (own.encode, own.decode))
    sent = encode(z.detach(), "forward")[0]
    assert torch.equal(sent, own.encode(z.detach(), "forward")[0])
    assert torch.equal(decode(sent, (2, 9, 13), torch.float32, "forward")[0], wanted[0])


def test_an_exported_model_rounds_alike():
    carried = pytest.importorskip("isthmus.export.modeling_isthmus").carried
    z = stream((2, 20, 24))
    for wire, bits in INT_BITS.items():
        assert torch.equal(carried(z, bits), LocalLink(wire).carry(z))
