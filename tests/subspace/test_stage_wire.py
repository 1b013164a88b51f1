"""A link that carries a few bits: what is lost, what is exact, and that bytes are those counted."""

import pytest
import torch
from small_recipes import pipelined, recipe_text

from isthmus.config import parse_recipe
from isthmus.config.fleet import WIRES
from isthmus.layout.traffic import inner_step_bytes
from isthmus.layout.wire import FLOAT_BYTES, INT_BITS, stream_bytes
from isthmus.subspace.wire import LocalLink, largest_code, pack_codes, rounded, unpack_codes, wire_of

SHAPES = [(2, 7, 5), (3, 16, 24), (1, 1, 8), (2, 33, 64)]


def stream(shape, seed=0, dtype=torch.float32):
    """Tokens of very different sizes, dimensions that are far from zero, and a token of zeros."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(*shape, generator=generator, dtype=torch.float64)
    z *= torch.exp(2 * torch.randn(*shape[:2], 1, generator=generator, dtype=torch.float64))
    z += 20 * torch.randn(1, 1, shape[2], generator=generator, dtype=torch.float64)
    return z.to(dtype)


def plain(rows, bits, centred):
    """One sequence (L, K) in plain Python; None where a sequence is constant, which needs no step."""
    most = largest_code(bits)
    length, dim = rows.shape
    mean = rows.mean(0).bfloat16().float() if centred else torch.zeros(dim)
    rest = rows - mean
    needed = [float(rest[i].abs().max()) / most for i in range(length)]
    top, out = max(needed), torch.zeros_like(rows)
    for i in range(length):
        if not needed[i]:
            out[i] = mean
            continue
        steps = 0
        while steps < 255 and top * 2 ** (-(steps + 1) / 8) >= needed[i]:
            steps += 1
        step = top * 2 ** (-steps / 8)
        for j in range(dim):
            out[i, j] = mean[j] + step * max(-most, min(most, round(float(rest[i, j]) / step)))
    return out


@pytest.mark.parametrize("wire", INT_BITS)
@pytest.mark.parametrize("centred", [True, False])
def test_it_rounds_as_the_plain_rule_says(wire, centred):
    for shape in SHAPES:
        z = stream(shape)
        ours = rounded(z, INT_BITS[wire], centred).values(torch.float32)
        for row, value in zip(z, ours, strict=True):
            # A value half-way between two codes may go either way.
            wanted = plain(row, INT_BITS[wire], centred)
            off = (value - wanted).abs() > 1e-5 * row.abs().max()
            assert off.float().mean() < 0.01


@pytest.mark.parametrize("wire", INT_BITS)
def test_no_value_is_off_by_more_than_half_a_step_of_its_token(wire):
    bits = INT_BITS[wire]
    for centred in (True, False):
        z = stream((4, 40, 32), dtype=torch.float64)
        got = rounded(z, bits, centred)
        rest = z if got.mean is None else z - got.mean[:, None, :].double()
        step = rest.abs().amax(-1, keepdim=True) / largest_code(bits) * 2 ** (1 / 8)
        assert ((got.values(torch.float64) - z).abs() <= step / 2 * (1 + 1e-6)).all()


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
@pytest.mark.parametrize("centred", [True, False])
def test_what_arrives_is_what_the_simulator_has_and_has_the_bytes_that_are_counted(wire, centred):
    link = wire_of(wire)
    for shape in SHAPES:
        z = stream(shape)
        sent = link.encode(z, centred)
        assert (tuple(sent.shape), sent.dtype) == link.spec(shape, centred)
        assert sent.numel() * sent.element_size() == stream_bytes(wire, *shape, centred)
        arrived, sound = link.decode(sent, shape, torch.float32, centred)
        assert sound is None or bool(sound)
        if centred:
            assert torch.equal(arrived, LocalLink(wire).carry(z))


@pytest.mark.parametrize("wire", INT_BITS)
def test_a_link_rounds_the_gradient_without_its_mean(wire):
    z, grad = stream((2, 9, 16)).requires_grad_(), stream((2, 9, 16), seed=1)
    LocalLink(wire).carry(z).backward(grad)
    assert z.grad is not None
    assert torch.equal(z.grad, rounded(grad, INT_BITS[wire], False).values(torch.float32))


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
    assert crossing["activations"] == stream_bytes("int5", *shape, True)
    assert crossing["gradients"] == stream_bytes("int5", *shape, False)
    assert crossing["gradients"] < crossing["activations"] < stream_bytes("bf16", *shape, True)


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
    sent = encode(z.detach(), True)
    assert torch.equal(sent, own.encode(z.detach(), True))
    assert torch.equal(decode(sent, (2, 9, 13), torch.float32, True)[0], wanted[0])


def test_an_exported_model_rounds_alike():
    carried = pytest.importorskip("isthmus.export.modeling_isthmus").carried
    z = stream((2, 20, 24))
    for wire, bits in INT_BITS.items():
        assert torch.equal(carried(z, bits), LocalLink(wire).carry(z))
