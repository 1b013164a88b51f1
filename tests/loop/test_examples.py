"""The examples run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.export.source import open_trained
from isthmus.protocol.access import open_ledger

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_plain_loop_of_two_replicas_learns(tmp_path: Path):
    said = run(sys.executable, str(EXAMPLES / "own_loop.py"), str(tmp_path))
    found = re.findall(r"(\w): round (\d+), loss ([\d.]+), weights (\w+)", said)
    losses = {(name, int(t)): float(loss) for name, t, loss, _ in found}
    assert losses["a", 6] < 0.9 * losses["a", 1]
    assert len({weights for _, t, _, weights in found if t == "6"}) == 1
    assert main(["ledger", "verify", str(tmp_path / "bucket")]) == 0
    with pytest.raises(ConfigError, match="isthmus ledger rebuild"):
        open_trained(str(tmp_path / "bucket"))


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_two_ranks_are_one_replica(tmp_path: Path, how: str):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = run(*torchrun, str(EXAMPLES / "two_ranks.py"), str(tmp_path), how)
    found = set(re.findall(r"rank (\d): round 3, weights (\w+)", said))
    assert {rank for rank, _ in found} == {"0", "1"}
    assert len({weights for _, weights in found}) == 1
    assert main(["ledger", "verify", str(tmp_path / "bucket")]) == 0
    manifest = open_ledger(str(tmp_path / "bucket")).manifest(3)
    assert sum(manifest.entries[0].facts.measured["tokens"]) == 2 * 5 * 16


def test_a_script_in_nanochats_style_runs_to_its_end(tmp_path: Path):
    said = run(sys.executable, str(EXAMPLES / "nano_style.py"), str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"round \d: loss ([\d.]+)", said)]
    assert len(losses) == 4
    assert losses[-1] < 5.0  # ln 256 is 5.5


def test_the_notebook_runs_and_its_copies_learn():
    cells = json.loads((EXAMPLES / "own_copies.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    exec("\n".join(code[:2]), names)  # the rest calls it for six values of H, and plots
    assert names["loss_after"](5, steps=60) < 0.5 * names["loss_after"](5, steps=5)


def test_every_example_is_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name
