"""An exported folder is our model: the same logits in transformers, the same bits back, never half of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from isthmus.cli.main import main
from isthmus.export.card import model_card
from isthmus.export.folder import export
from isthmus.export.hf import folder_bytes
from isthmus.export.measure import Losses, measure
from isthmus.export.source import open_trained, pipelined_member
from isthmus.layout.stages import boundaries
from isthmus.model.hf import hf_name, read_config, read_params
from isthmus.model.llama import forward, rope_table
from isthmus.subspace.boundaries import boundary_functions


def some_tokens(trained, rows=3):
    held_out = trained.corpus.validation.slice(0, rows * trained.recipe.model.context)
    return torch.from_numpy(held_out).view(rows, -1)


def our_logits(trained, tokens, member=None):
    model = trained.recipe.model
    boundary_fns = None
    if member:
        boundary_fns = boundary_functions(
            trained.recipe, [member], trained.bases, trained.table, len(tokens), params=trained.params
        )
    return forward(trained.params, tokens, model, rope_table(model, tokens.shape[1]), boundary_fns)


@torch.no_grad()
def their_logits(model, tokens):
    return model.eval()(tokens).logits


@pytest.mark.parametrize("name", ["full", "mixed", "compressed", "finished", "learned"])
def test_transformers_gives_our_logits(runs, folders, name):
    trained = open_trained(str(runs[name]))
    tokens = some_tokens(trained)
    model = AutoModelForCausalLM.from_pretrained(folders[name])
    assert type(model) is LlamaForCausalLM
    assert_close(their_logits(model, tokens), our_logits(trained, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mixed", "compressed", "finished", "learned"])
def test_a_folder_that_keeps_its_boundaries_gives_our_pipelined_logits(runs, tmp_path, name):
    done = export(str(runs[name]), tmp_path / "pp", as_="pipelined")
    assert not done.refused
    tokens, member = some_tokens(done.trained), pipelined_member(done.trained.recipe)
    ours = our_logits(done.trained, tokens, member)
    if name != "finished":  # whose boundaries are open by now
        plain = our_logits(done.trained, tokens)
        assert (ours - plain).abs().max() > 1e-3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pp", trust_remote_code=True)
    # A stream rounded to bf16 on the wire may fall on either side of a tie.
    assert_close(their_logits(model, tokens), ours, atol=5e-4, rtol=0)
    # Cached, token by token, it is the same model.
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        said = [
            model.generate(tokens[:1, :6], max_new_tokens=12, do_sample=False, use_cache=cached)
            for cached in (True, False)
        ]
    assert torch.equal(*said)


def test_its_model_file_can_be_imported_without_remote_code(runs, tmp_path):
    assert (
        main(["export", str(runs["compressed"]), "--to", "hf", str(tmp_path / "pp"), "--as", "pipelined"])
        == 0
    )
    code = (
        "from modeling_isthmus import IsthmusForCausalLM as M; import torch\n"
        "m = M.from_pretrained('.'); print(float(m(torch.tensor([[5, 6, 7]])).logits[0, -1, 3]))"
    )
    # `main` forbids its children to import from the current folder; whoever runs this wants just that.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=tmp_path / "pp", check=True, env=environment,
    )  # fmt: skip
    trained = open_trained(str(runs["compressed"]))
    ours = our_logits(trained, torch.tensor([[5, 6, 7]]), pipelined_member(trained.recipe))[0, -1, 3]
    assert abs(float(done.stdout) - float(ours)) < 5e-4


def test_a_boundary_half_open_is_exported_half_open(runs, tmp_path):
    trained = open_trained(str(runs["finished"]))
    trained = replace(trained, round=2)
    trained.bases.begin_round(2)  # of 3, of which 2 finish: a = 1/2
    from isthmus.export.hf import write_folder

    member = pipelined_member(trained.recipe)
    write_folder(trained, tmp_path / "half", "card", "fp32", member)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["open_share"] == 0.5
    tokens = some_tokens(trained)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", trust_remote_code=True)
    assert_close(their_logits(model, tokens), our_logits(trained, tokens, member), atol=5e-4, rtol=0)


def test_a_frozen_table_and_a_u_for_each_boundary_come_along(runs, tmp_path):
    recipe = runs["compressed"].parent / "compressed.toml"
    run = tmp_path / "run"
    settings = ["--set", "subspace.adaptation=false", "--set", "subspace.basis=boundary"]
    assert main(["simulate", str(recipe), "--run", str(run), "--quiet", *settings]) == 0
    done = export(str(run), tmp_path / "pp", as_="pipelined")
    tensors = load_file(tmp_path / "pp" / "model.safetensors")
    assert {n for n in tensors if n.startswith("boundary.")} == {
        "boundary.basis_0", "boundary.basis_1", "boundary.table",
    }  # fmt: skip
    tokens = some_tokens(done.trained)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pp", trust_remote_code=True)
    ours = our_logits(done.trained, tokens, pipelined_member(done.trained.recipe))
    assert_close(their_logits(model, tokens), ours, atol=5e-4, rtol=0)


def test_the_tokenizer_is_the_corpus_s(runs, folders):
    corpus = open_trained(str(runs["mixed"])).corpus
    tokenizer = AutoTokenizer.from_pretrained(folders["mixed"])
    text = "Call me Ishmael. 42 naïve cafés — 雪\n"
    from tokenizers import Tokenizer

    ours = Tokenizer.from_file(str(corpus.tokenizer_path)).encode(text, add_special_tokens=False).ids
    assert tokenizer(text)["input_ids"] == ours
    assert tokenizer.decode(ours) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == corpus.end_id


def test_every_file_may_be_read_by_whom_the_user_lets(runs, tmp_path):
    before = os.umask(0o022)
    try:
        assert main(["export", str(runs["full"]), "--to", "hf", str(tmp_path / "hf")]) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()} == {0o644}


def test_bf16_rounds_every_weight_once_and_the_loss_is_of_what_was_written(runs, tmp_path, capsys):
    arguments = [
        "export",
        str(runs["mixed"]),
        "--to",
        "hf",
        str(tmp_path / "half"),
        "--dtype",
        "bf16",
        "--json",
    ]
    assert main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    trained = open_trained(str(runs["mixed"]))
    written = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in trained.params.items():
        assert torch.equal(written[hf_name(name)], tensor.to(torch.bfloat16))
    params = read_params(tmp_path / "half", read_config(tmp_path / "half"))
    again = measure(replace(trained, params=params, table=params["tok_embeddings.weight"]))
    assert facts["loss_plain"] == pytest.approx(again.full, abs=1e-6)
    assert facts["loss_plain"] != facts["loss_full"]


def test_export_and_import_give_the_same_bits(runs, folders):
    trained = open_trained(str(runs["mixed"]))
    model = read_config(folders["mixed"])
    assert replace(model, preset="nano") == trained.recipe.model
    params = read_params(folders["mixed"], model)
    assert params.keys() == trained.params.keys()
    for name, tensor in trained.params.items():
        assert torch.equal(params[name], tensor), name


def test_losses_are_those_of_the_run_s_last_row(runs, tmp_path, capsys):
    assert main(["export", str(runs["mixed"]), "--to", "hf", str(tmp_path / "hf"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    last = json.loads((runs["mixed"] / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("loss_full", "loss_pipelined", "loss_mixed"):
        assert facts[name] == pytest.approx(last[name], rel=1e-6)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"| {last['loss_mixed']:.4f} |" in card
    assert f"{last['tokens']:,} tokens" in card


def test_a_card_does_not_tell_where_things_lay(runs):
    trained = open_trained(str(runs["mixed"]))
    recipe = replace(
        trained.recipe,
        data=replace(trained.recipe.data, corpus="/home/alice/secret/texts"),
        model=replace(trained.recipe.model, start="/home/alice/secret/llama-hf"),
        bucket=replace(trained.recipe.bucket, url="s3://secret/run"),
    )
    card = model_card(replace(trained, recipe=recipe), Losses(4.0, 4.0, 4.0, 4.0, 1000), "here", "fp32", None)
    assert "secret" not in card
    assert 'start = "llama-hf"' in card
    assert f'corpus = "{trained.corpus.name}"' in card


def spoil(run, copy, change):
    """A copy of a simulated run whose last weights went through `change`."""
    shutil.copytree(run, copy)
    (state,) = (copy / "state").glob("round-*")
    anchor = load_file(state / "anchor.safetensors")
    change(anchor)
    save_file(anchor, state / "anchor.safetensors")
    return str(copy)


def test_a_plain_model_that_would_disappoint_is_not_written(runs, tmp_path, capsys):
    """What the layer before a boundary writes outside S never crosses it: there the forwards come apart."""
    recipe, learnt = runs["compressed"].parent / "compressed.toml", tmp_path / "learnt"
    settings = ["inner.lr=0.02", "outer.keep=4096", "outer.inner_steps=40", "outer.rounds=2"]
    flat = [f"--set={setting}" for setting in settings]
    assert main(["simulate", str(recipe), "--run", str(learnt), "--quiet", *flat]) == 0
    capsys.readouterr()
    trained = open_trained(str(learnt))
    member = pipelined_member(trained.recipe)
    edge = boundaries(trained.recipe.model, member.config.stages)[0]
    basis = trained.bases.get(member, 0)

    def write_outside(anchor):
        weight = anchor[f"layers.{edge - 1}.feed_forward.w2.weight"]
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        weight += 3 * (noise - basis @ (basis.mT @ noise))

    run = spoil(learnt, tmp_path / "run", write_outside)
    spoilt = measure(open_trained(run))
    assert spoilt.mixed == pytest.approx(measure(trained).mixed, abs=1e-3)
    assert spoilt.worse > 0.02
    place = tmp_path / "place"
    place.mkdir()
    assert main(["export", run, "--to", "hf", str(place / "hf")]) == 2
    printed = capsys.readouterr()
    assert f"{spoilt.worse:.1%} worse than the one that the run trained" in printed.err
    assert "--as pipelined" in printed.err
    assert printed.err.count("\n") == 1
    assert f"{spoilt.plain:.4f}  as a plain model" in printed.out
    assert list(place.iterdir()) == []
    assert main(["export", run, "--to", "hf", str(place / "pp"), "--as", "pipelined"]) == 0
    assert main(["export", run, "--to", "hf", str(place / "forced"), "--force"]) == 0


def test_a_model_that_is_not_finite_is_not_written(runs, tmp_path, capsys):
    def diverge(anchor):
        anchor["norm.weight"].fill_(float("nan"))

    run = spoil(runs["full"], tmp_path / "run", diverge)
    assert main(["export", run, "--to", "hf", str(tmp_path / "hf")]) == 2
    assert "nan" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    # JSON has no NaN: what was not a number is null.
    assert main(["export", run, "--to", "hf", str(tmp_path / "hf"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["loss_plain"] is None
    assert main(["eval", run, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["forwards"]["full"]
    assert scores == {"loss": None, "perplexity": None, "bits_per_byte": None}


@pytest.mark.parametrize("as_", ["plain", "pipelined"])
def test_a_disk_without_room_is_told_before_anything_is_measured(runs, tmp_path, monkeypatch, capsys, as_):
    from isthmus import disk

    words = ["export", str(runs["mixed"]), "--to", "hf", str(tmp_path / "hf"), "--as", as_]
    with monkeypatch.context() as patch:
        patch.setattr("isthmus.export.folder.measure", pytest.fail)
        patch.setattr(disk, "free_bytes", lambda folder: 1000)
        assert main(words) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(
        rf"isthmus: the disk of {tmp_path} has 1\.0 kB free, and the exported folder needs .* there\n", line
    )
    assert list(tmp_path.iterdir()) == []
    # What is asked for is what is written, but for the small files.
    assert main(words) == 0
    written = sum(path.stat().st_size for path in (tmp_path / "hf").iterdir())
    trained = open_trained(str(runs["mixed"]))
    member = pipelined_member(trained.recipe) if as_ == "pipelined" else None
    needed = folder_bytes(trained, "fp32", member)
    assert needed <= written < needed + disk.SPARE_BYTES


def test_a_kill_leaves_no_folder_of_that_name(runs, tmp_path):
    code = (
        "import os, signal, sys; from isthmus.export import hf; from isthmus.cli.main import main\n"
        "hf.tokenizer_config = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(sys.argv[1:])"
    )
    target = str(tmp_path / "hf")
    done = subprocess.run([sys.executable, "-c", code, "export", str(runs["full"]), "--to", "hf", target])
    assert done.returncode == -9
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert main(["export", str(runs["full"]), "--to", "hf", target]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{unfinished}", "--to", "hf", "{new}"], "has no finished round yet"),
        (["{full}", "--to", "hf", "{empty}"], "exists; give --to hf another folder"),
        (["{full}", "--to", "hf", "{gone}/deep/er"], "there is no folder"),
        (["{full}", "--to", "hf", "{new}", "--as", "pipelined"], "no boundaries to keep"),
        (["{mixed}", "--to", "hf", "{new}", "--replica", "edge"], "give --as pipelined with it"),
        (
            ["{mixed}", "--to", "hf", "{new}", "--as", "pipelined", "--replica", "x"],
            'no pipelined replica "x"',
        ),
        (["{full}", "--to", "hf", "{new}", "--corpus", "{empty}"], "there is no corpus"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_nothing_is_written(runs, tmp_path, capsys, arguments, says):
    places = {name: str(tmp_path / name) for name in ("empty", "gone", "new", "unfinished")}
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished").mkdir()
    for name in ("recipe.toml", "about.json"):
        (tmp_path / "unfinished" / name).write_bytes((runs["full"] / name).read_bytes())
    first = (runs["full"] / "metrics.jsonl").read_text().splitlines()[0]
    (tmp_path / "unfinished" / "metrics.jsonl").write_text(first + "\n")
    before = sorted(tmp_path.rglob("*"))
    filled = [word.format(**places, **{name: str(path) for name, path in runs.items()}) for word in arguments]
    status = main(["export", *filled])
    printed = capsys.readouterr()
    assert status == 2
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
