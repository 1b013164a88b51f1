"""The fused kernels against the plain torch form: on a GPU, or on a CPU under Triton's interpreter."""

import importlib.util
import os
import zlib

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from isthmus.layout.chunks import HEADER_BYTES
from isthmus.outer.aggregate import RunningMean, aggregate_many, step_many
from isthmus.outer.feedback import contribute_many, feed_back_many
from isthmus.sparse import TopK, fused, pack_many, unpack_all, unpack_many
from isthmus.sparse.quantize import two_levels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"wq": (128, 192), "norm": (192,), "w1": (64, 128), "odd": (67, 131), "ties": (64, 64)}


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(fused, "usable", lambda device: True)


def tensors(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}
    dense["w1"][:, 5:] = 0  # a chunk of zeros, and one that keeps zeros among others
    dense["w1"][30:, :5] = 0
    dense["ties"] = dense["ties"].round()
    return {name: tensor.to(DEVICE) for name, tensor in dense.items()}


@pytest.mark.parametrize("kind", ["2bit", "fp32", "bf16"])
@pytest.mark.parametrize("keep", [32, 12, 100])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_nothing_is_lost_and_the_largest_are_sent(kernels, kind, keep, scale):  # eq. 2
    codec = TopK(keep=keep, values=kind)
    anchor, params, feedback = tensors(0), tensors(1), tensors(2, scale)
    anchor = {name: a * scale for name, a in anchor.items()}
    params = {name: p * scale for name, p in params.items()}
    carried = {name: feedback[name] * 0.9 + (anchor[name] - params[name]) for name in SHAPES}
    sent = contribute_many(anchor, params, feedback, codec, 0.9)
    assert list(sent) == list(SHAPES)
    for name, payload in sent.items():
        at = codec.decode(payload) != 0
        assert torch.equal((carried[name] - codec.decode(payload)), feedback[name])
        exact = TopK(keep=keep, values="fp32").encode(carried[name])
        kept, wanted = payload.index.long(), exact.index.long()
        assert (kept[:, 1:] > kept[:, :-1]).all()
        if name != "ties":  # among equals any may be kept
            nonzero = exact.values != 0
            assert torch.equal(kept[nonzero], wanted[nonzero])
        assert (carried[name][at].sign() == codec.decode(payload)[at].sign()).all()


@pytest.mark.parametrize("kind", ["2bit", "fp32"])
def test_the_plain_form_sends_the_same(monkeypatch, kind):
    codec = TopK(values=kind)
    anchor, params, feedback = tensors(0), tensors(1), tensors(2)
    pseudo_grads = {name: anchor[name] - params[name] for name in SHAPES}
    plain, rest = feed_back_many(pseudo_grads, feedback, codec, 0.9)
    monkeypatch.setattr(fused, "usable", lambda device: True)
    sent = contribute_many(anchor, params, feedback, codec, 0.9)
    for name in ("wq", "norm", "odd"):
        assert torch.equal(sent[name].index, plain[name].index)
        # The plain form adds in another order, so a scale may fall to its neighbour.
        torch.testing.assert_close(sent[name].values, plain[name].values, rtol=0.05, atol=0)
        error = (sent[name].values - plain[name].values).norm() / plain[name].values.norm()
        assert error < 2e-3
        torch.testing.assert_close(feedback[name], rest[name], rtol=0, atol=0.2)


def test_levels_have_the_least_error(kernels):
    values = torch.randn(50, 32, device=DEVICE)
    values[3] = 0
    values[4, 7:] = 0
    values[5] = 2.5
    low, high, zeros = fused.two_levels(values)
    magnitude = values.abs().sort(1, descending=True).values
    for mine, theirs in zip((low, high, zeros), two_levels(magnitude), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("keep", [32, 64])
@pytest.mark.parametrize("kind", ["2bit", "fp32", "bf16"])
def test_packed_bytes_are_the_plain_forms(monkeypatch, keep, kind):
    sent = TopK(keep=keep, values=kind).encode_many(tensors(0))
    plain = pack_many(sent)
    monkeypatch.setattr(fused, "usable", lambda device: True)
    assert pack_many(sent) == plain
    for name, payload in unpack_many(plain, DEVICE).items():
        assert torch.equal(payload.index, sent[name].index)
        assert torch.equal(payload.values, sent[name].values)


def test_malformed_bytes_are_refused(kernels):
    data = bytearray(pack_many(TopK(values="2bit").encode_many(tensors(0))))
    body = HEADER_BYTES + sum(3 + len(name) + 4 * len(shape) for name, shape in SHAPES.items())
    for at in (body - 1, body + 4 * len(SHAPES) + 7, len(data) - 2):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(ValueError, match="payload"):
            unpack_many(bytes(bad), DEVICE)
    bad = bytearray(data)
    bad[body + 4 * len(SHAPES) + 7] ^= 1  # a mark of the first chunk: it has one position more or less
    bad[-4:] = zlib.crc32(bad[:-4]).to_bytes(4, "little")
    with pytest.raises(ValueError, match="positions"):
        unpack_many(bytes(bad), DEVICE)


@pytest.mark.parametrize("how", ["contributors", "all"])
def test_the_step_has_the_same_bits(monkeypatch, how):
    data = [pack_many(TopK(keep=100, values="2bit").encode_many(tensors(m))) for m in range(5)]
    mean = aggregate_many([unpack_many(one) for one in data], how)
    wanted = {name: tensor.cpu().clone() for name, tensor in tensors(9).items()}
    for name, tensor in wanted.items():
        tensor.sub_(mean[name] * 0.7)
    monkeypatch.setattr(fused, "usable", lambda device: True)
    summed, straight, running = tensors(9), tensors(9), RunningMean(how)
    for one in data:
        running.add(unpack_many(one, DEVICE))
    running.step(summed, 0.7)
    plain = [name for name in SHAPES if name == "odd"]  # padded: no kernel for it
    for names in ([name for name in SHAPES if name not in plain], plain):
        step_many(straight, [bundle.part(names) for bundle in unpack_all(data, DEVICE)], 0.7, how)
    for name in SHAPES:
        assert torch.equal(summed[name].cpu(), wanted[name])
        assert torch.equal(straight[name].cpu(), wanted[name])


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 40000, 70001])
def test_a_checksum_from_the_device_is_zlibs(kernels, size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    shares = fused.crc_share(torch.stack([data, data.flip(0)]).to(DEVICE)).tolist()
    for share, row in zip(shares, (data, data.flip(0)), strict=True):
        assert fused.finish_crc(b"before", share, size) == zlib.crc32(b"before" + row.numpy().tobytes())


def test_an_entry_that_is_not_finite_is_refused_by_name(kernels):
    params = tensors(1)
    params["wq"][3, 3] = torch.inf
    with pytest.raises(ValueError, match="wq"):
        contribute_many(tensors(0), params, tensors(2), TopK(values="2bit"), 0.9)
