"""Error feedback of eq. 2 of arXiv 2601.02360."""

import pytest
import torch
from torch.testing import assert_close

from isthmus.outer import feed_back
from isthmus.sparse import TopK, pack, unpack

SHAPES = {"wq": (128, 192), "norm": (192,), "odd": (67, 131), "scalar": ()}


def one(pseudo_grad, feedback, codec, decay):
    """One parameter's payload and its next feedback; the given one stays."""
    rest = feedback.clone()
    return feed_back({"": pseudo_grad}, {"": rest}, codec, decay)[""], rest


@pytest.mark.parametrize("kind", ["fp32", "bf16", "2bit"])
@pytest.mark.parametrize("shape", SHAPES.values())
def test_nothing_is_lost_between_payload_and_feedback(kind, shape):
    codec = TopK(values=kind)
    feedback, pseudo_grad = torch.randn(2, *shape)
    carried = 0.95 * feedback + pseudo_grad
    payload, rest = one(pseudo_grad, feedback, codec, 0.95)
    decoded = codec.decode(unpack(pack(payload)))
    if kind == "fp32":
        assert torch.equal(rest + decoded, carried)
    else:
        assert_close(rest + decoded, carried, rtol=0, atol=1e-6)
    assert torch.equal(rest[decoded == 0], carried[decoded == 0])


def test_float64_is_lossless_too():
    feedback, pseudo_grad = torch.randn(2, 96, 67, dtype=torch.float64)
    codec = TopK(values="fp64")
    payload, rest = one(pseudo_grad, feedback, codec, 0.95)
    assert torch.equal(rest + codec.decode(payload), 0.95 * feedback + pseudo_grad)


def test_whole_model_equals_tensor_by_tensor():
    codec = TopK(values="2bit")
    pseudo_grads = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    feedback = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    expected = {name: one(pseudo_grads[name], feedback[name], codec, 0.9) for name in SHAPES}
    sent = feed_back(pseudo_grads, feedback, codec, 0.9)
    for name, (payload, left) in expected.items():
        assert torch.equal(feedback[name], left)
        assert torch.equal(sent[name].values, payload.values)
        assert torch.equal(sent[name].index, payload.index)


def test_repeated_rounds_send_everything_in_the_end():
    codec = TopK(8, 4, "2bit")
    target = torch.randn(24, 24, dtype=torch.float64)
    feedback, received = target.clone(), torch.zeros_like(target)
    for _ in range(200):
        payload, feedback = one(torch.zeros_like(target), feedback, codec, 1.0)
        received += codec.decode(payload)
    assert_close(received, target, rtol=0, atol=0.01)


def test_a_feedback_that_cannot_be_overwritten_is_refused():
    feedback, pseudo_grad = torch.randn(2, 64, 128)
    with pytest.raises(ValueError, match="contiguous"):
        feed_back({"w": pseudo_grad.T}, {"w": feedback.T}, TopK(), 0.95)
