"""A folder that was downloaded is data: nothing in it runs, and damaged files are one line."""

import json

import pytest
import torch
from planted import add_keys, plant_code
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.cli.main import main
from isthmus.data.tokenizer import load
from isthmus.errors import ConfigError
from isthmus.export.exported import ExportedFolder
from isthmus.export.harness import build

TEXT = "It was the best of times, it was"


def exported(runs, tmp_path, kind, *options):
    folder = tmp_path / f"{kind}-hf"
    as_ = [] if kind == "full" else ["--as", "pipelined"]
    assert main(["export", str(runs[kind]), "--to", "hf", str(folder), *as_, *options]) == 0
    return folder


@pytest.mark.parametrize("kind", ["full", "compressed", "finished", "learned"])
def test_the_harness_gets_the_model_of_the_folder_from_our_own_classes_and_runs_none_of_its_code(
    runs, tmp_path, kind
):
    folder = exported(runs, tmp_path, kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=kind != "full").eval()
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    hit = plant_code(folder)
    model, tokenizer = build(folder)
    ours = tokenizer(TEXT, return_tensors="pt").input_ids
    assert torch.equal(ours, tokens)
    with torch.no_grad():
        assert_close(model.eval()(tokens).logits, theirs(tokens).logits)
    assert type(model).__module__ in ("isthmus.export.modeling_isthmus", LLAMA)
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert not hit.exists()


LLAMA = "transformers.models.llama.modeling_llama"


def test_weights_in_bf16_stay_so_for_the_harness(runs, tmp_path):
    model, _ = build(exported(runs, tmp_path, "full", "--dtype", "bf16", "--force"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_no_command_runs_code_from_a_folder(runs, tmp_path, capsys):
    folder = exported(runs, tmp_path, "compressed")
    hit = plant_code(folder)
    assert main(["generate", str(folder), "It was", "--max-tokens", "3"]) == 0
    assert main(["eval", str(folder), "--corpus", "builtin:sample", "--batches", "1"]) == 0
    recipe = tmp_path / "compressed.toml"
    recipe.write_text((runs["compressed"] / "recipe.toml").read_text())
    started = ["--set", f"model.start={folder}", "--set", "outer.rounds=1", "--quiet"]
    assert main(["simulate", str(recipe), "--run", str(tmp_path / "again"), *started]) == 0
    words = ["--to", str(tmp_path / "corpus"), "--tokenizer", str(folder), "--validation", "0.5"]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(40)))
    assert main(["data", "prepare", str(texts), *words]) == 0
    assert not hit.exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"boundaries": [{"layer": 0, "basis": 0}]},
        {"boundaries": [{"layer": 10**30, "basis": 0}]},
        {"boundaries": [{"layer": 1, "basis": 7}]},
        {"boundaries": [{"layer": 1, "basis": "0"}]},
        {"boundaries": 3},
        {"wire": ["bf16"]},
        {"wire": "fp8"},
        {"open_share": "half"},
        {"frozen_table": True},
    ],
    ids=str,
)
def test_boundaries_that_make_no_sense_are_one_line(runs, tmp_path, capsys, keys):
    folder = exported(runs, tmp_path, "compressed")
    add_keys(folder / "config.json", **keys)
    capsys.readouterr()
    with pytest.raises(ConfigError, match="does not describe its boundaries"):
        build(folder)
    assert main(["generate", str(folder), "It was", "--as", "pipelined"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def template(pieces, ids):
    token = {"id": "x", "ids": [0] * ids, "tokens": ["<|endoftext|>"] * ids}
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}] * pieces
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [text, *single],
        "pair": [text],
        "special_tokens": {"x": token},
    }


def test_the_tokenizers_of_public_models_pass(folders):
    """LLaMA 2 prepends and replaces; LLaMA 3 adds a special token; some pad."""
    honest = json.loads((folders["full"] / "tokenizer.json").read_bytes())
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    change = {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, space]},
        "post_processor": template(pieces=1, ids=1),
        "padding": padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    }
    tokenizer = load(json.dumps(honest | change).encode(), "tokenizer.json")
    assert 2 < len(tokenizer.encode("a b").ids) < 20


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(folders, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((folders["full"] / name).read_bytes())
    add_keys(folder / "config.json", vocab_size=300)
    with pytest.raises(ConfigError, match="the model only 300"):
        ExportedFolder.open(folder).encoder()
