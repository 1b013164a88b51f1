"""The model: the same function alone, stacked, split; causal; at ln V when untrained."""

import math

import pytest
import torch
from torch.testing import assert_close

from isthmus.config import PRESETS, ModelConfig
from isthmus.model import Llama, presets
from isthmus.model.llama import forward, head, init_params, rope_table, rotate, run_layers, token_losses

TINY = ModelConfig(vocab=50, width=16, layers=4, heads=2, ffn=24, context=12)


def params64(seed=0):
    return {name: value.double() for name, value in init_params(TINY, seed).items()}


def rope64():
    return rope_table(TINY, TINY.context, torch.float64)


def tokens(*shape):
    return torch.randint(0, TINY.vocab, shape, generator=torch.Generator().manual_seed(1))


def test_module_has_the_shared_names_and_the_counted_parameters():
    net = Llama(PRESETS["nano"])
    assert [name for name, _ in net.named_parameters()] == list(presets["nano"].shapes())
    assert sum(p.numel() for p in net.parameters()) == presets["nano"].num_parameters


def test_parameters_are_counted_on_the_meta_device_without_drawing_them():
    with torch.device("meta"):
        net = Llama(presets["1b"])
    assert all(p.is_meta for p in net.parameters())
    assert sum(p.numel() for p in net.parameters()) == presets["1b"].num_parameters == 1_204_881_408


def test_a_stack_of_replicas_computes_what_each_computes_alone():
    replicas = [params64(seed) for seed in range(3)]
    stacked = {name: torch.stack([p[name] for p in replicas]) for name in replicas[0]}
    ids = tokens(3, 2, 12)
    together = forward(stacked, ids, TINY, rope64())
    for r, params in enumerate(replicas):
        assert_close(together[r], forward(params, ids[r], TINY, rope64()))


def test_stages_in_a_row_are_the_whole_model():
    params, ids = params64(), tokens(2, 12)
    x = torch.nn.functional.embedding(ids, params["tok_embeddings.weight"])
    x = run_layers(params, range(0, 3), x, TINY, rope64())
    x = run_layers(params, range(3, 4), x, TINY, rope64())
    assert_close(head(params, x, TINY), forward(params, ids, TINY, rope64()))


def test_a_later_token_changes_no_earlier_logit():
    params, ids = params64(), tokens(1, 12)
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % TINY.vocab
    before, after = forward(params, ids, TINY, rope64()), forward(params, changed, TINY, rope64())
    assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rope_leaves_only_distances():
    cos, sin = rope64()
    q, k = torch.randn(2, 1, 12, 8, dtype=torch.float64)
    same_q, same_k = q[:, :1].expand(1, 12, 8), k[:, :1].expand(1, 12, 8)
    scores = rotate(same_q, cos, sin) @ rotate(same_k, cos, sin).mT
    assert_close(scores[0, 5, 3], scores[0, 9, 7])


def test_an_untrained_model_is_at_ln_v():
    ids = tokens(8, 12)
    loss = token_losses(forward(params64(), ids, TINY, rope64()), ids)
    assert loss.item() == pytest.approx(math.log(TINY.vocab), abs=0.05)


def test_first_values_depend_on_seed_and_name_alone():
    one, two = init_params(TINY, 0), init_params(TINY, 0)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["layers.0.attention.wq.weight"], one["layers.0.attention.wk.weight"])
    assert not torch.equal(one["output.weight"], init_params(TINY, 1)["output.weight"])


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="context"):
        Llama(TINY)(tokens(1, 13))


def test_first_values_do_not_depend_on_torchs_default_type():
    drawn = init_params(TINY, seed=3)
    torch.set_default_dtype(torch.float64)
    try:
        again = init_params(TINY, seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)
    assert {p.dtype for p in again.values()} == {torch.float32}
