"""`isthmus ledger rebuild --to FOLDER`: what a new run takes as its model.start."""

import json
from pathlib import Path

import pytest
import torch
from little import Little, rounds
from little import hasty as hasty

from isthmus.cli.main import main
from isthmus.model.hf import check_same, read_config, read_params
from isthmus.protocol.replay import Replay

pytestmark = pytest.mark.usefixtures("hasty")


def test_the_weights_without_a_replica_start_a_new_run_bit_for_bit(folder_url: str, tmp_path: Path, capsys):
    run = Little(folder_url, tmp_path)
    rounds(run.replicas(), [1, 2, 3])
    folder, file = tmp_path / "start", tmp_path / "theta.safetensors"
    for target in (folder, file):
        words = ["ledger", "rebuild", folder_url, "--without", "b", "--to", str(target), "--json"]
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["without"] == ["b"]
    assert file.is_file()
    model = run.run.recipe.model
    check_same(folder, read_config(folder), model)
    replay = Replay(run.ledger(), 3, ["b"])
    while replay.round < 3:
        replay.step()
    params = read_params(folder, model)
    assert params.keys() == replay.anchor.keys()
    assert all(torch.equal(params[name], tensor) for name, tensor in replay.anchor.items())
    assert main([*words[:-2], str(folder)]) == 2  # nothing is overwritten
    assert "exists; give --to another path" in capsys.readouterr().err
