"""What a long history costs: 10,000 rounds on SeaweedFS, for whoever comes to look or to join.

    .venv/bin/python bench/history.py                          # all parts, M = 8; some minutes
    .venv/bin/python bench/history.py --rounds 1000 --parts status joiner
    .venv/bin/python bench/history.py --parts memory           # one member over 10,000 rounds at M = 128

The history is made up (tests/support/fabricated.py): every manifest and commit is signed by real keys, but no
payload of it exists. Of the last rounds all is real, from an anchor on. `requests` are those of the store,
each try counted, payload reads apart; an S3 server counts a page of a listing as one. Prints a table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import pytest
import servers
from fabricated import Long, resident_bytes

from isthmus.protocol.access import open_ledger
from isthmus.protocol.fleet_state import look
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.manifests import manifest_key
from isthmus.protocol.members import Members
from isthmus.protocol.trust import load_signer
from isthmus.store import open_store

PARTS = ("status", "joiner", "show", "watch", "verify", "memory")
AFTER = 4  # real rounds after the anchor


@contextmanager
def timed(what: str, ledger: Ledger | None = None, note: Callable[[], str] = str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    asked = sum(ledger.store.requests.values()) if ledger else None
    print(f"| {what} | {asked if asked is not None else '-'} | {seconds:.2f} | {note()} |", flush=True)


def status(url: str) -> None:
    ledger = open_ledger(url)
    with timed("`status`: the reading", ledger, lambda: f"round {found.round}"):
        found = look(ledger)
    with timed("`isthmus status`, a process of its own"):
        subprocess.run([sys.executable, "-m", "isthmus", "status", url], check=True, capture_output=True)


def joiner(url: str, keys: Path) -> None:
    """A worker without private state, as `isthmus join` starts it, up to where it would train."""
    import numpy as np
    import torch

    from isthmus.data.corpus import TokenView
    from isthmus.data.tokens import Batches
    from isthmus.replica.control_group import SingleProcess
    from isthmus.replica.full import FullReplica
    from isthmus.runtime.trainer import Trainer

    store = open_store(url)
    ledger = Ledger(store, read_run(store), load_signer(keys / "r-2.key", "r-2"))
    recipe, cpu = ledger.run.recipe, torch.device("cpu")
    member = next(member for member in recipe.fleet() if member.name == "r-2")
    text = TokenView("none", [np.zeros(10_000, dtype=np.uint16)])  # it is never trained on
    batches = Batches(text, 0, recipe.num_replicas, recipe.inner.batch, recipe.model.context)
    replica = FullReplica(recipe, member, batches, device=cpu, precision="fp32")
    with tempfile.TemporaryDirectory() as work:
        arguments = (cpu, Path(work), os.urandom(8).hex(), lambda text: None)
        trainer = Trainer(recipe, member, replica, ledger, SingleProcess(), *arguments, background=False)
        payloads = 0

        def rest() -> str:
            return f"round {done}; {payloads} of them read payloads"

        with timed("a joiner up to its first round", ledger, rest):
            done = trainer.resume()
            while not trainer.begin(done + 1):
                done = trainer.settle(done + 1)
                payloads += len(ledger.shards) * len(ledger.manifest(done).entries)


def show(url: str) -> None:
    with timed("`isthmus ledger show`, the last 20"):
        subprocess.run(
            [sys.executable, "-m", "isthmus", "ledger", "show", url], check=True, capture_output=True
        )


def watch(url: str, last: int) -> None:
    """Real HTTP: until a page with the newest round is there, and until every round is."""
    began = time.monotonic()
    command = [sys.executable, "-m", "isthmus", "watch", url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address, first = process.stdout.readline().strip(), 0.0
        try:
            while True:
                state = json.loads(urlopen(f"{address}state", timeout=30).read())
                if not first and state["run"]["round"] == last:
                    first = time.monotonic() - began
                    print(
                        f"| `isthmus watch`: the newest round is on the page | - | {first:.2f} | |",
                        flush=True,
                    )
                if state["run"]["round"] == last and not state["run"]["unread"]:
                    break
                time.sleep(0.2)
        finally:
            process.kill()
    print(f"| `isthmus watch`: every round is | - | {time.monotonic() - began:.2f} | |", flush=True)


def verify(url: str, anchor: int, whole: bool) -> None:
    command = [sys.executable, "-m", "isthmus", "ledger", "verify", url]
    with timed(f"`ledger verify --from {anchor}`, {AFTER} rounds"):
        subprocess.run([*command, "--from", str(anchor)], check=True, capture_output=True)
    if whole:
        with timed("`ledger verify`, every manifest"):
            subprocess.run(command, check=True, capture_output=True)


def memory(folder: Path, num_replicas: int, last: int) -> None:
    """A member that follows: each manifest is made, read and checked, and dropped from the disk again."""
    folder.mkdir()
    run = Long(str(folder / "bucket"), folder, num_replicas, last)
    ledger = run.little.ledger("r-1")
    members, began = Members(ledger), time.monotonic()
    for t, sealed in run.made(last):
        run.ledger.store.put(manifest_key(t), sealed, durable=False)
        manifest = ledger.manifest(t)
        assert manifest is not None
        members.awaited(t + 1)
        members.next_deadline(t, manifest.seconds)
        if t > 200:
            run.ledger.store.delete(manifest_key(t - 200))
        if t in (last // 100, last // 10, last // 2, last):
            spent = time.monotonic() - began
            words = f"{resident_bytes() / 2**20:.0f} MiB resident"
            print(
                f"| a member at M = {num_replicas}, after round {t} | - | {spent:.0f} | {words} |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="what a long history costs")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--members", type=int, default=128, help="replicas of the part `memory`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--whole", action="store_true", help="also verify all manifests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        print(f"{args.rounds} rounds, M = {args.replicas}\n")
        print("| what | requests | seconds | |\n|---|---:|---:|---|", flush=True)
        if set(args.parts) - {"memory"}:
            measure(args, folder, patch)
        if "memory" in args.parts:
            patch.setattr(os, "fsync", lambda handle: None)
            memory(folder / "memory", args.members, args.rounds)


def measure(args: argparse.Namespace, folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "weed").mkdir()
    server = servers.start_seaweed(folder / "weed")
    if isinstance(server, str):
        raise SystemExit(server)
    try:
        servers.use(patch, server.endpoint)
        url, last = f"s3://{servers.BUCKET}/long", args.rounds - 10  # the run goes on
        anchor = (last - AFTER) // 10 * 10
        run = Long(url, folder, args.replicas, args.rounds)
        began = time.monotonic()
        replicas = run.anchored(anchor)
        run.real(replicas, anchor + AFTER)
        print(f"made in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if "status" in args.parts:
            status(url)
        if "joiner" in args.parts:
            joiner(url, folder / "keys")
        if "show" in args.parts:
            show(url)
        if "watch" in args.parts:
            watch(url, anchor + AFTER)
        if "verify" in args.parts:
            verify(url, anchor, args.whole)
    finally:
        server.kill()


if __name__ == "__main__":
    main()
