"""`isthmus.SparseLoCo`: the method for M copies in one process, against eq. 2 in float64."""

import copy

import pytest
import torch
from models import Equation2, Odd, batch, train_step
from torch.testing import assert_close

import isthmus
from isthmus.errors import ConfigError, RunError
from isthmus.loop.tensors import Parameters

PLAIN = {"keep": 8, "chunk_side": 16, "values": "fp32", "clip": "none"}


@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_round_of_m_copies_is_equation_2(num_copies: int):
    models = [Odd(dtype=torch.float64) for _ in range(num_copies)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    outer = isthmus.SparseLoCo(models, inner_steps=3, **PLAIN)
    names = Parameters(models[0]).trained
    plain = Equation2({n: p.detach() for n, p in names.items()}, num_copies, 8, 16, beta=0.95)
    for step in range(1, 10):
        for m, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_step(model, optimizer, batch(m, step))
        params = [{n: p.detach().clone() for n, p in Parameters(model).trained.items()} for model in models]
        assert outer.step() is (step % 3 == 0)
        if step % 3 == 0:
            plain.round(params)
            for model in models:
                found = {n: p.detach() for n, p in Parameters(model).trained.items()}
                assert_close(found, plain.theta, rtol=0, atol=1e-6)  # what is sent is float32
    assert outer.round == 3


def test_copies_start_from_the_first_ones_weights():
    first, second = Odd(seed=0), Odd(seed=1)
    with torch.no_grad():
        second.fixed.copy_(first.fixed)
    isthmus.SparseLoCo([first, second], inner_steps=5)
    assert_close(dict(second.named_parameters()), dict(first.named_parameters()), rtol=0, atol=0)


def test_two_copies_learn_and_diloco_is_a_setting():
    for method in ("sparseloco", "diloco"):
        models = [Odd(), Odd()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        outer, losses = isthmus.SparseLoCo(models, inner_steps=5, method=method), []
        for step in range(60):
            for m, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                losses.append(float(train_step(model, optimizer, batch(m, step))))
            outer.step()
        assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), method


def test_bad_copies_and_settings_are_one_line():
    model = Odd()
    for models, settings, words in (
        ([], {}, "different copies"),
        ([model, model], {}, "different copies"),
        ([model], {"keeps": 3}, 'no setting "keeps"; did you mean "keep"'),
        ([model], {"keep": 0}, "outer.keep is 0"),
        ([model], {"method": "adamw"}, "averages gradients"),
        ([model, torch.nn.Linear(2, 2)], {}, "this model is not the run's: the run has no bias; embed"),
    ):
        with pytest.raises(ConfigError, match=words):
            isthmus.SparseLoCo(models, inner_steps=5, **settings)


def test_weights_that_are_not_finite_change_no_anchor():
    models = [Odd(), copy.deepcopy(Odd())]
    outer = isthmus.SparseLoCo(models, inner_steps=1)
    before = {name: tensor.clone() for name, tensor in outer.anchor.items()}
    with torch.no_grad():
        models[1].scale.fill_(float("nan"))
    with pytest.raises(RunError, match="not finite"):
        outer.step()
    assert_close(outer.anchor, before, rtol=0, atol=0)
