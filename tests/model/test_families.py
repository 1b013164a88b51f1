"""Tiny models of every family: transformers' logits and gradients, into and out of a folder."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from isthmus.config import PRESETS, ModelConfig
from isthmus.config.model import RopeScaling
from isthmus.errors import ConfigError
from isthmus.model.decode import Decoder
from isthmus.model.hf import check_same, family, hf_config, hf_name, read_config, read_params
from isthmus.model.llama import forward, init_params, rope_table, token_losses

SHAPE = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
# Short enough that fast, slow and blended frequencies all occur.
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, head_dim=16)),
    "llama-3": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters=LLAMA3 | {"rope_theta": 500.0}, tie_word_embeddings=True),
    ),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE, sliding_window=32, use_sliding_window=False, tie_word_embeddings=True),
    ),
    "qwen2-untied": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "qwen3-untied": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=8)),
}


def theirs(name: str) -> PreTrainedModel:
    """A model whose biases and gains are not at their first values, and whose attention is not flat."""
    torch.manual_seed(0)
    kind, config = FAMILIES[name]
    model = kind(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(2).add_(0.1 * torch.randn_like(tensor))
    return model


def folder_of(name: str, at: Path) -> Path:
    theirs(name).save_pretrained(at)
    return at


def tokens() -> Tensor:
    return torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def logits_of(params: dict[str, Tensor], model: ModelConfig) -> Tensor:
    ids = tokens()
    return forward(params, ids, model, rope_table(model, ids.shape[1]))


def apart(one: Tensor, two: Tensor) -> float:
    """The largest difference in standard deviations of the second."""
    return ((one - two).abs().max() / two.std()).item()


def change(folder: Path, **keys: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path)
    config, ids = read_config(tmp_path), tokens()
    params = {name: t.requires_grad_() for name, t in read_params(tmp_path, config).items()}
    ours, wanted = logits_of(params, config), model(ids).logits
    assert apart(ours, wanted) < 1e-5
    token_losses(ours[:, :-1], ids[:, 1:]).backward()
    token_losses(wanted[:, :-1], ids[:, 1:]).backward()
    grads = {name: tensor.grad for name, tensor in model.named_parameters()}
    assert {hf_name(name) for name in params} == set(grads)
    for name, param in params.items():
        assert apart(param.grad, grads[hf_name(name)]) < 1e-4, name


@pytest.mark.parametrize("name", FAMILIES)
def test_what_changes_the_function_changes_the_logits(name, tmp_path):
    """So the comparison above can fail."""
    config = read_config(folder_of(name, tmp_path))
    params = read_params(tmp_path, config)
    wanted = logits_of(params, config)
    other = {
        "eps": replace(config, norm_eps=config.norm_eps + 1e-3),
        "theta": replace(config, rope_theta=config.rope_theta * 1.1),
        "scaling": replace(
            config, rope_scaling=RopeScaling(type="llama3", factor=6.0, original_max_position_embeddings=32)
        ),
    }
    for what, changed in other.items():
        assert apart(logits_of(params, changed), wanted) > 1e-3, what
    for one in [n for n in params if n.endswith(("bias", "q_norm.weight", "k_norm.weight"))]:
        assert apart(logits_of(params | {one: params[one] * 1.1}, config), wanted) > 1e-4, one


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_folder_is_the_same_function_in_transformers_own_class(name, tmp_path):
    source = folder_of(name, tmp_path / "from")
    config = read_config(source)
    params = read_params(source, config)
    there = tmp_path / "to"
    there.mkdir()
    (there / "config.json").write_text(json.dumps(hf_config(config, 0, "fp32")))
    from safetensors.torch import save_file

    save_file({hf_name(n): t for n, t in params.items()}, there / "model.safetensors", {"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(there, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = LlamaForCausalLM if name == "mistral" else FAMILIES[name][0]
    assert type(model) is expected
    with torch.no_grad():
        assert apart(logits_of(params, config), model(tokens()).logits) < 1e-5
    assert read_config(there) == config
    again = read_params(there, config)
    assert all(torch.equal(again[name], params[name]) for name in params)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_gives_the_same_logits_token_by_token(name, tmp_path):
    config = read_config(folder_of(name, tmp_path))
    params = read_params(tmp_path, config)
    decoder, row = Decoder(params, config), tokens()[0]
    fed = [decoder.feed(row[:7].tolist()), *(decoder.feed([token]) for token in row[7:].tolist())]
    assert_close(torch.stack(fed), logits_of(params, config)[0, 6:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stack_of_replicas_computes_what_each_computes_alone(name, tmp_path):
    config = read_config(folder_of(name, tmp_path))
    drawn = [init_params(config, seed) for seed in range(3)]
    replicas = [{n: t.double() + 0.1 * torch.randn_like(t).double() for n, t in p.items()} for p in drawn]
    stacked = {n: torch.stack([p[n] for p in replicas]) for n in replicas[0]}
    ids, rope = tokens().view(2, 40).expand(3, 2, 40), rope_table(config, 40, torch.float64)
    together = forward(stacked, ids, config, rope)
    for r, params in enumerate(replicas):
        assert_close(together[r], forward(params, ids[r], config, rope))


def test_first_values_of_biases_are_zero_and_of_gains_one():
    bias = init_params(replace(PRESETS["nano"], attention_bias=True), 0)
    assert not bias["layers.3.attention.wq.bias"].any()
    gain = init_params(replace(PRESETS["nano"], qk_norm=True), 0)
    assert bool((gain["layers.3.attention.k_norm.weight"] == 1).all())


PUBLISHED = {
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "qwen3-0.6b": 596_049_920,
    "qwen2.5-0.5b": 494_032_768, "llama3.2-1b": 1_235_814_400,
}  # fmt: skip


@pytest.mark.parametrize("preset", [*PUBLISHED, "178m"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_preset_has_the_parameters_that_transformers_counts(preset, tied):
    model = replace(PRESETS[preset], tie_embeddings=tied)
    config = hf_config(model, 0, "fp32")
    config.pop("architectures")
    kind = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}[family(model)]
    with torch.device("meta"):
        counted = kind(kind.config_class(**config)).num_parameters()
    assert counted == model.num_parameters == sum(math.prod(shape) for shape in model.shapes().values())
    if tied and preset in PUBLISHED:
        assert counted == PUBLISHED[preset]


def test_scaling_and_base_are_read_in_either_spelling(tmp_path):
    folder = folder_of("llama-3", tmp_path)
    wanted = read_config(folder)
    assert wanted.rope_scaling.factor == 4.0
    old = {"rope_parameters": "gone", "rope_theta": 500.0}
    assert read_config(change(folder, **old, rope_scaling=LLAMA3)) == wanted
    spelt = {"type": "llama3"} | {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    assert read_config(change(folder, rope_scaling=spelt)) == wanted


def test_a_folder_that_states_a_tie_and_has_two_tables_is_untied_as_in_transformers(tmp_path):
    folder = change(folder_of("qwen2-untied", tmp_path), tie_word_embeddings=True)
    config = read_config(folder)
    assert not config.tie_embeddings
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits
    assert apart(logits_of(read_params(folder, config), config), wanted) < 1e-5


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("mistral", {"sliding_window": 32}, "sliding_window = 32"),
        ("mistral", {"sliding_window": "gone"}, "does not state sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "layer_types": None}, "sliding_window"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = yarn"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = linear"),
        ("llama-3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "does not state factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each kind of layer"),
        ("qwen3", {"model_type": "qwen3_moe"}, 'of type "qwen3_moe"'),
        ("qwen3", {"head_dim": "gone"}, "does not state head_dim"),
        ("mistral", {"num_key_value_heads": "gone"}, "does not state num_key_value_heads"),
        ("llama", {"num_key_value_heads": 4}, "model.kv_heads is 4"),
    ],
)
def test_what_ours_cannot_compute_is_refused_in_one_line(name, keys, says, tmp_path):
    folder = change(folder_of(name, tmp_path), **keys)
    with pytest.raises(ConfigError, match=says) as refused:
        read_config(folder)
    assert "\n" not in str(refused.value)


def test_a_window_as_long_as_the_context_cuts_nothing(tmp_path):
    assert read_config(change(folder_of("mistral", tmp_path), sliding_window=64)).context == 64


def test_another_model_is_told_key_by_key_with_settings_that_a_recipe_takes(tmp_path):
    there = read_config(folder_of("llama-3", tmp_path))
    wanted = replace(PRESETS["smollm2-135m"], vocab=96, width=48, layers=2, ffn=80, context=64, heads=6)
    with pytest.raises(ConfigError, match=r"kv_heads is 2 there and 3 here") as refused:
        check_same(tmp_path, there, wanted)
    for setting in ("model.kv_heads=2", 'model.rope_scaling.type="llama3"', "model.rope_scaling.factor=4.0"):
        assert setting in str(refused.value)
    untied = replace(there, tie_embeddings=False)
    check_same(tmp_path, there, untied)  # its head begins as a copy
    with pytest.raises(ConfigError, match=r"set model\.tie_embeddings=false"):
        check_same(tmp_path, untied, there)
