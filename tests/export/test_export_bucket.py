"""A fleet of real processes that goes on from a folder, and its model taken from the bucket meanwhile."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from isthmus.cli.main import main
from isthmus.export.source import open_trained
from isthmus.model.hf import read_config, read_params
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.manifests import Manifests
from isthmus.protocol.replay import Replay
from isthmus.store.objects import open_store


@pytest.fixture(scope="module")
def trained_run(runs, folders, tmp_path_factory):
    """Two rounds of two replicas and three processes, from the weights of the mixed run."""
    run = tmp_path_factory.mktemp("fleet") / "run"
    settings = {
        "model.start": json.dumps(str(folders["mixed"])),
        "replicas.edge.stages": "2",
        "outer.rounds": "2",
        "outer.inner_steps": "3",
        "outer.method": "diloco",  # whose state is part of an anchor, but not of theta^(0)
        "bucket.heartbeat_seconds": "1.0",
    }
    flat = [f"--set={key}={value}" for key, value in settings.items()]
    recipe = runs["mixed"].parent / "mixed.toml"
    assert main(["train", str(recipe), "--run", str(run), "--quiet", *flat]) == 0
    return run


def test_every_process_starts_from_the_folder(trained_run, runs, folders):
    store = open_store(str(trained_run / "bucket"), create=False)
    ledger = Ledger(store, read_run(store))
    # The first manifest names the anchor that every contributor started from.
    assert ledger.manifest(1).anchor == ledger.run.start == Replay(ledger).digest()
    assert len(ledger.manifest(1).entries) == 2
    wanted = read_params(folders["mixed"], read_config(folders["mixed"]))
    assert all(torch.equal(Replay(ledger).anchor[name], wanted[name]) for name in wanted)


def test_the_bucket_and_the_run_directory_hold_the_same_model(trained_run, tmp_path):
    assert main(["export", str(trained_run / "bucket"), "--to", "hf", str(tmp_path / "b")]) == 0
    assert main(["export", str(trained_run), "--to", "hf", str(tmp_path / "r")]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "br")
    assert all(torch.equal(one[name], two[name]) for name in one)
    ours = open_trained(str(trained_run))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.equal(model.lm_head.weight, ours.params["output.weight"])
    rows = (trained_run / "metrics.jsonl").read_text().splitlines()
    assert open_trained(str(trained_run / "bucket")).tokens == json.loads(rows[-1])["tokens"]


def test_a_run_that_still_goes_on_gives_its_newest_settled_round(trained_run, tmp_path, capsys):
    going = tmp_path / "bucket"
    shutil.copytree(trained_run / "bucket", going)
    (going / "manifests" / "000002.json").unlink()
    assert open_trained(str(going)).round == 1
    capsys.readouterr()
    assert main(["generate", str(going), "It was", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 3
    assert main(["eval", str(going), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == 1
    # Also by its run directory, which has no model yet.
    shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("model.safetensors", "work"))
    (tmp_path / "run" / "bucket" / "manifests" / "000002.json").unlink()
    assert open_trained(str(tmp_path / "run")).round == 1


def test_a_bucket_without_a_settled_round_is_one_line_and_status_2(trained_run, tmp_path, capsys):
    fresh = tmp_path / "bucket"
    shutil.copytree(trained_run / "bucket", fresh)
    shutil.rmtree(fresh / "manifests")
    for command in (["export", str(fresh), "--to", "hf", str(tmp_path / "hf")], ["eval", str(fresh)]):
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "has no finished round yet" in error
        assert error.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_generate_reads_no_manifest_that_its_replay_does_not_need(trained_run, monkeypatch, capsys):
    """What a run was trained on in all is counted for those who ask: export and eval."""
    monkeypatch.setattr(Manifests, "between", lambda *_: pytest.fail("it walks the manifests"))
    assert main(["generate", str(trained_run / "bucket"), "It was", "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 2
