"""A small world to spoil: a corpus, a run directory with its bucket and keys, exported folders, machines.

Made once by the code that makes real ones. Every path in it is relative, so that a copy is as good.
"""

import contextlib
import io
import json
import os
import random
import time
from pathlib import Path

import torch
from seats import rounds_in_a_bucket
from small_recipes import pipelined, recipe_text, replicas

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.model.checkpoint import save
from isthmus.protocol.access import OWNER_KEY
from isthmus.protocol.bundle import Bundle
from isthmus.protocol.changes import Changes, document
from isthmus.protocol.heartbeat import Heartbeat, Vitals
from isthmus.protocol.invitations import invitation_key, request_key
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.log_lines import LogLines, put_log
from isthmus.protocol.membership import Epoch, membership_key, table_of
from isthmus.protocol.repairs import Decision
from isthmus.protocol.trust import INVITED, OWNER, Signer, load_signer, save_secret
from isthmus.store import open_store

WORDS = ("the", "tree", "house", "of", "river", "runs", "over", "stone", "bird", "sings", "by", "night", "to")
SETTLED = 3
ADMITTED, ASKS = "attic", "barn"
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
    _change(ledger)
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4, dtype=torch.int64)}
    save(Path("state"), 3, {"anchor": tensors, "outer": tensors})


def _change(ledger: Ledger) -> None:
    """The run's membership: one was admitted, one is invited and asks, one wants another key. And what
    machines say of themselves."""
    store, run, names = ledger.store, ledger.run, iter((ADMITTED, ASKS))
    owner = load_signer(Path("run/keys", OWNER_KEY), OWNER)
    pairs = []
    for i, name in enumerate(names):
        once, own = Signer(INVITED, bytes([1 + i]) * 32), Signer(name, bytes([9 + i]) * 32)
        save_secret(Path(f"run/keys/{INVITED}-{once.public_key}.key"), bytes([1 + i]) * 32, run.digest)
        invitation = {
            **{"name": name, "table": table_of(run.recipe.replicas[0]), "key": once.public_key},
            **{"expires": 2**39, "after": 0, "closes": 0},
        }
        request = {"name": name, "key": own.public_key}
        pair = {
            "invitation": owner.seal("invitation", run.run_id, invitation),
            "request": once.seal("request", run.run_id, request),
        }
        store.put(invitation_key(once.public_key), pair["invitation"])
        store.put(request_key(once.public_key), pair["request"])
        pairs.append({kind: json.loads(data) for kind, data in pair.items()})
    admitted = Changes(admitted=pairs[:1])
    store.put(membership_key(1), document(Epoch.first(run), ledger.signer, time.time(), admitted))
    other = load_signer(Path("run/keys/rack-1.key"), "rack-1")
    body = {"name": "rack-1", "key": "ab" * 32, "old": other.public_key}
    store.put(request_key(other.public_key), other.seal("rotation", run.run_id, body))
    vitals = Vitals(restarts=2, last_error="no room on the disk", disk_free_bytes=1e6, disk_needed_bytes=1e9)
    ledger.beat(Heartbeat(state="training", incarnation="2", beat=1, round=4, missing=(1,), vitals=vitals))
    put_log(ledger, LogLines(0, ("round 1: begins", "round 1: done")))
    bundle = Bundle(url="run/bucket", run="world", run_sha256=run.digest, replica="rack-0", key="ab" * 32)
    bundle.write(Path("rack-0.isthmus.toml"))


def _quietly(*command: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(command))
    if code:
        raise RuntimeError(f"isthmus {' '.join(command)}: {said.getvalue()}")
