"""Muon: the layers' matrices take orthogonal steps, as torch's own does, alone and in stacks."""

from math import prod

import pytest
import torch
from torch.testing import assert_close

from isthmus.config import InnerConfig, parse_recipe
from isthmus.errors import ConfigError
from isthmus.layout.learning_rate import learning_rate
from isthmus.model.inner import InnerOpt
from isthmus.model.muon import orthogonalised, rms_factor
from isthmus.planner.memory import num_moments, replica_memory

SHAPES = {
    "tok_embeddings.weight": (40, 16),
    "layers.0.attention.wq.weight": (16, 16),
    "layers.0.feed_forward.w1.weight": (48, 16),
    "layers.1.feed_forward.w1.weight": (48, 16),
    "layers.1.feed_forward.w2.weight": (16, 48),
    "layers.1.attention_norm.weight": (16,),
    "output.weight": (40, 16),
}
MATRICES = [name for name, shape in SHAPES.items() if name.startswith("layers.") and len(shape) == 2]
MUON = {"optimizer": "muon", "lr": 1e-2}


def random_tensors(seed, lead=(), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*lead, *shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }


def leaves(tensors):
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


def test_singular_values_become_nearly_one_and_singular_vectors_stay():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 24, 24), (2, 40, 16), (2, 16, 40)):
        matrices = torch.randn(*shape, generator=generator, dtype=torch.float64)
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        turned = left.mT @ orthogonalised(matrices) @ right.mT
        values = turned.diagonal(dim1=-2, dim2=-1)
        assert_close(turned, torch.diag_embed(values), atol=1e-6, rtol=0)
        assert 0.3 < values.min() < values.max() < 1.3
        assert orthogonalised(matrices.float()).dtype == torch.bfloat16


def test_a_step_has_the_size_of_an_adamw_step():
    matrices = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = orthogonalised(matrices) * rms_factor(64, 256)
    assert step.square().mean().sqrt() == pytest.approx(0.2, rel=0.25)


def test_one_replica_is_torchs_muon_and_adamw_with_torchs_clipping():
    config = InnerConfig(**MUON, warmup_steps=2, clip=0.7)
    ours, theirs = leaves(random_tensors(0)), leaves(random_tensors(0))
    opt = InnerOpt(ours, config, total_steps=10)
    rest = [p for name, p in theirs.items() if name not in MATRICES]
    references = [
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.Muon(
            [theirs[name] for name in MATRICES],
            momentum=0.95,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        ),
    ]
    for step in range(6):
        for name, grad in random_tensors(step + 1).items():
            ours[name].grad, theirs[name].grad = grad.clone(), grad.clone()
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.7)
        for reference in references:
            reference.param_groups[0]["lr"] = learning_rate(step, config, 10)
            reference.step()
        opt.step()
    for name in SHAPES:  # products in bf16 round otherwise when several matrices are multiplied at once
        moved = (theirs[name] - random_tensors(0)[name]).norm()
        assert (ours[name] - theirs[name]).norm() < (2e-2 if name in MATRICES else 1e-5) * moved


def test_a_stack_steps_like_its_replicas_alone():
    config = InnerConfig(**MUON, warmup_steps=0, clip=1.0)
    replicas = [leaves(random_tensors(r, dtype=torch.float64)) for r in range(3)]
    stacked = {name: torch.stack([r[name].detach() for r in replicas]).requires_grad_() for name in SHAPES}
    together = InnerOpt(stacked, config, 10, stacked=True)
    alone = [InnerOpt(p, config, 10) for p in replicas]
    for step in range(4):
        for name, grad in random_tensors(100 + step, (3,), torch.float64).items():
            stacked[name].grad = grad.clone()
            for r in range(3):
                replicas[r][name].grad = grad[r].clone()
        together.step()
        for opt in alone:
            opt.step()
    for name in SHAPES:
        assert_close(stacked[name], torch.stack([r[name] for r in replicas]), rtol=1e-10, atol=1e-12)


def test_it_keeps_one_moment_for_a_matrix_and_goes_on_where_it_stopped():
    config = InnerConfig(**MUON, warmup_steps=0)
    straight, stopped = leaves(random_tensors(0)), leaves(random_tensors(0))
    opt, first = InnerOpt(straight, config, 10), InnerOpt(stopped, config, 10)
    assert set(opt.state()) == {f"first/{n}" for n in SHAPES} | {
        f"second/{n}" for n in SHAPES if n not in MATRICES
    }
    for step in range(6):
        if step == 3:
            saved, first = first.state(), InnerOpt(stopped, config, 10)
            first.restore(saved, 3)
        for name, grad in random_tensors(step + 1).items():
            straight[name].grad, stopped[name].grad = grad.clone(), grad.clone()
        opt.step()
        first.step()
    assert all(torch.equal(straight[name], stopped[name]) for name in SHAPES)


RECIPE = """
name = "muon"
[model]
preset = "nano"
[inner]
optimizer = "muon"
[[replicas]]
name = "rack"
processes = 2
"""


def test_the_plan_counts_its_moments():
    recipe = parse_recipe(RECIPE)
    adamw = parse_recipe(RECIPE, ["inner.optimizer=adamw"])
    shapes = recipe.model.shapes()
    assert num_moments(adamw, shapes) == 2 * recipe.model.num_parameters
    layers = [shape for name, shape in shapes.items() if name.startswith("layers.")]
    matrices = sum(prod(shape) for shape in layers if len(shape) == 2)
    assert num_moments(recipe, shapes) == 2 * recipe.model.num_parameters - matrices


def test_an_unknown_optimizer_is_refused_by_one_line():
    with pytest.raises(ConfigError, match=r"inner\.optimizer") as error:
        parse_recipe(RECIPE, ["inner.optimizer=sgd"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_the_plan_counts_one_moment_of_a_shards_matrices(sharding):
    adamw, muon = (
        parse_recipe(RECIPE, [f"inner.optimizer={name}", f"replicas.rack.sharding={sharding}"])
        for name in ("adamw", "muon")
    )
    layers = [shape for name, shape in muon.model.shapes().items() if name.startswith("layers.")]
    matrices = sum(prod(shape) for shape in layers if len(shape) == 2)
    two, one = (replica_memory(recipe, recipe.replicas[0], (1,))[0].moments for recipe in (adamw, muon))
    parts = 2 if sharding == "full" else 1
    assert two - one == pytest.approx(4 * matrices / parts, abs=8)
