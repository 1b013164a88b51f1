"""The few-bit wire's kernels against its plain form: on a GPU, or on a CPU under Triton's interpreter."""

import math
import os
from itertools import cycle

import pytest
import torch
from torch.testing import assert_close

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from isthmus import gpu
from isthmus.layout.wire import INT_BITS, frame_sizes
from isthmus.subspace import wire_launch
from isthmus.subspace.wire import LARGEST, IntWire, LocalLink, carried, fractions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = (torch.bfloat16, torch.float32)
SHAPES = [(2, 7, 5), (1, 40, 24), (1, 1, 8), (2, 9, 33), (1, 20, 1)]  # words of one token, and of several
SCALES = {"plain": 1.0, "far apart": 1.0, "tiny": 1e-38, "huge": 1e28, "zeros": 1.0, "constant": 1 / 3}
CASES = [
    (wire, centred, TYPES[(i + centred) % 2]) for i, wire in enumerate(INT_BITS) for centred in (True, False)
]
every_case = pytest.mark.parametrize(("wire", "centred", "dtype"), CASES)

if DEVICE.type == "cpu":  # more than one program for each sequence, and an interpreter that ends
    wire_launch.ENTRIES, wire_launch.WORDS, wire_launch.TOKENS = 512, 16, 8


@pytest.fixture(autouse=True)
def plain_by_itself(monkeypatch):
    monkeypatch.setattr(gpu, "usable", lambda device: False)


def stream(shape, kind, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(*shape, generator=generator)
    if kind == "far apart":  # and a mean that is far from zero
        z = z * torch.exp(8 * torch.randn(*shape[:2], 1, generator=generator))
        z = z + 20 * torch.randn(shape[2], generator=generator)
    elif kind == "zeros":
        z[:, ::2] = 0
        z[0] = 0
    elif kind == "constant":
        z = torch.ones(shape)
    return (z * SCALES.get(kind, 1.0)).to(DEVICE, dtype)


def decoded(wire, data, shape, dtype, centred):
    told = fractions(DEVICE)
    return wire_launch.decode(data, shape, dtype, INT_BITS[wire], centred, told, LARGEST)


def assert_same_bits(one, other, case):
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), case


@every_case
def test_what_is_sent_and_what_is_read_have_the_bits_of_the_plain_form(wire, centred, dtype):
    link, told = IntWire(wire), fractions(DEVICE)
    shapes = cycle(SHAPES[CASES.index((wire, centred, dtype)) % len(SHAPES) :] + SHAPES)
    for kind, shape in zip(SCALES, shapes, strict=False):
        z = stream(shape, kind, dtype)
        sent = link.encode(z, centred)
        assert_same_bits(wire_launch.encode(z, link.bits, centred, told), sent, (shape, kind))
        wanted, sound = link.decode(sent, shape, dtype, centred)
        got, fine = decoded(wire, sent, shape, dtype, centred)
        assert sound
        assert fine.all()
        assert_same_bits(got, wanted, (shape, kind))
        assert_same_bits(wire_launch.carried(z, link.bits, centred, told), wanted, (shape, kind))


@every_case
def test_frames_that_no_one_sends_are_noticed_alike(wire, centred, dtype):
    """Bytes of each part changed, the filling of a last byte too."""
    link, shape = IntWire(wire), (2, 7, 5)
    good = link.encode(stream(shape, "far apart", dtype), centred)
    generator, noticed, at = torch.Generator().manual_seed(1), 0, 0
    for size in (n for n in frame_sizes(link.bits, *shape, centred) if n):
        for where in (*torch.randint(size, (2,), generator=generator).tolist(), size - 1):
            bad = good.clone()
            bad[at + where] = int(torch.randint(256, (1,), generator=generator)) | 0xF0
            wanted, sound = link.decode(bad, shape, dtype, centred)
            got, fine = decoded(wire, bad, shape, dtype, centred)
            assert bool(fine.all()) == bool(sound)
            assert_same_bits(got, wanted, where)
            noticed += not sound
        at += size
    assert noticed


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("centred", [True, False])
def test_a_stream_that_is_not_finite_stays_so_in_the_simulator_and_is_noticed_on_a_link(centred, odd):
    shape, told = (2, 9, 16), fractions(DEVICE)
    z = stream(shape, "plain", torch.float32)
    z[1, 3, 5] = odd
    got = wire_launch.carried(z, 5, centred, told)
    assert_close(got, carried(z, 5, centred), rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1]).any()
    for frame in (wire_launch.encode(z, 5, centred, told), IntWire("int5").encode(z, centred)):
        values, sound = decoded("int5", frame, shape, torch.float32, centred)
        assert not sound.all()
        assert torch.isfinite(values).all()


def test_a_link_uses_them_where_a_gpu_can_run_them(monkeypatch):
    shape, used = (2, 9, 16), []
    monkeypatch.setattr(gpu, "usable", lambda device: True)
    for name in ("encode", "decode", "carried"):
        plain = getattr(wire_launch, name)
        monkeypatch.setattr(wire_launch, name, lambda *given, n=name, f=plain: (used.append(n), f(*given))[1])
    link, z = IntWire("int5"), stream(shape, "plain", torch.float32).requires_grad_()
    arrived, _ = link.decode(link.encode(z, True), shape, torch.float32, True)
    carrying = LocalLink("int5").carry(z)
    assert_same_bits(carrying.detach(), arrived, shape)
    carrying.backward(torch.ones_like(z))
    assert used == ["encode", "decode", "carried", "carried"]
    link.encode(z.double(), True)  # which they do not take
    assert len(used) == 4


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dim", [24, 13])
def test_a_graph_holds_them(monkeypatch, dim):
    """Nothing waits for the device, and other values need no other work."""
    monkeypatch.setattr(gpu, "usable", lambda device: True)
    shape, link = (2, 40, dim), IntWire("int5")
    own = stream(shape, "plain", torch.bfloat16)

    def work():
        frame = link.encode(own, True)
        return frame, link.decode(frame, shape, torch.bfloat16, True)[0], LocalLink("int5").carry(own)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    own.copy_(stream(shape, "far apart", torch.bfloat16, seed=1))
    graph.replay()
    for one, other in zip(recorded, work(), strict=True):
        assert_same_bits(one, other, dim)
