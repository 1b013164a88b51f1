"""The fused step against torch's AdamW, our clipping and Muon: on a GPU, or under Triton's interpreter."""

import importlib.util
import os

import pytest
import torch
from torch.testing import assert_close

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from isthmus import gpu
from isthmus.config import InnerConfig
from isthmus.model.inner import InnerOpt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"embedding": (3, 50, 100), "w": (3, 64, 96), "norm": (3, 70)}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()
        for name, shape in SHAPES.items()
    }


def gradients(step: int, half: str | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    grads = {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in SHAPES.items()}
    for row in range(3):
        grads["w"][row] *= 10.0 ** (row - 2)  # some replicas are clipped, some are not
    return {name: g.bfloat16() if name == half else g for name, g in grads.items()}


@pytest.mark.parametrize("half", [None, "w"])
@pytest.mark.parametrize("by_stage", [False, True])
def test_fused_steps_are_the_plain_ones(monkeypatch, half, by_stage):
    config = InnerConfig(lr=1e-2, clip=50.0, weight_decay=0.1, warmup_steps=2)
    groups = torch.tensor([[0, 1, 1]] * 3, device=DEVICE) if by_stage else None
    monkeypatch.setattr(gpu, "usable", lambda device: False)
    plain = weights()
    reference = InnerOpt(plain, config, 10, stacked=True, groups=groups)
    monkeypatch.setattr(gpu, "usable", lambda device: True)
    params = weights()
    copies = {half: params[half].detach().bfloat16().requires_grad_()} if half else {}
    opt = InnerOpt(params, config, 10, stacked=True, groups=groups, copies=copies)
    assert opt.fused is not None
    for step in range(4):
        for name, grad in gradients(step, half).items():
            plain[name].grad = grad.float()
            copies.get(name, params[name]).grad = grad
        assert_close(opt.step(), reference.step(), rtol=1e-5, atol=0)
        for name in SHAPES:
            assert_close(params[name], plain[name], rtol=1e-5, atol=1e-6)
            assert_close(opt.second[name], reference.second[name], rtol=1e-4, atol=1e-9)
        if half:
            exact = {} if DEVICE == "cuda" else {"rtol": 2**-7, "atol": 0}  # the interpreter cuts bits off
            assert_close(copies[half], params[half].bfloat16(), **(exact or {"rtol": 0, "atol": 0}))
    assert opt.step_count == 4


def test_one_replica_takes_the_same_steps_also_clipped_by_a_given_norm(monkeypatch):
    """Without a leading axis, as a stage has its weights."""
    config = InnerConfig(lr=1e-2, clip=1.0, weight_decay=0.1, warmup_steps=0)

    def one(tensors):
        return {name: tensor.detach()[0].clone().requires_grad_() for name, tensor in tensors.items()}

    monkeypatch.setattr(gpu, "usable", lambda device: False)
    plain = one(weights())
    reference = InnerOpt(plain, config, 10)
    monkeypatch.setattr(gpu, "usable", lambda device: True)
    params = one(weights())
    copies = {"w": params["w"].detach().bfloat16().requires_grad_()}
    opt = InnerOpt(params, config, 10, copies=copies)
    for step in range(3):
        halves = [gradients(2 * step + i, "w") for i in range(2)]
        for name in SHAPES:
            total = sum(half[name][0].float() for half in halves)
            plain[name].grad, params[name].grad = total, total.clone()
        square = opt.squared_norm()
        assert_close(square, reference.squared_norm(), rtol=1e-5, atol=0)
        assert_close(opt.step(4 * square), reference.step(4 * square), rtol=1e-5, atol=0)
        for name in SHAPES:
            assert_close(params[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("half", [False, True])
def test_fused_steps_of_muon_are_the_plain_ones(monkeypatch, half, lead):
    """Matrices of two shapes, one of them tall, of one replica, or in stacks of which some are clipped."""
    config = InnerConfig(optimizer="muon", lr=1e-2, clip=50.0, weight_decay=0.1, warmup_steps=2)
    shapes = {"layers.0.w": (64, 96), "layers.1.w": (64, 96), "layers.1.v": (96, 64), "output": (50, 40)}
    matrices = [name for name in shapes if name.startswith("layers.")]

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(*lead, *shape, generator=generator).to(DEVICE) for name, shape in shapes.items()
        }

    monkeypatch.setattr(gpu, "usable", lambda device: False)
    plain = {name: w.requires_grad_() for name, w in drawn(0).items()}
    reference = InnerOpt(plain, config, 10, stacked=bool(lead))
    monkeypatch.setattr(gpu, "usable", lambda device: True)
    params = {name: w.requires_grad_() for name, w in drawn(0).items()}
    copies = {n: params[n].detach().bfloat16().requires_grad_() for n in matrices} if half else {}
    opt = InnerOpt(params, config, 10, stacked=bool(lead), copies=copies)
    for step in range(3):
        for name, grad in drawn(step + 1).items():
            grad *= torch.tensor([0.01, 0.1, 1.0], device=DEVICE).view(3, 1, 1) if lead else 1.0
            grad = grad.bfloat16() if name in copies else grad
            plain[name].grad = grad.float()
            copies.get(name, params[name]).grad = grad
        assert_close(opt.step(), reference.step(), rtol=1e-5, atol=0)
    for name, start in drawn(0).items():
        assert_close(opt.first[name], reference.first[name], rtol=1e-5, atol=1e-7)
        moved = (plain[name] - start).norm()  # bf16 rounds on a GPU, and is cut off by the interpreter
        assert (params[name] - plain[name]).norm() < (2e-2 if name in matrices else 1e-5) * moved
    for name, copy in copies.items():
        assert_close(copy, params[name].bfloat16(), rtol=0 if DEVICE == "cuda" else 2**-7, atol=0)
