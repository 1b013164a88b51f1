"""A long history without training: manifests signed by all, round after round; the last rounds are real."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from little import RECIPE, Little, Replica, rounds
from msgspec.structs import replace

from isthmus.protocol.documents import Entry, Manifest, Shard
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.manifests import manifest_key
from isthmus.protocol.trust import Signer, sha256
from isthmus.runlog.facts import Facts
from isthmus.store.together import together

# What a replica of one process reports in a real run.
MEASURED = ("compute_seconds", "apply_seconds", "up_seconds", "down_seconds", "wait_seconds", "peak_bytes")
FACTS = Facts(
    loss=3.25,
    grad_norm=0.5,
    seconds=30.5,
    bytes={"payload_up": 123456, "payload_down": 987654, "control": 4321},
    measured={name: [1.2345] for name in MEASURED},
)


def recipe_of(num_replicas: int, num_rounds: int, anchor_every: int = 10) -> str:
    """Full replicas only: an update has one shard."""
    head = RECIPE[: RECIPE.index("[[replicas]]")]
    head = head.replace("rounds = 6", f"rounds = {num_rounds}")
    head = head.replace("anchor_every = 2", f"anchor_every = {anchor_every}")
    return f'{head}[[replicas]]\nname = "r"\ncount = {num_replicas}\n'


class Long:
    """A run that is made to have settled many rounds. No payload of them is there but of the last."""

    def __init__(
        self,
        url: str,
        folder: Path,
        num_replicas: int = 3,
        num_rounds: int = 1000,
        anchor_every: int = 10,
        **model: int,
    ) -> None:
        recipe = recipe_of(num_replicas, num_rounds, anchor_every)
        for key, value in model.items():
            recipe = re.sub(rf"^{key} = .*", f"{key} = {value}", recipe, flags=re.MULTILINE)
        self.little = Little(url, folder, recipe, closers=["r-0", "r-1"])
        self.names, self.url = self.little.names, url
        self.signers = {name: self.little.signer(name) for name in self.names}
        self.ledger: Ledger = self.little.ledger("r-0")
        self.shards = tuple(Shard(i, "5" * 64, size) for i, size in enumerate(self.ledger.sizes))
        self.previous, self.done = self.ledger.run.digest, 0
        self.start = ""  # digest of the anchor that the next round starts from

    def manifest(self, t: int, names: Sequence[str] = (), closer: Signer | None = None) -> bytes:
        """Of round t, chained to the last, with updates of `names` (all), whose payloads nobody has."""
        anchor = self.start or sha256(f"anchor {t - 1}".encode())
        entries = [self._entry(name, t) for name in names or self.names]
        made = Manifest(
            round=t,
            anchor=anchor,
            entries=tuple(entries),
            members=tuple(self.names),
            dealt_in=tuple(self.names),
            deadline_seconds=60.0,
            seconds=30.0 + t % 7,
            membership=self.ledger.run.digest,
            dealt=t * self.ledger.run.recipe.outer.inner_steps * len(self.names),
        )
        made = replace(made, previous=self.previous)
        return (closer or self.signers["r-0"]).seal("manifest", self.ledger.run.run_id, made)

    def _entry(self, name: str, t: int) -> Entry:
        return Entry(name, self.shards, norm=1.0 + t % 3 / 10, facts=FACTS)

    def made(self, last: int) -> Iterator[tuple[int, bytes]]:
        """Manifests up to round `last`, one after another."""
        for t in range(self.done + 1, last + 1):
            sealed = self.manifest(t)
            self.previous, self.done = sha256(sealed), t
            yield t, sealed

    def settle(self, last: int) -> "Long":
        """Put them, some hundreds at a time; every replica's heartbeat says how far it is."""
        batch, put = list[tuple[int, bytes]](), self.ledger.store.put
        for t, sealed in self.made(last):
            batch.append((t, sealed))
            if len(batch) == 200 or t == last:
                together([lambda t=t, sealed=sealed: put(manifest_key(t), sealed) for t, sealed in batch], 32)
                batch.clear()
        self.beat(last)
        return self

    def beat(self, reached: int, names: Sequence[str] = ()) -> None:
        for name in names or self.names:
            beat = Heartbeat(incarnation="0", beat=reached + 1, state="training", round=reached)
            sealed = self.signers[name].seal("heartbeat", self.ledger.run.run_id, beat)
            self.ledger.store.put(f"members/{name}/live.json", sealed, durable=False)

    def anchored(self, last: int) -> list[Replica]:
        """As `settle`; theta^(last) is then as the seed draws it, and an anchor in the bucket."""
        self.settle(last)
        replicas = self.little.replicas()
        for each in replicas:
            each.hold(last)
        self.start = replicas[0].exchange.anchor
        replicas[0].write_anchor(last)
        return replicas

    def real(self, replicas: Sequence[Replica], last: int) -> None:
        """Real rounds after those, with payloads, by the whole protocol."""
        for t in range(self.done + 1, last + 1):
            rounds(replicas, [t])
        self.done = last
        self.beat(last)


def resident_bytes() -> int:
    """What this process holds of the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# What can be done to a manifest


def forged(run: Long, t: int) -> None:
    store = run.ledger.store
    document = json.loads(store.get(manifest_key(t), max_bytes=1 << 22))
    document["body"]["seconds"] += 1
    store.put(manifest_key(t), json.dumps(document).encode())


def resealed(run: Long, t: int) -> None:
    """By a closer, and so that nothing but the link of the next one shows it."""
    store = run.ledger.store
    body = json.loads(store.get(manifest_key(t), max_bytes=1 << 22))["body"]
    body["seconds"] += 1
    store.put(manifest_key(t), run.signers["r-0"].seal("manifest", run.ledger.run.run_id, body))


def removed(run: Long, t: int) -> None:
    run.ledger.store.delete(manifest_key(t))
