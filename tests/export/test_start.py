"""A run may begin where another model ended: in a Hugging Face folder, checked, the same on all machines."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from isthmus.cli.main import main
from isthmus.config import load_recipe
from isthmus.errors import ConfigError, RunError
from isthmus.export.source import open_trained
from isthmus.model.hf import read_config, read_params
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.replay import Replay
from isthmus.runtime.create import create
from isthmus.runtime.preflight import check_start
from isthmus.store.objects import open_store


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of an exported folder, to be spoilt."""
    shutil.copytree(folders["mixed"], tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def recipe(runs):
    return runs["mixed"].parent / "mixed.toml"


def change(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    config.update(keys)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


def begun(recipe, folder, run, *more):
    settings = [f"model.start={json.dumps(str(folder))}", *more]
    return main(["simulate", str(recipe), "--run", str(run), "--quiet", *(f"--set={s}" for s in settings)])


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_from_the_folder_and_its_row_0_is_the_other_s_last(runs, folder, recipe, tmp_path):
    assert begun(recipe, folder, tmp_path / "next") == 0
    ended, went_on = rows(runs["mixed"])[-1], rows(tmp_path / "next")
    for name in ("loss_full", "loss_pipelined", "loss_mixed"):
        assert went_on[0][name] == pytest.approx(ended[name], rel=1e-6)
    assert went_on[-1]["loss_mixed"] < ended["loss_mixed"]
    assert f'start = "{folder}"' in (tmp_path / "next" / "recipe.toml").read_text()


@pytest.mark.parametrize("adaptation", ["true", "false"])
def test_such_a_run_is_resumed_to_the_same_bits(folder, recipe, tmp_path, adaptation):
    setting = f"subspace.adaptation={adaptation}"
    assert begun(recipe, folder, tmp_path / "whole", setting) == 0
    assert begun(recipe, folder, tmp_path / "cut", setting, "outer.rounds=1", "inner.schedule_steps=18") == 0
    cut = tmp_path / "cut" / "recipe.toml"
    wanted = (tmp_path / "whole" / "recipe.toml").read_text()
    cut.write_text(wanted)
    (tmp_path / "cut" / "model.safetensors").unlink()
    assert main(["simulate", "--resume", str(tmp_path / "cut"), "--quiet"]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_resume_that_needs_the_first_weights_refuses_others(folder, recipe, tmp_path, capsys):
    assert begun(recipe, folder, tmp_path / "run", "subspace.adaptation=false") == 0
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    capsys.readouterr()
    assert main(["simulate", "--resume", str(tmp_path / "run"), "--quiet"]) == 2
    assert "are not those that the run began with" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="began with"):
        open_trained(str(tmp_path / "run"))


def test_transformers_own_folders_are_read_whole_sharded_or_tied(tmp_path):
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5)
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    params = {
        name: read_params(tmp_path / name, read_config(tmp_path / name)) for name in ("whole", "shards")
    }
    assert torch.equal(
        params["whole"]["layers.1.attention.wk.weight"], theirs.model.layers[1].self_attn.k_proj.weight
    )
    for name, tensor in params["whole"].items():
        assert torch.equal(params["shards"][name], tensor)
    tied = LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=16, tie_word_embeddings=True)
    )
    tied.to(torch.bfloat16).save_pretrained(tmp_path / "tied")
    config = read_config(tmp_path / "tied")
    assert config.tie_embeddings
    assert "output.weight" not in read_params(tmp_path / "tied", config)
    params = read_params(tmp_path / "tied", replace(config, tie_embeddings=False))
    assert params["output.weight"].dtype == torch.float32
    assert torch.equal(params["output.weight"], params["tok_embeddings.weight"])
    assert params["output.weight"] is not params["tok_embeddings.weight"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"hidden_size": 32, "head_dim": 16}, "width is 32 there and 64 here; set model.width=32"),
        ({"num_hidden_layers": 3, "intermediate_size": 5}, "layers is 3 there and 4 here, ffn is 5 there"),
        ({"vocab_size": 1000}, "set model.vocab=1000"),
        ({"max_position_embeddings": 16}, "context is 16 there and 32 here"),
        ({"rms_norm_eps": 1e-6}, "norm_eps is 1e-06 there"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 500000.0 there"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "does not state factor"),
        ({"num_key_value_heads": 1}, "kv_heads is 1 there and 2 here; set model.kv_heads=1"),
        ({"model_type": "gpt2"}, 'of type "gpt2"'),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "gone"}, "does not state hidden_size"),
        ({"hidden_size": "wide"}, "wrong kind"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "wrong kind"),
    ],
)
def test_another_model_is_refused_dimension_by_dimension(folder, recipe, tmp_path, capsys, keys, says):
    change(folder, **keys)
    capsys.readouterr()
    assert begun(recipe, folder, tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def drop_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_short(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def without_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def of_another_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")


def not_finite(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def leads_outside(folder):
    weights = {"model.norm.weight": "../elsewhere.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def broken_config(folder):
    (folder / "config.json").write_text("{")


def other_words(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = "A", "B"
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (drop_weights, "only pickled weights (.bin), which may run code"),
        (cut_short, "cannot be read"),
        (without_a_tensor, "no tensor model.layers.2.mlp.up_proj.weight"),
        (of_another_shape, "model.norm.weight has the shape (7,)"),
        (not_finite, "not finite"),
        (leads_outside, "outside the folder"),
        (broken_config, "is not JSON"),
        (other_words, "(2 of 1,024 tokens differ)"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_a_spoilt_folder_is_refused_in_one_line(folder, recipe, tmp_path, capsys, spoil, says):
    spoil(folder)
    capsys.readouterr()
    assert begun(recipe, folder, tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


# A fleet of real machines


@pytest.fixture
def bucket(folder, recipe, tmp_path):
    loaded = load_recipe(recipe, [f"model.start={json.dumps(str(folder))}"])
    create(loaded, str(tmp_path / "bucket"), tmp_path / "keys")
    return tmp_path / "bucket"


def ledger_of(bucket, signer=None):
    store = open_store(str(bucket), create=False)
    return Ledger(store, read_run(store), signer)


def test_theta_0_is_in_the_bucket_and_needs_no_folder(folder, bucket):
    wanted = read_params(folder, read_config(folder))
    shutil.rmtree(folder)
    ledger = ledger_of(bucket)
    check_start(ledger)
    replay = Replay(ledger)
    assert replay.round == 0
    assert replay.digest() == ledger.run.start
    assert all(torch.equal(replay.anchor[name], wanted[name]) for name in wanted)


def test_init_refuses_a_folder_in_another_language_and_leaves_the_bucket_alone(
    folder, recipe, tmp_path, capsys
):
    other_words(folder)
    setting = f"model.start={json.dumps(str(folder))}"
    assert (
        main(["init", str(recipe), str(tmp_path / "b"), "--keys", str(tmp_path / "k"), "--set", setting]) == 2
    )
    assert "tokens differ" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "k").exists()


def test_who_joins_a_run_whose_init_was_cut_short_is_told(bucket, tmp_path, capsys):
    (bucket / "anchors" / "000000" / "complete.json").unlink()
    key = tmp_path / "keys" / "rack.key"
    assert main(["join", str(bucket), "--replica", "rack", "--key", str(key)]) == 2
    assert "was cut short" in capsys.readouterr().err


def test_another_theta_0_is_not_taken_even_if_a_closer_signed_it(bucket, recipe, folder, tmp_path):
    """run.json names the digest: a closer's signature is not enough."""
    from isthmus.protocol.trust import load_signer

    ledger = ledger_of(bucket, load_signer(tmp_path / "keys" / "rack.key", "rack"))
    params = {name: t + 1 for name, t in read_params(folder, read_config(folder)).items()}
    files = [
        ledger.put_anchor_shard(0, i, {name: params[name] for name in names})
        for i, names in enumerate(ledger.shards)
    ]
    ledger.complete_anchor(0, "0" * 64, files)
    with pytest.raises(RunError, match="not the theta"):
        Replay(ledger_of(bucket))
    ledger.complete_anchor(0, ledger.run.start, files)
    with pytest.raises(RunError, match="digest it states"):
        Replay(ledger_of(bucket))


def test_an_ablation_that_needs_the_first_table_stays_in_the_simulator(folder, recipe, tmp_path):
    settings = [f"model.start={json.dumps(str(folder))}", "subspace.adaptation=false"]
    with pytest.raises(ConfigError, match="for the simulator only"):
        create(load_recipe(recipe, settings), str(tmp_path / "bucket"), tmp_path / "keys")
    assert not (tmp_path / "bucket").exists()
