"""`OuterSync.create`: a run of named tensors, and what the commands say about it."""

import json
from pathlib import Path

import pytest
import torch
from models import Odd
from torch.testing import assert_close

from isthmus import open_run
from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.loop.create import create
from isthmus.loop.tensors import Parameters
from isthmus.protocol.access import open_ledger
from isthmus.protocol.bundle import read_bundle


def made(tmp_path: Path, model: torch.nn.Module, **more) -> dict[str, Path]:
    settings = {"inner_steps": 5, "rounds": 4, "replicas": ["a", "b"], "keys": tmp_path / "keys"} | more
    return create(model, tmp_path / "bucket", **settings)


def test_a_run_holds_its_tensors_their_first_values_and_the_rest_of_a_recipe(tmp_path: Path):
    model = Odd(dtype=torch.bfloat16)
    keys = made(tmp_path, model, overrides={"outer.keep": 64, "bucket.anchor_every": 2})
    assert {name: read_bundle(path).replica for name, path in keys.items()} == {"a": "a", "b": "b"}
    ledger = open_ledger(str(tmp_path / "bucket"))
    recipe, body = ledger.run.recipe, json.loads((tmp_path / "bucket/run.json").read_bytes())
    assert (recipe.outer.inner_steps, recipe.outer.rounds, recipe.outer.keep) == (5, 4, 64)
    assert "[model]" not in body["recipe"]
    assert body["requires"] == ["tensors"]
    assert ["scale", [], "bfloat16"] in body["tensors"]
    assert "fixed" not in ledger.shapes
    assert ledger.run.frozen == Parameters(model).frozen_digest() != ""
    weights = open_run(tmp_path / "bucket").weights(0)
    assert_close(
        weights, {n: p.detach().float() for n, p in Parameters(model).trained.items()}, rtol=0, atol=0
    )


def test_shards_are_cut_by_size_in_the_order_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isthmus.loop.create.LEAST_SHARD_BYTES", 1000)
    made(tmp_path, Odd())
    ledger = open_ledger(str(tmp_path / "bucket"))
    names = [name for shard in ledger.shards for name in shard]
    assert names == sorted(names)
    assert len(ledger.shards) > 2
    assert sum(ledger.sizes) > 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"replicas": []}, "replicas is a list of names"),
        ({"replicas": ["a", "a"]}, 'two replicas are called "a"'),
        ({"replicas": ["a b"]}, "replica name"),
        ({"inner_steps": 0}, "outer.inner_steps is 0"),
        ({"overrides": {"inner.lr": 1.0}}, "inner.lr cannot be set for a loop of your own"),
        ({"overrides": {"outer.keeps": 1}}, 'unknown key "outer.keeps"'),
        ({"overrides": ["outer.method=adamw"]}, "averages gradients"),
    ],
)
def test_what_makes_no_run_is_one_line_and_leaves_nothing(tmp_path: Path, changed: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, Odd(), **changed)
    assert not (tmp_path / "bucket/run.json").exists()


MODULE = "import torch\ndef make_model():\n    return torch.nn.Linear(3, 2)\n"


def test_init_makes_the_same_run_from_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "train.py").write_text(MODULE)
    command = ["init", "--from-module", f"{tmp_path}/train.py:make_model", str(tmp_path / "bucket")]
    given = ["--replicas", "a,b", "--keys", str(tmp_path / "keys"), "--set", "outer.inner_steps=7"]
    assert main([*command, *given]) == 0
    assert "a.isthmus.toml" in capsys.readouterr().out
    run = open_ledger(str(tmp_path / "bucket")).run
    assert (run.recipe.outer.inner_steps, [each.name for each in run.tensors]) == (7, ["bias", "weight"])
    for bad, words in (
        ([*command, *given, "--room", "2"], "takes no room"),
        (command, "needs --replicas"),
        (["init", "--from-module", "none.py:make", "x", *given], "there is no file none.py"),
        (["init", "--from-module", f"{tmp_path}/train.py:other", "x", *given], "other is not a function"),
        (["init", "x"], "give a recipe and a URL"),
        (["init", "demo", "x", "--name", "y"], "belongs to --from-module"),
    ):
        assert main(bad) == 2
        assert words in capsys.readouterr().err


def test_commands_know_a_run_of_named_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # `join` saves a key
    model = torch.nn.ModuleList([Odd(), *(torch.nn.Linear(2, 2) for _ in range(100))])  # a long list of names
    keys, url = made(tmp_path, model), str(tmp_path / "bucket")
    assert main(["status", url]) == 0
    assert main(["ledger", "rebuild", url, "--to", str(tmp_path / "w.safetensors")]) == 0
    assert main(["ledger", "rebuild", url, "--to", str(tmp_path / "folder")]) == 2
    assert "--to NAME.safetensors" in capsys.readouterr().err
    assert main(["join", str(keys["a"])]) == 2
    assert "start yours with isthmus.OuterSync(model, key=...)" in capsys.readouterr().err
    assert main(["report", url, "--to", str(tmp_path / "report")]) == 0
    assert open_run(tmp_path / "report").recipe.model.shapes()["0.scale"] == ()
