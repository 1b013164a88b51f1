"""A small world to spoil: a corpus, a run with its bucket and keys, and a bundle.

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
from isthmus.protocol.access import OWNER_KEY
from isthmus.protocol.bundle import Bundle
from isthmus.protocol.heartbeat import Heartbeat, Vitals
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.membership import Admitted, Changes, table_of
from isthmus.protocol.trust import OWNER, Signer, load_signer
from isthmus.runlog import REAL, RunDir
from isthmus.store import open_store

WORDS = ("the", "tree", "house", "of", "river", "runs", "over", "stone", "bird", "sings", "by", "night", "to")
SETTLED = 3
ADMITTED = "attic"
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
    prepare = ("data", "prepare", "text.jsonl", "--to", "corpus", "--vocab", "320")
    _quietly(*prepare, "--validation", "0.2", "--shard-tokens", "4096")
    _quietly("simulate", "world.toml", "--run", "run", "--quiet")
    rounds_in_a_bucket(parse_recipe(RECIPE), Path("run"), settle=SETTLED)
    RunDir.open("run").update_about(mode=REAL)  # it has a bucket, as a run of `train` has
    store = open_store("run/bucket", create=False)
    ledger = Ledger(store, read_run(store), load_signer(Path("run/keys/rack-0.key"), "rack-0"))
    ledger.beat(Heartbeat(state="waiting", awaiting="stage 1: no answer", waited_seconds=4.0))
    ledger.ask_to_leave("1")
    _change(ledger)


def _change(ledger: Ledger) -> None:
    """The run's membership: one replica was admitted. And what machines say of themselves."""
    run = ledger.run
    owner = load_signer(Path("run/keys", OWNER_KEY), OWNER)
    own, table = Signer(ADMITTED, bytes([9]) * 32), table_of(run.recipe.replicas[0])
    ledger.membership.order(owner, Changes(admitted=[Admitted(ADMITTED, own.public_key, table)]))
    vitals = Vitals(restarts=2, last_error="no room on the disk", disk_free_bytes=1e6, disk_needed_bytes=1e9)
    ledger.beat(Heartbeat(state="training", incarnation="2", beat=1, round=4, missing=(1,), vitals=vitals))
    bundle = Bundle(url="run/bucket", run="world", run_sha256=run.digest, replica="rack-0", key="ab" * 32)
    bundle.write(Path("rack-0.isthmus.toml"))


def _quietly(*command: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(command))
    if code:
        raise RuntimeError(f"isthmus {' '.join(command)}: {said.getvalue()}")
