"""Which parameters of a module are sent, under which names, and what is refused."""

import pytest
import torch
from models import Odd
from torch import nn
from torch.testing import assert_close

from isthmus.errors import ConfigError
from isthmus.loop.tensors import Parameters, values


def test_a_modules_parameters_are_named_once_and_in_order():
    found = Parameters(Odd())
    assert list(found.trained) == [
        *("embed.weight", "head.bias", "inner.bias", "inner.weight", "mix", "norm.bias", "norm.weight"),
        "scale",
    ]
    assert list(found.frozen) == ["fixed"]
    shapes = {each.name: each.shape for each in found.tensors}
    assert (shapes["scale"], shapes["mix"]) == ((), (2, 12, 12))


def test_compiled_and_wrapped_modules_have_the_plain_names():
    plain, model = list(Parameters(Odd()).trained), Odd()
    assert list(Parameters(torch.compile(model)).trained) == plain
    assert list(Parameters(nn.DataParallel(torch.compile(model))).trained) == plain
    model.inner = torch.compile(model.inner)
    assert list(Parameters(model).trained) == plain


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (
            nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
            "odd is complex64; a trained",
        ),
        (nn.Parameter(torch.zeros(3, device="meta")), "odd is on the meta device"),
        (nn.Parameter(torch.zeros(0)), "odd is empty"),
        (nn.parameter.UninitializedParameter(), "odd has no shape yet"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(parameter: nn.Parameter, words: str):
    model = nn.Module()
    model.odd = parameter
    with pytest.raises(ConfigError, match=words):
        Parameters(model)


def test_integers_are_refused_if_they_are_trained_and_pinned_if_frozen():
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    assert list(Parameters(model).frozen) == ["table"]
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        Parameters(model.requires_grad_(False))


def test_another_model_is_told_by_its_first_three_differences():
    run, other = Parameters(Odd()), Odd()
    other.more, other.inner, other.scale = nn.Linear(3, 3), nn.Linear(12, 24), nn.Parameter(torch.zeros(2))
    del other.mix
    with pytest.raises(ConfigError) as caught:
        Parameters(other).check(run.tensors, run.frozen_digest())
    assert str(caught.value) == (
        "this model is not the run's: inner.bias is (24,) here and (12,) in the run; "
        "inner.weight is (24, 12) here and (12, 12) in the run; mix is missing here; and 3 more"
    )
    other = Odd()
    other.scale.requires_grad_(False)
    with pytest.raises(ConfigError, match="scale is frozen here"):
        Parameters(other).check(run.tensors, run.frozen_digest())
    with torch.no_grad():
        (other := Odd()).fixed.add_(1)
    with pytest.raises(ConfigError, match="its frozen parameters"):
        Parameters(other).check(run.tensors, run.frozen_digest())


def test_the_rounding_of_narrow_weights_does_not_differ_from_the_anchor():
    anchor = torch.randn(1000)
    weights = anchor.to(torch.bfloat16)
    assert torch.equal(values(weights, anchor), anchor)
    weights[7] += 1
    delta = anchor - values(weights, anchor)
    assert delta.nonzero().flatten().tolist() == [7]
    assert_close(delta[7], torch.tensor(-1.0), rtol=0, atol=0.02)


def test_a_tensor_that_is_not_contiguous_is_sent_as_it_is():
    weights = torch.randn(8, 4, dtype=torch.float64).T
    assert torch.equal(values(weights, torch.zeros(4, 8, dtype=torch.float64)), weights)
