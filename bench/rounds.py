"""What closing a round costs: seconds from the last commit until every member holds the manifest; requests.

    python bench/rounds.py [--members 8 32 128] [--rounds 6] [--delay-ms 30] [--slow]

Fake members in some processes, with real keys, little real payloads and the real exchange, on SeaweedFS. Each
request takes `--delay-ms` longer. Nobody trains: a member sleeps 2 to 3 s, delivers, and waits for the
manifest. Payloads are read by the closer alone, who judges them; the others would read them after the round
is settled. The first eight members check everything in a manifest, as every real member does. The rest share
this machine's cores with them, so they only take the bytes; "check ms" is what one whole check costs.
Requests are those of all members and of their heartbeats, as `Store.requests` counts them. `--slow` adds a
store that answers in 2 s, with eight members.

To compare with other code: PYTHONPATH=OTHER/src python bench/rounds.py ...
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import obstore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import servers
from little import RECIPE, Little, Replica

from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.trust import load_signer
from isthmus.store.objects import Store, open_store

WHOLE = 8  # members that check whole manifests
TRAIN_SECONDS = (2.0, 3.0)
BEAT_SECONDS = 3.0
MOST_EACH = 60  # members of one process
PAYLOAD = "payload get"
BEAT = "heartbeat"  # as many as its seconds allow: a round that takes longer has more of them
ONE_SHARD = RECIPE.split("[[replicas]]")[0].replace("heartbeat_seconds = 5", "heartbeat_seconds = 3")


class Delayed:
    """Every request of obstore takes longer; reads of payloads are counted apart."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.payload_reads, self.lock = seconds, 0, threading.Lock()
        self.real = {name: getattr(obstore, name) for name in ("get_async", "put_async", "head_async")}
        self.list = obstore.list

    def __enter__(self) -> "Delayed":
        for name, call in self.real.items():
            setattr(obstore, name, self.later(call, name == "get_async"))
        obstore.list = lambda *args, **more: _Pages(self.list(*args, **more), self.seconds)  # type: ignore[assignment]
        return self

    def __exit__(self, *rest: object) -> None:
        for name, call in self.real.items():
            setattr(obstore, name, call)
        obstore.list = self.list

    def later(self, call: Any, reads: bool) -> Any:
        async def request(client: Any, path: str, *args: Any, **more: Any) -> Any:
            if reads and path.startswith("payloads/"):
                with self.lock:
                    self.payload_reads += 1
            await asyncio.sleep(self.seconds)
            return await call(client, path, *args, **more)

        return request


class _Pages:
    def __init__(self, pages: Any, seconds: float) -> None:
        self.pages, self.seconds = pages, seconds

    async def __anext__(self) -> Any:
        await asyncio.sleep(self.seconds)
        return await anext(self.pages)


class Member:
    """One fake member: it delivers the same update in each round, and waits."""

    def __init__(self, replica: Replica, whole: bool) -> None:
        self.replica, self.name = replica, replica.name
        self.ledger, self.exchange = replica.ledger, replica.exchange
        replica.random.manual_seed(int(self.name[1:]))  # no two alike: copies would have one name
        self.update, self.num_beats = replica.update(), 0
        if not whole:
            light(self.ledger, self.exchange.anchor)

    def beat(self) -> None:
        self.num_beats += 1
        self.ledger.beat(
            Heartbeat(
                incarnation=self.exchange.incarnation, beat=self.num_beats, state="training", kind="full"
            )
        )

    def round(self, t: int, seconds: float) -> tuple[float, float]:
        """(when its commit was there, when it held the manifest)"""
        self.ledger.asked_to_leave(self.exchange.incarnation)  # as a worker does in each round
        self.ledger.heartbeat(self.name)
        self.exchange.closed(t)
        time.sleep(seconds)
        self.exchange.deliver(t, self.update)
        committed = time.monotonic()
        self.exchange._await(t)
        return committed, time.monotonic()


def light(ledger: Ledger, anchor: str) -> None:
    """A manifest as bytes: it is there, and nothing in it is checked."""
    known: dict[int, Manifest] = {}

    def manifest(t: int) -> Manifest | None:
        if t not in known and ledger.store.get(f"manifests/{t:06d}.json", max_bytes=1 << 24):
            known[t] = Manifest(
                round=t,
                anchor=anchor,
                entries=(),
                members=(),
                dealt_in=(),
                deadline_seconds=1.0,
                seconds=1.0,
            )
        return known.get(t)

    ledger.manifest = ledger.manifests.manifest = manifest


class Part:
    """Some of the members, in a process of their own: each has one core's worth of threads at most."""

    def __init__(self, url: str, keys: Path, names: list[str], whole: bool, delay: float) -> None:
        self.delayed = Delayed(delay).__enter__()
        self.pool, self.hearts = ThreadPoolExecutor(len(names)), ThreadPoolExecutor(16)
        signers = [load_signer(keys / f"{name}.key", name) for name in names]
        replicas = self.pool.map(lambda s: Replica(open_store(url), s.replica, s), signers)
        self.members = [Member(replica, whole) for replica in replicas]
        list(self.hearts.map(Member.beat, self.members))
        beats = threading.Thread(target=keep_beating, args=(self.members, self.hearts), daemon=True)
        beats.start()

    def round(self, t: int, times: list[float]) -> tuple[list[tuple[float, float]], Counter[str]]:
        """(when each had committed, when it held the manifest), and the requests since the round began."""
        before = self.counted()
        done = list(self.pool.map(Member.round, self.members, [t] * len(times), times))
        return done, self.counted() - before

    def counted(self) -> Counter[str]:
        found = sum((Counter(member.ledger.store.requests) for member in self.members), Counter[str]())
        beats = sum(member.num_beats for member in self.members)
        found.update({PAYLOAD: self.delayed.payload_reads, "get": -self.delayed.payload_reads})
        found.update({BEAT: beats, "put": -beats})
        return found


def serve(pipe: Connection, *args: Any) -> None:
    """One process: it makes its members, and then does one round for each that it is told."""
    part = Part(*args)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        pipe.send(part.round(*asked))
    os._exit(0)


def measure(url: str, folder: Path, num_members: int, rounds: int, delay: float) -> dict[str, Any]:
    fleet = "".join(f'[[replicas]]\nname = "m{i:03d}"\n' for i in range(num_members))
    recipe = ONE_SHARD.replace("rounds = 6", f"rounds = {rounds}") + fleet
    run = Little(url, folder, recipe, closers=["m000", "m001"])
    parts = [run.names[:WHOLE], *(run.names[i : i + MOST_EACH] for i in range(WHOLE, num_members, MOST_EACH))]
    pipes, processes, context = [], [], get_context("spawn")
    for number, names in enumerate(parts):
        here, there = context.Pipe()
        args = (there, url, run.keys, names, number == 0, delay)
        processes.append(context.Process(target=serve, args=args, daemon=True))
        processes[-1].start()
        pipes.append(here)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * len(pipes)
    took, counts = [], []
    for t in range(1, rounds + 1):
        chance = random.Random(t)
        for pipe, names in zip(pipes, parts, strict=True):
            pipe.send((t, [chance.uniform(*TRAIN_SECONDS) for _ in names]))
        answers = [pipe.recv() for pipe in pipes]
        done = [pair for answer in answers for pair in answer[0]]
        took.append(max(held for _, held in done) - max(committed for committed, _ in done))
        counts.append(sum((answer[1] for answer in answers), Counter[str]()))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return {
        "seconds": took,
        "requests": counts,
        "check_seconds": check_seconds(run, rounds),
        "bytes": open_store(url).head(f"manifests/{rounds:06d}.json").size,  # type: ignore[union-attr]
    }


def keep_beating(members: list[Member], hearts: ThreadPoolExecutor) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        list(hearts.map(Member.beat, members))


def check_seconds(run: Little, rounds: int) -> float:
    """What the check of one manifest costs a member, the request aside."""
    ledger, real, asking = run.ledger(), Store.get, [0.0]
    ledger.manifest(rounds - 1)

    def timed(store: Store, *args: Any, **more: Any) -> bytes | None:
        began = time.perf_counter()
        try:
            return real(store, *args, **more)
        finally:
            asking[0] += time.perf_counter() - began

    Store.get = timed  # type: ignore[method-assign]
    try:
        began = time.perf_counter()
        ledger.manifest(rounds)
        return time.perf_counter() - began - asking[0]
    finally:
        Store.get = real  # type: ignore[method-assign]


def told(name: str, num_members: int, found: dict[str, Any]) -> None:
    later = slice(2, None)  # in the first two rounds nobody knows how long one takes
    seconds, counts = found["seconds"][later], found["requests"][later]
    each = {verb: statistics.mean(c[verb] for c in counts) for verb in sorted(set().union(*counts))}
    payload = each.pop(PAYLOAD)
    verbs = " ".join(f"{verb} {number:.0f}" for verb, number in each.items() if number)
    print(
        f"{name:>10} {num_members:4d} {statistics.median(seconds):8.2f} {max(seconds):8.2f} "
        f"{sum(each.values()):9.0f} {sum(each.values()) / num_members:6.1f} {payload:8.0f}  "
        f"{1e3 * found['check_seconds']:6.0f} {found['bytes'] / 1e3:6.0f}  {verbs}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument(
        "--slow", action="store_true", help="a store that answers in 2 s too, with eight members"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "server").mkdir()
        server = servers.start_seaweed(folder / "server")
        if isinstance(server, str):
            print(server, file=sys.stderr)
            return 1
        os.environ |= servers.admins_environment(server.endpoint)
        print("seconds from the last commit until every member holds the manifest, and requests of a round")
        print(f"{'store':>10}    M   median     most  requests    x M  payload  check ms     kB  by verb")
        plans = [(f"{args.delay_ms:.0f} ms", m, args.delay_ms / 1e3, args.rounds) for m in args.members]
        plans += [("2 s", 8, 2.0, 4)] if args.slow else []
        for number, (words, num_members, delay, rounds) in enumerate(plans):
            url = f"s3://{servers.BUCKET}/rounds-{number}"
            told(words, num_members, measure(url, folder / str(number), num_members, rounds, delay))
        server.kill()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
