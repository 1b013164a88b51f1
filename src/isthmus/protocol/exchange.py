"""Exchange through an object store: deliver shards and a commit, wait for the manifest, fetch what counts."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.errors import Diverged, RunError
from isthmus.model.digest import anchor_digest
from isthmus.outer.exchange import Contribution
from isthmus.protocol.closer import Closer
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.trust import MOST_PROCESSES, Refused, sha256
from isthmus.replica.control_group import ControlGroup, agree, collect
from isthmus.store.retry import StoreError

POLL_SECONDS = (0.1, 1.0)  # between looks at the manifest: soon at first, then patiently
TELL_SECONDS = 30.0  # until the first line that says what a round waits for


class LedgerExchange:
    """One process's end of the exchange. `writes` are the shards it delivers, `reads` those it applies.

    Only the manifest settles a round, never the result of a PUT: a PUT that reported an error may have
    landed.
    """

    def __init__(
        self,
        ledger: Ledger,
        control: ControlGroup,
        writes: Sequence[int],
        reads: Sequence[int],
        incarnation: str,
        log: Callable[[str], None],
    ) -> None:
        self.ledger, self.control, self.incarnation, self.log = ledger, control, incarnation, log
        self.writes, self.reads = tuple(writes), tuple(reads)
        self.replica = ledger.signer.replica
        self.anchor = ""  # digest of the anchor that all hold now
        self.facts: Callable[[], Mapping[str, Any]] = dict
        self.sent = {"payload_up": 0, "payload_down": 0}
        self.spent = {"up_seconds": 0.0, "down_seconds": 0.0}  # with payloads
        self.moved = 0  # what the store had moved when counts were last taken
        self.cache: dict[str, bytes] = {}
        self.closer = None
        if control.rank == 0 and self.replica in ledger.run.closers:
            self.closer = Closer(ledger, self.fetch, log)
        self.awaiting = ""  # what this process waits for: the heartbeat tells it

    def hold_anchor(self, round_number: int, digests: Mapping[int, str]) -> str:
        """Say which anchor this replica holds after `round_number`; all of its processes must fit
        together."""
        parts = collect(self.control, dict(digests), len(self.ledger.shards))
        for mine in self.control.share(json.dumps({str(i): d for i, d in digests.items()}).encode()):
            for index, digest in json.loads(mine).items():
                if parts[int(index)] != digest:
                    raise Diverged(
                        f"replica {self.replica}: its stages hold different copies of shard {index} "
                        f"after round {round_number}"
                    )
        self.anchor = anchor_digest(parts)
        return self.anchor

    def closed(self, round_number: int) -> Sequence[Contribution] | None:
        """All processes of a replica take the lead's answer, so that none trains a round the others skip."""
        self.cache.clear()
        there = self.control.rank == 0 and self.ledger.manifest(round_number) is not None
        return self._counted(self._await(round_number)) if agree(self.control, there) else None

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        for mine in own:  # none, when this replica has nothing to give this time
            self.deliver(round_number, mine)
        return self._counted(self._await(round_number))

    def deliver(self, round_number: int, mine: Contribution) -> None:
        """Shards first, the commit last; doing it again after a crash changes nothing."""
        self.cache.clear()
        for index in self.writes:
            data = mine.shards[index]
            self.cache[sha256(data)] = data
            started = time.monotonic()
            self.ledger.put_shard(round_number, index, data)
            self.spent["up_seconds"] += time.monotonic() - started
            self.sent["payload_up"] += len(data)
        rows = {i: json.dumps([sha256(mine.shards[i]), len(mine.shards[i])]) for i in self.writes}
        listed = [json.loads(text) for text in collect(self.control, rows, len(self.ledger.shards))]
        facts = self.gathered_facts()
        if self.control.rank == 0:
            shards = tuple(Shard(i, digest, size) for i, (digest, size) in enumerate(listed))
            entry = Entry(self.replica, shards, 0.0, facts)
            self.ledger.commit(round_number, self.incarnation, self.anchor, entry)

    def gathered_facts(self) -> dict[str, Any]:
        """The lead's facts, with the byte counts of all processes added up and their figures side by side."""
        every = [json.loads(data) for data in self.control.share(json.dumps(dict(self.facts())).encode())]
        total: dict[str, int] = {}
        for facts in every:
            for purpose, count in facts.get("bytes", {}).items():
                total[purpose] = total.get(purpose, 0) + int(count)
        gathered = every[0] | {"bytes": total}
        figures = [facts.get("measured", {}) for facts in every]
        if len(every) <= MOST_PROCESSES:  # more would be too long for a commit
            gathered["measured"] = {name: [row.get(name, 0) for row in figures] for name in figures[0]}
        else:
            gathered.pop("measured", None)
        return gathered

    def _await(self, round_number: int) -> Manifest:
        """Wait for the manifest; a closer tries to make it meanwhile.

        There is no limit: a round may wait for a quorum as long as it takes. But the log says so, and why.
        """
        pause, last = POLL_SECONDS
        self.awaiting = f"the manifest of round {round_number}"
        began, tell = time.monotonic(), TELL_SECONDS
        while True:
            try:
                if (manifest := self.ledger.manifest(round_number)) is not None:
                    break
                if self.closer and self.closer.attempt(round_number, self.anchor):
                    continue
                if self.control.rank == 0 and (waited := time.monotonic() - began) > tell:
                    self.log(f"round {round_number}: {self._missing(round_number)} ({waited:.0f} s so far)")
                    tell = 2 * waited
            except StoreError as error:  # a bucket that is away comes back, and waiting is all we do here
                if error.kind != "network":
                    raise
                self.log(f"round {round_number}: {error}; still trying")
            time.sleep(pause)
            pause = min(last, pause * 1.3)
        self.awaiting = ""
        if self.anchor and manifest.anchor != self.anchor:
            raise Diverged(
                f"replica {self.replica} holds another anchor than round {round_number} started from; it "
                "must join anew from the bucket"
            )
        return manifest

    def _missing(self, round_number: int) -> str:
        """Why an open round is open."""
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = previous.members if previous else tuple(self.ledger.run.keys)
        missing = [name for name in members if not self.ledger.has_commit(name, round_number)]
        if not missing:
            return "every update is there; waiting for a closer to settle the round"
        return f"waiting for the update{'s' * (len(missing) > 1)} of {', '.join(missing)}"

    def _counted(self, manifest: Manifest) -> list[Contribution]:
        """What counts in the round, as far as this process needs it. A listed shard that is not there stops
        us: readers never skip a payload on their own."""
        counted = []
        for entry in manifest.entries:
            shards = {}
            for index in self.reads:
                try:
                    shards[index] = self.fetch(entry.replica, manifest.round, entry.shards[index])
                except Refused as reason:
                    raise RunError(f"round {manifest.round} counts {entry.replica}, but {reason}") from None
            counted.append(Contribution(entry.replica, shards))
        for name, reason in manifest.refused:
            if name == self.replica:
                self.log(f"round {manifest.round}: our update was refused: {reason}")
        return counted

    def counts_in(self, manifest: Manifest, shards: Mapping[int, str]) -> bool:
        """Does the manifest count exactly these shards (index -> hash) of ours?"""
        for entry in manifest.entries:
            if entry.replica == self.replica:
                return all(entry.shards[index].digest == digest for index, digest in shards.items())
        return False

    def fetch(self, replica: str, round_number: int, shard: Shard) -> bytes:
        """A shard's bytes, checked; from memory when it is our own or was read before."""
        if shard.digest not in self.cache:
            started = time.monotonic()
            self.cache[shard.digest] = self.ledger.get_shard(replica, round_number, shard)
            if shard.index in self.reads:  # a pipelined closer reads more than it applies
                self.sent["payload_down"] += shard.size
                self.spent["down_seconds"] += time.monotonic() - started
        return self.cache[shard.digest]

    def pop_counts(self) -> dict[str, int]:
        """Bytes since the last call. `control` is all that the store moved and was no payload of the round:
        documents, heartbeats, anchors, and what a closer reads only to check it."""
        total = self.ledger.store.bytes_sent + self.ledger.store.bytes_received
        moved, self.moved = total - self.moved, total
        counts, self.sent = self.sent, dict.fromkeys(self.sent, 0)
        return counts | {"control": moved - sum(counts.values())}

    def pop_seconds(self) -> dict[str, float]:
        """Seconds since the last call in which payloads went up, and came down; waiting is not in them."""
        spent, self.spent = self.spent, dict.fromkeys(self.spent, 0.0)
        return {name: round(seconds, 4) for name, seconds in spent.items()}
