"""Outer methods against what a reader would write with torch's own optimisers."""

import torch
from torch.testing import assert_close

from isthmus.config import OuterConfig
from isthmus.outer.baselines import DiLoCo
from isthmus.outer.sparseloco import SparseLoCo

SHAPES = {"w": (8, 12), "b": (5,)}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(*s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def zeros():
    return {name: torch.zeros(*shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_diloco_is_torchs_nesterov_on_the_mean_pseudo_gradient():
    anchor = tensors(0)
    reference = {name: t.clone().requires_grad_() for name, t in anchor.items()}
    method = DiLoCo(anchor, OuterConfig(method="diloco"))
    sgd = torch.optim.SGD(list(reference.values()), lr=0.7, momentum=0.9, nesterov=True)
    for t in range(4):
        replicas = [{n: anchor[n] - 0.1 * g for n, g in tensors(10 * t + m).items()} for m in range(3)]
        for name, param in reference.items():
            param.grad = torch.stack([param.detach() - r[name] for r in replicas]).mean(0)
        sgd.step()
        method.apply([method.contribute(r, {}) for r in replicas])
        for name in SHAPES:
            assert_close(anchor[name], reference[name].detach())


def test_sparseloco_is_eq_2_line_by_line():
    """A slow plain reference: loops over chunks, replicas and entries."""
    config = OuterConfig(keep=512, values="fp64", feedback_decay=0.9, lr=0.8)  # 1/8 of each chunk
    anchor = tensors(0)
    plain = {name: t.clone() for name, t in anchor.items()}
    method = SparseLoCo(anchor, config)
    feedback, errors = [zeros() for _ in range(3)], [zeros() for _ in range(3)]
    for t in range(3):
        replicas = [{n: anchor[n] - g for n, g in tensors(10 * t + m + 1).items()} for m in range(3)]
        method.apply([method.contribute(r, f) for r, f in zip(replicas, feedback, strict=True)])
        for name, theta in plain.items():
            total, count = torch.zeros_like(theta), torch.zeros_like(theta)
            for params, e in zip(replicas, errors, strict=True):
                accumulated = 0.9 * e[name] + (theta - params[name])
                flat = accumulated.flatten()  # every tensor here is one chunk
                kept = max(1, round(flat.numel() * 512 / 4096))
                chosen = sorted(range(flat.numel()), key=lambda i: -abs(flat[i]))[:kept]
                sent = torch.zeros_like(flat)
                for i in chosen:
                    sent[i] = flat[i]
                    total.view(-1)[i] += flat[i]
                    count.view(-1)[i] += 1
                e[name] = accumulated - sent.view_as(theta)
            theta -= 0.8 * total / count.clamp(min=1)
        for name in SHAPES:
            assert_close(anchor[name], plain[name])
            for ours, reference in zip(feedback, errors, strict=True):
                assert_close(ours[name], reference[name])


def test_a_payload_that_missed_its_round_returns_to_the_feedback():  # docs/method.md, Error feedback
    for values in ("fp64", "2bit"):
        dtype = torch.float64 if values == "fp64" else torch.float32
        anchor = {name: t.to(dtype) for name, t in tensors(0).items()}
        method = SparseLoCo(anchor, OuterConfig(keep=512, values=values, feedback_decay=1.0))
        feedback = {name: t.to(dtype) for name, t in zeros().items()}
        params = {name: t.to(dtype) for name, t in tensors(1).items()}
        sent = method.contribute(params, feedback)
        method.take_back(sent, feedback)
        for name in SHAPES:
            assert_close(feedback[name], anchor[name] - params[name])


def test_the_lr_scaled_feedback_of_public_code_is_an_option():  # docs/method.md, Error feedback
    for scaled, factor in ((False, 1.0), (True, 0.5)):
        anchor = tensors(0)
        method = SparseLoCo(anchor, OuterConfig(keep=4096, values="fp64", lr=0.5, feedback_lr_scaled=scaled))
        params = tensors(1)
        before = {name: t.clone() for name, t in anchor.items()}
        method.apply([method.contribute(params, zeros())])
        for name in SHAPES:
            assert_close(before[name] - anchor[name], 0.5 * factor * (before[name] - params[name]))
