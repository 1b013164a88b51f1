"""Five small runs, made once: full, mixed, compressed only, finished dense, and with learned tables."""

import os
import tempfile

import pytest
import torch

from isthmus.cli.main import main

# Before transformers is imported: no network, and the model files it copies stay out of the user's cache.
CACHE = tempfile.TemporaryDirectory(prefix="isthmus-hf-")
os.environ["HF_HOME"] = os.environ["HF_MODULES_CACHE"] = CACHE.name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

RECIPE = """
name = "tiny"
[model]
preset = "nano"
width = 64
ffn = 96
heads = 2
context = 32
[data]
eval_batches = 2
[inner]
batch = 8
micro_batches = 2
lr = 3e-3
warmup_steps = 2
[outer]
inner_steps = 6
rounds = 3
"""
FULL = '[[replicas]]\nname = "rack"\n'
EDGE = '[[replicas]]\nname = "edge"\nkind = "pipelined"\nstages = 3\ncompression = "1/8"\n'
FLEETS = {
    "full": FULL,
    "mixed": FULL + EDGE,
    "compressed": EDGE,
    "finished": EDGE + "[finish]\nrounds = 2\n",
    "learned": EDGE + '[subspace]\nanchor = "learned"\n',
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """name -> run directory."""
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("runs")
    for name, fleet in FLEETS.items():
        (base / f"{name}.toml").write_text(RECIPE + fleet)
        assert main(["simulate", str(base / f"{name}.toml"), "--run", str(base / name), "--quiet"]) == 0
    return {name: base / name for name in FLEETS}


@pytest.fixture(scope="session")
def folders(runs, tmp_path_factory):
    """name -> the run's plain Hugging Face folder."""
    base = tmp_path_factory.mktemp("folders")
    for name, run in runs.items():
        assert main(["export", str(run), "--to", "hf", str(base / name), "--force", "--json"]) == 0
    return {name: base / name for name in runs}
