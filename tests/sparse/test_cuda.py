"""A GPU and a CPU agree on what bytes mean, and on the mean of payloads, to the last bit."""

import pytest
import torch

from isthmus import gpu
from isthmus.layout.chunks import KINDS
from isthmus.outer import PlainCodec, aggregate_many, codec_for, feed_back
from isthmus.sparse import TopK, pack_many, unpack_many

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = {"wq": (256, 192), "norm": (192,), "odd": (67, 131), "scalar": (), "few": (128, 128)}


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors(device: str = "cuda", scale: float = 1.0) -> dict[str, torch.Tensor]:
    dense = {name: torch.randn(shape) * scale for name, shape in SHAPES.items()}
    dense["few"][:, 3:] = 0
    return {name: tensor.to(device) for name, tensor in dense.items()}


def codecs(keep: int, kind: str) -> tuple[PlainCodec, PlainCodec]:
    """The plain form and, where Triton is installed, the kernels."""
    return PlainCodec(64, keep, kind, "cuda"), codec_for("cuda", 64, keep, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [32, 1500, 4096])
@pytest.mark.parametrize("scale", [1.0, 1e-37, 1e30])
def test_bytes_decode_to_the_same_bits(kind, keep, scale):
    for codec in codecs(keep, kind):
        sent = codec.encode_many(tensors(scale=scale))
        data = codec.pack_many(sent)
        here, there = unpack_many(data), codec.unpack_many(data)
        for name in SHAPES:
            assert torch.equal(codec.decode(here[name]), codec.decode(there[name]).cpu())
            assert torch.equal(codec.decode(sent[name]), codec.decode(there[name]))
        assert pack_many(here) == codec.pack_many(there) == data


@pytest.mark.parametrize("kind", ["fp32", "fp64"])
def test_the_same_entries_are_selected(kind):
    dense = tensors()
    del dense["few"]  # among equal zeros any may be kept
    codec = TopK(values=kind)
    here = codec.encode_many({name: tensor.cpu() for name, tensor in dense.items()})
    for name, payload in codec.encode_many(dense).items():
        assert torch.equal(payload.index.cpu(), here[name].index)
        assert torch.equal(payload.values.cpu(), here[name].values)


@pytest.mark.parametrize("how", ["contributors", "all"])
@pytest.mark.parametrize("clip", [None, "median"])
@pytest.mark.parametrize("kind", ["2bit", "fp32"])
@pytest.mark.parametrize("scale", [1.0, 1e-38])  # subnormal values, too
def test_means_agree_to_the_last_bit(how, clip, kind, scale):
    for keep in (100, 500):  # kernels take up to 128 entries of a chunk
        for codec in codecs(keep, kind):
            data = codec.pack_all([codec.encode_many(tensors(scale=scale * (m + 1))) for m in range(7)])
            here = aggregate_many([unpack_many(one) for one in data], how, clip)
            there = codec.mean(codec.unpack_all(data), how, clip)
            anchor = tensors()
            wanted = {name: tensor.cpu().sub_(here[name] * 0.7) for name, tensor in anchor.items()}
            codec.step(anchor, codec.unpack_all(data), 0.7, how, clip)
            for name in SHAPES:
                assert torch.equal(here[name], there[name].cpu())
                assert torch.equal(anchor[name].cpu(), wanted[name])


def test_kernels_are_chosen_where_they_can_run():
    assert type(codec_for("cpu")) is PlainCodec
    assert (type(codec_for("cuda")) is not PlainCodec) == gpu.usable(torch.device("cuda"))


def test_feedback_on_a_gpu_loses_nothing():
    codec = TopK(values="fp32")
    feedback, pseudo_grads = tensors(), tensors()
    carried = {name: (feedback[name] * 0.95).add_(pseudo_grads[name]) for name in SHAPES}
    sent = feed_back(pseudo_grads, feedback, codec, 0.95)
    for name in SHAPES:
        assert torch.equal(feedback[name] + codec.decode(sent[name]), carried[name])


def test_an_entry_that_is_not_finite_is_refused_by_name():
    dense = tensors()
    dense["odd"][3, 3] = torch.nan
    with pytest.raises(ValueError, match="odd"):
        TopK(values="2bit").encode_many(dense)
