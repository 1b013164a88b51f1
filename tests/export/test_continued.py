"""A folder of each family, continued by a mixed fleet: logits, text and harness as in transformers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_recipes import EDGE, RACK, recipe_text
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from isthmus.cli.main import main
from isthmus.config import dump_recipe, parse_recipe
from isthmus.export.harness import build
from isthmus.export.source import open_trained, pipelined_member
from isthmus.export.text_generator import open_generator
from isthmus.model.hf import read_config
from isthmus.model.llama import forward, rope_table
from isthmus.subspace.boundaries import boundary_functions

SHAPE = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, head_dim=16, rope_parameters=LLAMA3, tie_word_embeddings=True),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def continued(request, tmp_path_factory):
    """(class, start folder, run, plain folder, pipelined folder) of a family, and of full replicas only."""
    torch.set_num_threads(1)
    base, (kind, config) = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn_like(tensor))
    model.save_pretrained(base / "start")
    recipe = parse_recipe(recipe_text(RACK + EDGE))
    found = replace(read_config(base / "start"), start=str(base / "start"))
    for name, replicas in (("mixed", recipe.replicas), ("full", recipe.replicas[:1])):
        text = dump_recipe(replace(recipe, model=found, replicas=replicas))
        (base / f"{name}.toml").write_text(text)
        assert main(["simulate", str(base / f"{name}.toml"), "--run", str(base / name), "--quiet"]) == 0
        assert main(["export", str(base / name), "--to", "hf", str(base / f"{name}-hf"), "--force"]) == 0
    pipelined = ["export", str(base / "mixed"), "--to", "hf", str(base / "pp"), "--as", "pipelined"]
    assert main(pipelined) == 0
    return kind, base


def tokens():
    return torch.randint(0, 1024, (2, 16), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(trained, member=None):
    fns, ids = None, tokens()
    if member:
        fns = boundary_functions(
            trained.recipe, [member], trained.bases, trained.table, len(ids), params=trained.params
        )
    model = trained.recipe.model
    return forward(trained.params, ids, model, rope_table(model, ids.shape[1]), fns)


def apart(one, two):
    return ((one - two).abs().max() / two.std()).item()


@pytest.mark.parametrize("fleet", ["mixed", "full"])
def test_a_continued_model_has_our_logits_in_transformers_own_class(continued, fleet):
    kind, base = continued
    trained = open_trained(str(base / fleet))
    model = AutoModelForCausalLM.from_pretrained(base / f"{fleet}-hf").eval()
    assert type(model) is (LlamaForCausalLM if kind is MistralForCausalLM else kind)
    with torch.no_grad():
        ours, wanted = logits(trained), model(tokens()).logits
        start = AutoModelForCausalLM.from_pretrained(base / "start").eval()(tokens()).logits
    assert apart(ours, wanted) < 1e-5
    assert apart(ours, start) > 1e-3  # it was trained
    one_table = fleet == "full" and read_config(base / "start").tie_embeddings
    assert model.config.tie_word_embeddings == one_table
    assert ("lm_head.weight" in load_file(base / f"{fleet}-hf" / "model.safetensors")) != one_table


def test_with_its_boundaries_it_has_our_pipelined_logits_in_remote_code_and_for_the_harness(continued):
    _, base = continued
    trained = open_trained(str(base / "mixed"))
    ours = logits(trained, pipelined_member(trained.recipe))
    theirs = AutoModelForCausalLM.from_pretrained(base / "pp", trust_remote_code=True).eval()
    for model in (theirs, build(base / "pp")[0].eval()):
        with torch.no_grad():
            assert (
                apart(model(tokens()).logits, ours) < 5e-4
            )  # a stream in bf16 on the wire rounds either way
    assert apart(ours, logits(trained)) > 1e-3


@pytest.mark.parametrize("fleet", ["mixed", "full"])
def test_the_harness_and_generate_have_the_plain_model(continued, fleet):
    _, base = continued
    folder = base / f"{fleet}-hf"
    wanted = logits(open_trained(str(base / fleet)))
    model = build(folder)[0].eval()
    with torch.no_grad():
        assert apart(model(tokens()).logits, wanted) < 1e-5
    generator = open_generator(str(folder))
    said = list(generator.tokens([5, 6, 7], 8, temperature=0, top_p=1.0, seed=0))
    model.generation_config.eos_token_id = generator.end_id
    theirs = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    assert said == theirs[: len(said)]


def test_the_harness_builds_a_folder_with_a_wire_of_few_bits(continued, tmp_path):
    shutil.copytree(continued[1] / "pp", tmp_path / "pp")
    config = json.loads((tmp_path / "pp" / "config.json").read_text())
    (tmp_path / "pp" / "config.json").write_text(json.dumps(config | {"wire": "int5"}))
    assert build(tmp_path / "pp")[0].bits == 5


def test_its_card_names_the_family_and_the_key_heads(continued):
    kind, base = continued
    card = (base / "mixed-hf" / "README.md").read_text()
    assert "4 heads, 2 for keys and values" in card
    config = json.loads((base / "mixed-hf" / "config.json").read_text())
    assert f"A {config['architectures'][0]} of" in card
    assert f"tags: [{config['model_type']}, isthmus]" in card
    assert kind.__name__ == config["architectures"][0] or kind is MistralForCausalLM
