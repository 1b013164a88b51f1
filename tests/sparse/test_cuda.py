"""A GPU and a CPU agree on what bytes mean, and on the mean of payloads, to the last bit."""

import pytest
import torch

from isthmus.layout.chunks import KINDS
from isthmus.outer import aggregate, aggregate_many, feed_back_many
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [32, 1500, 4096])
@pytest.mark.parametrize("scale", [1.0, 1e-37, 1e30])
def test_bytes_decode_to_the_same_bits(kind, keep, scale):
    codec = TopK(keep=keep, values=kind)
    sent = codec.encode_many(tensors(scale=scale))
    data = pack_many(sent)
    here, there = unpack_many(data), unpack_many(data, "cuda")
    for name in SHAPES:
        assert torch.equal(codec.decode(here[name]), codec.decode(there[name]).cpu())
        assert torch.equal(codec.decode(sent[name]), codec.decode(there[name]))
    assert pack_many(here) == pack_many(there) == data


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
    codec = TopK(keep=500, values=kind)
    data = [pack_many(codec.encode_many(tensors(scale=scale * (m + 1)))) for m in range(7)]
    here = aggregate_many([unpack_many(one) for one in data], how, clip)
    there = aggregate_many([unpack_many(one, "cuda") for one in data], how, clip)
    for name in SHAPES:
        assert torch.equal(here[name], there[name].cpu())
    dense = [codec.decode(unpack_many(one)["wq"]) for one in data]
    assert torch.equal(aggregate(dense, how, clip), aggregate([x.cuda() for x in dense], how, clip).cpu())


def test_feedback_on_a_gpu_loses_nothing():
    codec = TopK(values="fp32")
    feedback, pseudo_grads = tensors(), tensors()
    sent, rest = feed_back_many(pseudo_grads, feedback, codec, 0.95)
    for name in SHAPES:
        carried = (feedback[name] * 0.95).add_(pseudo_grads[name])
        assert torch.equal(rest[name] + codec.decode(sent[name]), carried)


def test_an_entry_that_is_not_finite_is_refused_by_name():
    dense = tensors()
    dense["odd"][3, 3] = torch.nan
    with pytest.raises(ValueError, match="odd"):
        TopK(values="2bit").encode_many(dense)
