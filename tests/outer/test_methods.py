"""Outer methods against what a reader would write with torch's own optimisers."""

import pytest
import torch
from torch.testing import assert_close

from isthmus.config import OuterConfig
from isthmus.layout.chunks import KINDS
from isthmus.outer import outer_method
from isthmus.outer.feedback import settle
from isthmus.outer.methods import DiLoCo
from isthmus.outer.sparseloco import SparseLoCo, plain_round
from isthmus.sparse.topk import decode

SHAPES = {"w": (8, 12), "b": (5,)}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(*s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def zeros():
    return {name: torch.zeros(*shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_diloco_is_torchs_nesterov_on_the_mean_pseudo_gradient():
    anchor = tensors(0)
    reference = {name: t.clone().requires_grad_() for name, t in anchor.items()}
    method = DiLoCo(anchor, OuterConfig(method="diloco", clip="none"))
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
    config = OuterConfig(keep=512, values="fp64", feedback_decay=0.9, lr=0.8, clip="none")  # 1/8 of a chunk
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", ["contributors", "all"])
@pytest.mark.parametrize("clip", ["none", "median"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_round_through_the_codec_has_the_bits_of_the_plain_round(kind, aggregation, clip, scaled):  # eq. 2
    config = OuterConfig(
        keep=40, values=kind, aggregation=aggregation, clip=clip, feedback_lr_scaled=scaled, lr=0.8
    )
    shapes = {"w": (128, 192), "norm": (192,), "odd": (67, 131), "scalar": ()}
    dtype = torch.float64 if kind == "fp64" else torch.float32

    def random(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}

    anchor, theta = random(0), random(0)
    feedback, plain = ([random(m) for m in (1, 2, 3)] for _ in range(2))
    method = outer_method(config, anchor)
    for t in range(3):
        params = [random(10 * (t + 1) + m) for m in range(3)]
        packed = method.codec.pack_all(method.contribute_all(params, feedback))
        method.apply(method.codec.unpack_all(packed))
        plain_round(theta, params, plain, config)
        for name in shapes:
            assert torch.equal(anchor[name], theta[name])
            assert all(torch.equal(ours[name], e[name]) for ours, e in zip(feedback, plain, strict=True))


def test_a_recipe_names_its_outer_method():
    assert type(outer_method(OuterConfig(), tensors(0))) is SparseLoCo
    assert type(outer_method(OuterConfig(method="diloco"), tensors(0))) is DiLoCo


@pytest.mark.parametrize("method", ["sparseloco", "diloco"])
def test_by_default_one_of_four_moves_no_tensor_further_than_the_others_do(method):
    """docs/method.md, Aggregation: without the clip it decides where the anchor goes."""
    for clip, bounded in ((OuterConfig().clip, True), ("none", False)):
        anchor = tensors(0)
        before = {name: t.clone() for name, t in anchor.items()}
        outer = outer_method(OuterConfig(method=method, values="fp64", keep=4096, clip=clip), anchor)
        updates = [{name: 0.1 * g for name, g in tensors(m).items()} for m in range(1, 4)]
        updates.append({name: -1e6 * g for name, g in tensors(4).items()})
        outer.apply([outer.contribute({n: before[n] - u[n] for n in u}, zeros()) for u in updates])
        for name in SHAPES:
            largest = max(update[name].norm() for update in updates[:3])
            moved = (anchor[name] - before[name]).norm() / outer.config.step_size
            assert (moved <= 1.9 * largest) == bounded  # 1.9: diloco's first step with momentum


@pytest.mark.parametrize("values", ["fp64", "2bit", "fp32", "bf16"])
def test_the_feedback_follows_what_counts_of_a_proposed_update(values):  # docs/method.md, Error feedback
    """Counted: the bits of eq. 2. Not counted: all of c = beta e + Delta is kept. Sent by somebody else:
    emptied where that has an entry, so that nothing can be sent twice."""
    dtype = torch.float64 if values == "fp64" else torch.float32
    anchor = {name: t.to(dtype) for name, t in tensors(0).items()}
    method = SparseLoCo(anchor, OuterConfig(keep=512, values=values, feedback_decay=0.9))
    params = {name: t.to(dtype) for name, t in tensors(1).items()}
    before = {name: t.to(dtype) for name, t in tensors(2).items()}
    usual, kept, other = ({name: t.clone() for name, t in before.items()} for _ in range(3))
    sent = method.contribute(params, usual)
    proposed = method.propose(params, kept)
    assert method.codec.pack_many(proposed) == method.codec.pack_many(sent)
    assert method.codec.pack_many(method.propose_again(params, kept)) == method.codec.pack_many(sent)
    method.fold(params, other)
    for name in SHAPES:
        assert torch.equal(kept[name], before[name] * 0.9 + (anchor[name] - params[name]))
        assert torch.equal(kept[name], other[name])
    settle(kept, None, known=False)
    carried = {name: t.clone() for name, t in kept.items()}
    settle(kept, sent, known=True)
    settle(other, sent, known=False)
    for name in SHAPES:
        assert torch.equal(kept[name], usual[name])
        held = decode(sent[name]) != 0
        assert torch.equal(other[name], carried[name].masked_fill(held, 0.0))


def test_the_lr_scaled_feedback_of_public_code_is_an_option():  # docs/method.md, Error feedback
    for scaled, factor in ((False, 1.0), (True, 0.5)):
        anchor = tensors(0)
        method = SparseLoCo(anchor, OuterConfig(keep=4096, values="fp64", lr=0.5, feedback_lr_scaled=scaled))
        params = tensors(1)
        before = {name: t.clone() for name, t in anchor.items()}
        method.apply([method.contribute(params, zeros())])
        for name in SHAPES:
            assert_close(before[name] - anchor[name], 0.5 * factor * (before[name] - params[name]))
