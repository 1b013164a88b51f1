"""A small world to spoil: a corpus, a run directory with its bucket and keys, exported folders, machines.

Made once by the code that makes real ones. Every path in it is relative, so that a copy is as good.
"""

import contextlib
import io
import json
import os
import random
from pathlib import Path

import torch
from seats import rounds_in_a_bucket
from small_recipes import pipelined, recipe_text, replicas

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.model.checkpoint import save
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.repairs import Decision
from isthmus.protocol.trust import load_signer
from isthmus.store import open_store

WORDS = ("the", "tree", "house", "of", "river", "runs", "over", "stone", "bird", "sings", "by", "night", "to")
SETTLED = 3
RECIPE = recipe_text(
    replicas("rack", count=2, tflops=1.0)
    + pipelined("edge", stages=2, compression="1/4", tflops=0.5, link={"mbps": 50}),
    name="world",
    model={"layers": 2, "vocab": 320},
    data={"corpus": "corpus"},
    inner={"batch": 2, "precision": "fp32"},
    outer={"inner_steps": 1, "rounds": 4, "keep": 8, "values": "2bit"},
    bucket={"anchor_every": 2, "heartbeat_seconds": 1, "deadline_seconds": 1},
)
MACHINES = """
[[sites]]
name = "here"
link = { mbps = 1000 }
bucket_link = { mbps = 100 }
[[sites]]
name = "there"
bucket_link = { mbps = 50, latency_ms = 20 }
[[links]]
sites = ["here", "there"]
mbps = 20
latency_ms = 30
[[machines]]
name = "big"
site = "here"
count = 2
memory_gb = 24
tflops = 30
[[machines]]
name = "little"
site = "there"
memory_gb = 8
tflops = 5
"""


def make_world(folder: Path) -> Path:
    """Takes some seconds."""
    folder.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _make()
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
    return folder


def _make() -> None:
    draw = random.Random(0)
    text = "\n".join(json.dumps({"text": " ".join(draw.choices(WORDS, k=60))}) for _ in range(300))
    Path("text.jsonl").write_text(text)
    Path("world.toml").write_text(RECIPE)
    Path("machines.toml").write_text(MACHINES)
    prepare = ("data", "prepare", "text.jsonl", "--to", "corpus", "--vocab", "320")
    _quietly(*prepare, "--validation", "0.2", "--shard-tokens", "4096")
    _quietly("simulate", "world.toml", "--run", "run", "--quiet")
    _quietly("export", "run", "--to", "hf", "plain", "--force")
    _quietly("export", "run", "--to", "hf", "bounded", "--as", "pipelined")
    rounds_in_a_bucket(parse_recipe(RECIPE), Path("run"), settle=SETTLED)
    store = open_store("run/bucket", create=False)
    ledger = Ledger(store, read_run(store), load_signer(Path("run/keys/rack-0.key"), "rack-0"))
    ledger.beat(Heartbeat(state="waiting", awaiting="stage 1: no answer", waited_seconds=4.0))
    ledger.ask_to_leave("1")
    body = {"round": 1, "shards": ["f" * 64]}
    store.put("wanted/rack-1/0.json", ledger.signer.seal("wanted", ledger.run.run_id, body))
    begun, ended = ledger.manifest(2), ledger.manifest(SETTLED)
    if begun and ended:
        why = {"digest": begun.anchor, "manifest": ended.digest, "reason": "none", "closer": "rack-0"}
        ledger.repairs.decide(Decision(first=2, last=SETTLED, **why))
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4, dtype=torch.int64)}
    save(Path("state"), 3, {"anchor": tensors, "outer": tensors})


def _quietly(*command: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(command))
    if code:
        raise RuntimeError(f"isthmus {' '.join(command)}: {said.getvalue()}")
