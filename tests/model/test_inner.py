"""InnerOpt against torch's own optimiser, alone and stacked."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from isthmus.config import InnerConfig
from isthmus.layout.learning_rate import learning_rate
from isthmus.model.inner import InnerOpt, clip_

SHAPES = {"a": (6, 4), "b": (4,), "c": (3, 8)}


def random_tensors(seed, lead=()):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def leaves(tensors):
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


def test_one_replica_is_torchs_adamw_with_torchs_clipping():
    config = InnerConfig(lr=1e-2, warmup_steps=2, clip=0.7)
    ours, theirs = leaves(random_tensors(0)), leaves(random_tensors(0))
    opt = InnerOpt(ours, config, total_steps=10)
    reference = torch.optim.AdamW(list(theirs.values()), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(6):
        for name, grad in random_tensors(step + 1).items():
            ours[name].grad, theirs[name].grad = grad.clone(), grad.clone()
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.7)
        reference.param_groups[0]["lr"] = learning_rate(step, config, 10)
        reference.step()
        opt.step()
    for name in SHAPES:
        assert_close(ours[name], theirs[name])


@pytest.mark.parametrize("modified", [False, True])
def test_a_stack_steps_like_its_replicas_alone(modified):
    config = InnerConfig(lr=1e-2, warmup_steps=0, clip=1.0)
    replicas = [leaves(random_tensors(r)) for r in range(3)]
    stacked = {name: torch.stack([r[name].detach() for r in replicas]).requires_grad_() for name in SHAPES}
    mask = torch.tensor([True, False, True])
    together = InnerOpt(stacked, config, 10, stacked=True, modified={"a": mask} if modified else None)
    alone = [
        InnerOpt(p, config, 10, modified={"a": mask[r : r + 1]} if modified else None)
        for r, p in enumerate(replicas)
    ]
    for step in range(4):
        grads = random_tensors(100 + step, lead=(3,))
        for name, grad in grads.items():
            stacked[name].grad = grad.clone()
            for r in range(3):
                replicas[r][name].grad = grad[r].clone()
        together.step()
        for opt in alone:
            opt.step()
    for name in SHAPES:
        assert_close(stacked[name], torch.stack([r[name] for r in replicas]))


def test_modified_adamw_keeps_a_matrix_in_the_subspace_its_gradients_are_in():  # Table 5d
    config = InnerConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1, clip=0)
    basis = torch.linalg.qr(
        torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )[0]
    projector = basis @ basis.T

    def outside(mask):
        weight = (projector @ random_tensors(0)["a"]).requires_grad_()
        other = random_tensors(0)["b"].requires_grad_()
        opt = InnerOpt({"a": weight, "b": other}, config, 10, modified={"a": torch.tensor([mask])})
        for step in range(5):
            weight.grad, other.grad = projector @ random_tensors(step + 1)["a"], torch.ones_like(other)
            opt.step()
        return (weight - projector @ weight).norm().item()

    assert outside(True) < 1e-12
    assert outside(False) > 1e-3


def test_each_stage_clips_on_its_own_when_asked():  # docs/method.md, The inner optimiser
    grads = random_tensors(3, lead=(2,))
    reference = {name: g.clone() for name, g in grads.items()}
    groups = torch.tensor([[0, 0, 1], [0, 1, 1]])
    clip_(grads, 1.0, groups, stacked=True)
    for r in range(2):
        for stage in range(2):
            names = [n for n, g in zip(SHAPES, groups[r].tolist(), strict=True) if g == stage]
            norm = torch.cat([reference[n][r].flatten() for n in names]).norm()
            for n in names:
                assert_close(grads[n][r], reference[n][r] * min(1.0, 1.0 / (norm + 1e-6)))


def test_schedule_warms_up_from_a_tenth_and_ends_at_a_tenth():
    config = InnerConfig(lr=1.0, warmup_steps=10)
    rates = [learning_rate(step, config, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1)
    assert all(a <= b for a, b in pairwise(rates[:11]))
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_a_restored_optimiser_goes_on_as_if_never_stopped():
    config = InnerConfig(lr=1e-2, warmup_steps=0)
    straight, stopped = leaves(random_tensors(0)), leaves(random_tensors(0))
    opt, first = InnerOpt(straight, config, 10), InnerOpt(stopped, config, 10)
    for step in range(6):
        if step == 3:
            saved, first = first.state(), InnerOpt(stopped, config, 10)
            first.restore(saved, 3)
        for name, grad in random_tensors(step + 1).items():
            straight[name].grad, stopped[name].grad = grad.clone(), grad.clone()
        opt.step()
        first.step()
    assert all(torch.equal(straight[name], stopped[name]) for name in SHAPES)


def test_a_replica_that_was_away_takes_the_learning_rate_of_the_run():
    config = InnerConfig(lr=1e-2, warmup_steps=5)
    params = leaves(random_tensors(0))
    opt = InnerOpt(params, config, 100)
    opt.advance(40)
    assert opt.lr == learning_rate(40, config, 100)
    for name, grad in random_tensors(1).items():
        params[name].grad = grad
    opt.update()
    assert opt.step_count == 1
    opt.step(inner_step=41)
    assert opt.lr == learning_rate(41, config, 100)
    assert opt.step_count == 2
