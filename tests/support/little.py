"""A little real run, in threads: a recipe, replicas with their keys, random updates, and forgeries."""

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import to_builtins
from msgspec.structs import replace
from torch import Tensor

from isthmus.config import Recipe, parse_recipe
from isthmus.errors import RunError
from isthmus.model.digest import shard_digest
from isthmus.model.llama import init_params
from isthmus.outer.exchange import Contribution
from isthmus.outer.sparseloco import SparseLoCo
from isthmus.protocol.clipping import clip_factors, clipped_in
from isthmus.protocol.closer import Closer
from isthmus.protocol.documents import Commit, Manifest, Shard
from isthmus.protocol.exchange import LedgerExchange, Standing
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.judge import judged
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.payloads import commit_key
from isthmus.protocol.replay import digest_from_bucket
from isthmus.protocol.shards import ShardReader, unpack_shards
from isthmus.protocol.trust import Signer, load_signer, sha256
from isthmus.replica.control_group import SingleProcess
from isthmus.runtime.create import create
from isthmus.sparse import pack_many
from isthmus.store import Store, open_store

RECIPE = """
name = "little"
[model]
preset = "nano"
vocab = 64
width = 32
layers = 2
ffn = 64
heads = 2
context = 16
[data]
corpus = "not-here"
[inner]
batch = 4
micro_batches = 2
[outer]
inner_steps = 1
rounds = 6
keep = 8
[bucket]
anchor_every = 2
heartbeat_seconds = 5
[[replicas]]
name = "a"
[[replicas]]
name = "b"
[[replicas]]
name = "c"
kind = "pipelined"
stages = 2
"""  # the stages cut every update into three shards; the text is not needed
LONG = RECIPE.replace("rounds = 6", "rounds = 40").replace("anchor_every = 2", "anchor_every = 50")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the disk when the power goes is the store's own tests' business."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Exchange(LedgerExchange):
    """An exchange whose rounds a test takes one by one."""

    def closed(self, round_number: int) -> Sequence[Contribution] | None:
        """What counts in a round that was settled without us; None while it is open."""
        if self.enter(round_number) is not Standing.SETTLED:
            return None
        return self.counted(round_number)[1]

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        """Deliver, wait until the round is settled, and return what counts in it."""
        for mine in own:
            self.deliver(round_number, mine)
        return self.counted(round_number)[1]


class Replica:
    """One member in this process: its ledger, its exchange, its anchor, its own random pseudo-gradients."""

    def __init__(
        self, url: str | Store, name: str, signer: Signer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        store = open_store(url) if isinstance(url, str) else url
        self.name, self.ledger = name, Ledger(store, read_run(store), signer)
        self.recipe: Recipe = self.ledger.run.recipe
        self.anchor = init_params(self.recipe.model, self.recipe.seed)
        self.outer = SparseLoCo(self.anchor, self.recipe.outer)
        self.feedback = {key: torch.zeros_like(tensor) for key, tensor in self.anchor.items()}
        self.random = torch.Generator().manual_seed(sum(name.encode()))
        every = range(len(self.ledger.shards))
        self.said: list[str] = []
        self.num_beats = 0
        reader, log = ShardReader(self.ledger, every), self.said.append
        closes = name in self.ledger.run.closers
        whole = any(m.name == name and m.config.parts == 1 for m in self.recipe.fleet())
        replayed = partial(digest_from_bucket, self.ledger) if whole else lambda t: ""
        closer = Closer(self.ledger, reader, log, clock, replayed=replayed) if closes else None
        incarnation = os.urandom(8).hex()
        self.exchange = Exchange(self.ledger, SingleProcess(), every, reader, closer, incarnation, log)
        self.hold(0)

    def hold(self, round_number: int) -> str:
        every = enumerate(self.ledger.shards)
        return self.exchange.edge.hold_now(
            round_number, {i: shard_digest(self.anchor, names) for i, names in every}
        )

    def update(self, scale: float = 0.01) -> Contribution:
        params = {
            key: tensor - scale * torch.randn(tensor.shape, generator=self.random)
            for key, tensor in self.anchor.items()
        }
        return self.packed(self.outer.contribute(params, self.feedback))

    def packed(self, sent: Mapping[str, Any]) -> Contribution:
        names = enumerate(self.ledger.shards)
        return Contribution(self.name, {i: pack_many({n: sent[n] for n in part}) for i, part in names})

    def apply(self, round_number: int, counted: Sequence[Contribution]) -> None:
        updates = {each.replica: unpack_shards(self.ledger, each.shards) for each in counted}
        factors = clip_factors(self.ledger, round_number, updates)
        self.outer.apply(list(updates.values()), None, factors)
        self.hold(round_number)
        if round_number % self.recipe.bucket.anchor_every == 0:
            self.write_anchor(round_number)

    def write_anchor(self, round_number: int) -> None:
        if self.ledger.manifest(round_number).closer == self.name:
            files = [
                self.ledger.put_anchor_shard(round_number, i, {key: self.anchor[key] for key in names})
                for i, names in enumerate(self.ledger.shards)
            ]
            self.ledger.complete_anchor(round_number, self.exchange.anchor, files)

    def beat(self, state: str = "training", **more: Any) -> None:
        self.num_beats += 1
        body = to_builtins(Heartbeat(incarnation="1", beat=self.num_beats, state=state, round=1)) | more
        sealed = self.ledger.signer.seal("heartbeat", self.ledger.run.run_id, body)
        self.ledger.store.put(f"members/{self.name}/live.json", sealed)

    def round(self, round_number: int, mine: Contribution | None = None) -> None:
        own = [self.update() if mine is None else mine]
        self.apply(round_number, self.exchange.close(round_number, own))

    def entry(self, mine: Contribution, **changed: Any) -> Commit:
        rows = tuple(Shard(i, sha256(data), len(data)) for i, data in sorted(mine.shards.items()))
        plain = Commit(round=1, anchor=self.exchange.anchor, incarnation="1", shards=rows)
        return replace(plain, **changed)

    def deliver_as(self, round_number: int, mine: Contribution, entry: Commit | None = None) -> None:
        """Shards and commit as `deliver` puts them, with whatever the caller changed in them."""
        for index, data in mine.shards.items():
            self.ledger.put_shard(round_number, index, data)
        entry = replace(entry or self.entry(mine), incarnation=self.exchange.incarnation)
        self.ledger.commit(replace(entry, round=round_number))

    def commit_key(self, round_number: int = 1) -> str:
        return commit_key(self.name, round_number)

    def sealed(self, round_number: int, entry: Commit, by: Signer | None = None, **changed: Any) -> bytes:
        body = to_builtins(replace(entry, round=round_number))
        return (by or self.ledger.signer).seal("commit", self.ledger.run.run_id, body | changed)


class Little:
    """A run in a store, with its keys on disk."""

    def __init__(
        self,
        url: str,
        folder: Path,
        recipe: str = RECIPE,
        closers: Sequence[str] | None = None,
        room: Sequence[int] = (),
    ) -> None:
        self.url, self.keys = url, folder / "keys"
        parsed = parse_recipe(recipe)
        full_first = sorted(parsed.fleet(), key=lambda member: member.config.parts > 1)
        closers = closers or [member.name for member in full_first]
        self.run = create(parsed, url, self.keys, closers, room=room)
        self.names = [member.name for member in self.run.recipe.fleet()]

    def signer(self, name: str) -> Signer:
        return load_signer(self.keys / f"{name}.key", name)

    def replica(self, name: str, clock: Callable[[], float] = time.monotonic) -> Replica:
        return Replica(self.url, name, self.signer(name), clock)

    def replicas(self, clock: Callable[[], float] = time.monotonic) -> list[Replica]:
        return [self.replica(name, clock) for name in self.names]

    def ledger(self, name: str | None = None) -> Ledger:
        store = open_store(self.url)
        return Ledger(store, read_run(store), self.signer(name) if name else None)

    def manifest(self, round_number: int = 1) -> Manifest:
        return self.ledger().manifest(round_number)


def at_once(*calls: Callable[[], Any], timeout_seconds: float = 240.0) -> list[Any]:
    """What each returned, or the first exception: every call in a thread of its own."""
    results: list[Any] = [None] * len(calls)
    faults: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if faults:
        raise faults[0]
    assert not any(thread.is_alive() for thread in threads), "a round does not end"
    return results


def rounds(replicas: Sequence[Replica], numbers: Sequence[int]) -> None:
    """Whole rounds of all of them, one thread each, and nobody taken for dead."""
    for number in numbers:
        for each in replicas:
            each.beat()
        at_once(*(lambda each=each, number=number: each.round(number) for each in replicas))


def close(round_number: int, closer: Replica, givers: Sequence[Replica]) -> None:
    """A round is settled as a closer does it, without its waiting: of copies that it keeps."""
    ledger, anchor = closer.ledger, closer.exchange.anchor
    sealed = {each.name: ledger.get_commit(each.name, round_number) or b"" for each in givers}
    read = closer.exchange.reader.read
    given = {n: ledger.check_commit(data, n, round_number, anchor) for n, data in sealed.items()}
    entries = tuple(
        judged(ledger, name, commit, [read(name, round_number, shard) for shard in commit.shards])
        for name, commit in given.items()
        if not commit.skip
    )
    names = tuple(member.name for member in closer.recipe.fleet())
    clipped = clipped_in(ledger, round_number, {entry.replica: entry.norm for entry in entries})
    how = {
        "members": names,
        "dealt_in": names,
        "deadline_seconds": 60.0,
        "seconds": 1.0,
        "clipped": clipped,
    }
    assert ledger.create_manifest(Manifest(round=round_number, anchor=anchor, entries=entries, **how))


def settle(
    round_number: int, closer: Replica, givers: Sequence[Replica], readers: Sequence[Replica] | None = None
) -> None:
    """A whole round in one thread; `readers` apply it."""
    for each in givers:
        each.exchange.deliver(round_number, each.update())
    close(round_number, closer, givers)
    for each in givers if readers is None else readers:
        each.apply(round_number, each.exchange.closed(round_number))


# A round by hand: who gives, who closes, who applies, and how old an object is


def give(round_number: int, *replicas: Replica) -> None:
    for each in replicas:
        each.exchange.deliver(round_number, each.update())


def closes(replica: Replica, round_number: int) -> bool:
    """Does its attempt settle the round, whatever it heard a moment ago?"""
    replica.exchange.closer.presence.look_again()
    return replica.exchange.closer.attempt(round_number, replica.exchange.anchor)


def apply(round_number: int, *replicas: Replica) -> None:
    for each in replicas:
        each.apply(round_number, each.exchange.closed(round_number))


def ago(replica: Replica, key: str, seconds: float) -> None:
    """Let an object of a folder be so old, as the store's clock has it."""
    then = time.time() - seconds
    os.utime(Path(replica.ledger.store.url, key), (then, then))


@contextmanager
def beating(replicas: Sequence[Replica]) -> Iterator[None]:
    """They send heartbeats meanwhile, as real processes do, also while the store is away."""
    ended = threading.Event()

    def beat(replica: Replica) -> None:
        while not ended.wait(0.15):
            with suppress(RunError):
                replica.beat()

    for each in replicas:
        threading.Thread(target=beat, args=(each,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def with_value(data: bytes, value: float) -> bytes:
    """A payload of fp32 values, its last value replaced and its checksum made to fit again."""
    body = data[:-8] + struct.pack("<f", value)
    return body + struct.pack("<I", zlib.crc32(body))


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def rewritten(store: Store, key: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a document where it lies."""
    document = json.loads(store.get(key, max_bytes=1 << 22))
    change(document)
    store.put(key, json.dumps(document).encode())
