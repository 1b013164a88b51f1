"""Exchange through an object store: deliver shards and a commit, wait for the manifest, read what counts."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from isthmus.errors import Diverged, RunError
from isthmus.layout.requests import SHORTEST_SECONDS
from isthmus.model.digest import anchor_digest
from isthmus.outer.exchange import Contribution
from isthmus.protocol.closer import Closer
from isthmus.protocol.judge import other_start
from isthmus.protocol.ledger import Entry, Ledger, Manifest, Shard
from isthmus.protocol.looks import RoundClock
from isthmus.protocol.patience import Patience
from isthmus.protocol.rescue import Rescue
from isthmus.protocol.scores import is_spent
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.trust import sha256
from isthmus.replica.control_group import ControlGroup, agree, collect, shard_texts, share_json, whole_number
from isthmus.runlog.facts import Facts
from isthmus.store import StoreError
from isthmus.store.together import together

LOOK_SECONDS = 30.0  # after which the leader tells the others of its replica that it still waits
FIRST_NOTE_SECONDS = 30.0  # until the log says what a round waits for


class LedgerExchange:
    """One process's end of the exchange. It delivers the shards `writes` and applies `reader.applies`.

    Only the manifest settles a round, never the result of a PUT: one that reported an error may have landed.
    What it asks of the store goes through `patience`: a fault of the store is waited out here, in place, and
    does not end the worker.
    """

    def __init__(
        self,
        ledger: Ledger,
        control: ControlGroup,
        writes: Collection[int],
        reader: ShardReader,
        closer: Closer | None,
        incarnation: str,
        log: Callable[[str], None],
        patience: Patience | None = None,
    ) -> None:
        self.patience = patience or Patience(log)
        self.ledger, self.control, self.incarnation, self.log = ledger, control, incarnation, log
        self.writes, self.reader, self.closer = tuple(writes), reader, closer
        self.replica = ledger.signer.replica
        self.anchor = ""  # digest of the anchor that all hold now
        self.from_bucket = False  # until we train ourselves, it is what the bucket gives: others are wrong
        self.awaiting = ""  # what this process waits for, as the heartbeat says
        self.unsettled: tuple[int, Future[Mapping[int, str]]] | None = None  # an anchor not yet agreed on
        self.sent_bytes, self.up_seconds = 0, 0.0  # of payloads
        self.wait_seconds = 0.0  # for manifests
        self.next_note = FIRST_NOTE_SECONDS
        self.tells_anchors = True  # a log keeps what replicas are compared by; a terminal has better to show
        self.told: Facts | None = None  # what the last commit reported, of all processes of the replica
        self.moved_bytes = 0  # what the store had moved at the last `pop_facts`
        self.rounds = RoundClock()
        self.next_look = self.next_attempt = 0.0  # at the manifest; at closing it
        self.seen_open = False  # the round that is waited for
        tell = partial(setattr, self, "awaiting")
        self.rescue = Rescue(ledger, reader, control, log, self.patience, tell)

    def hold_anchor(self, round_number: int, digests: Mapping[int, str]) -> str:
        """Say which anchor this replica holds after `round_number`; its processes must hold the same."""
        parts: dict[int, str] = {}
        total = len(self.ledger.shards)
        for texts in share_json(self.control, dict(digests), shard_texts(total)):
            for index, digest in texts.items():
                if parts.setdefault(index, digest) != digest:
                    raise Diverged(
                        f"replica {self.replica}: its stages hold different copies of shard {index} "
                        f"after round {round_number}"
                    )
        if len(parts) < total:
            raise RunError(f"replica {self.replica}: no stage holds some shards after round {round_number}")
        self.anchor = anchor_digest([parts[i] for i in range(total)])
        self.patience(partial(self.ledger.repairs.check, round_number, self.anchor))
        return self.anchor

    def hold_later(self, round_number: int, digests: "Future[Mapping[int, str]]") -> None:
        """The same while the digests are still computed: the next round trains meanwhile."""
        self.unsettled = round_number, digests

    def settle_anchor(self) -> str:
        """The digest of the anchor that all hold now. All processes call this at the same points."""
        if self.unsettled:
            (round_number, digests), self.unsettled = self.unsettled, None
            self.hold_anchor(round_number, digests.result())
            if self.tells_anchors:
                self.log(f"round {round_number}: anchor {self.anchor[:16]}")
        return self.anchor

    def closed(self, round_number: int) -> Sequence[Contribution] | None:
        """All processes take the leader's answer, so that none trains a round the others skip."""
        self.reader.forget()
        look = partial(self.ledger.manifest, round_number)
        there = self.control.rank == 0 and not self.rounds.is_young(round_number)
        there = there and self.patience(look) is not None
        return self._counted(self._await(round_number, there=True)) if agree(self.control, there) else None

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        for mine in own:  # empty when this replica has no update this time
            self.deliver(round_number, mine)
        return self._counted(self._await(round_number))

    def deliver(self, round_number: int, mine: Contribution) -> None:
        """Shards first, the commit last; doing it again after a crash changes nothing.

        A replica that has lost its private state cannot do it again: its first update to a round stands, and
        what it makes afterwards goes out with the next.
        """
        self.from_bucket = False
        self.settle_anchor()
        self.rescue.help()
        self.reader.forget()
        rows: dict[int, str] = {}
        for index in self.writes:
            data = mine.shards[index]
            started = time.monotonic()
            shard = self.patience(partial(self.ledger.put_shard, round_number, index, data))
            self.up_seconds += time.monotonic() - started
            self.sent_bytes += shard.size
            self.reader.keep(self.replica, shard, data)
            rows[index] = json.dumps([shard.digest, shard.size])
        listed = collect(self.control, rows, len(self.ledger.shards))
        facts = self.told = self.gather_facts(mine.facts)
        if self.control.rank == 0:
            shards = tuple(self._shard(i, row) for i, row in enumerate(listed))
            entry = Entry(self.replica, shards, facts=facts)
            commit = partial(self.ledger.commit, round_number, self.incarnation, self.anchor, entry)
            if not self.patience(commit):
                self.log(
                    f"round {round_number}: an earlier start of this replica has committed another update, "
                    "and that one stands; this one returns to the error feedback"
                )

    def _shard(self, index: int, row: str) -> Shard:
        """What another process of this replica says that it has put."""
        try:
            digest, size = json.loads(row)
            return Shard(index, str(digest), whole_number(size))
        except (ValueError, TypeError, RecursionError):
            raise RunError(f"replica {self.replica}: shard {index} was put as {row[:80]!r}") from None

    def gather_facts(self, own: Facts) -> Facts:
        """The replica's facts: those of all its processes, each with what its exchange has counted."""
        return Facts.gather(share_json(self.control, own.plus(self.pop_facts()).to_dict(), Facts.from_dict))

    def pop_facts(self) -> Facts:
        """Bytes, and the seconds in which payloads went up, came down, and were waited for, since the last
        call.

        `control` is all else that the store moved: documents, heartbeats, anchors, and shards that a closer
        reads only to check them.
        """
        total = self.ledger.store.bytes_sent + self.ledger.store.bytes_received
        moved, self.moved_bytes = total - self.moved_bytes, total
        up, up_seconds, self.sent_bytes, self.up_seconds = self.sent_bytes, self.up_seconds, 0, 0.0
        down, down_seconds = self.reader.pop_counts()
        waited, self.wait_seconds = self.wait_seconds, 0.0
        seconds = {"up_seconds": up_seconds, "down_seconds": down_seconds, "wait_seconds": waited}
        return Facts(
            bytes={"payload_up": up, "payload_down": down, "control": moved - up - down},
            measured={name: [round(value, 4)] for name, value in seconds.items()},
        )

    def _await(self, round_number: int, there: bool = False) -> Manifest:
        """Wait for the manifest; a closer tries to make it meanwhile.

        There is no limit: a round may wait for a quorum as long as it takes. The log says so, and why.
        """
        self.settle_anchor()
        self.awaiting = f"the manifest of round {round_number}"
        began, self.next_note, self.seen_open = time.monotonic(), FIRST_NOTE_SECONDS, False
        early = not there and self.rounds.to_due(round_number) > SHORTEST_SECONDS
        self.next_look = began + self.rounds.pause(round_number) if early else began
        self.next_attempt = began
        # The others wait for the leader: it alone asks the store, and it answers in time for their time-out.
        while not agree(self.control, self.control.rank == 0 and self._look(round_number, began)):
            pass
        self.rounds.ended(round_number, self.seen_open)
        manifest = self._manifest(round_number)
        self.awaiting = ""
        self.wait_seconds += time.monotonic() - began
        if self.anchor not in ("", manifest.anchor) and not self.ledger.repairs.is_void(round_number):
            if self.from_bucket and not self.ledger.repairs.is_void(round_number - 1):
                raise other_start(manifest, self.anchor)
            raise Diverged(
                f"replica {self.replica} holds another anchor than round {round_number} started from; it "
                "must join anew from the bucket"
            )
        return manifest

    def _look(self, round_number: int, began: float) -> bool:
        """Is the round settled? The leader looks for a while, and tries to settle it if it may close."""
        until, closer = time.monotonic() + LOOK_SECONDS, None
        while (now := time.monotonic()) < until:
            try:
                if now >= self.next_look:
                    if self.ledger.manifest(round_number) is not None:
                        return True
                    self.seen_open = True
                    self.next_look = time.monotonic() + self.rounds.pause(round_number)
                closer = self.closer if self.closer and self.closer.may_close(round_number) else None
                if closer and now >= self.next_attempt:
                    if closer.attempt(round_number, self.anchor) or closer.beaten:
                        self.next_look = now
                        continue
                    self.next_attempt = time.monotonic() + closer.pause(self.rounds.pause(round_number))
                if (waited := time.monotonic() - began) > self.next_note:
                    self.log(f"round {round_number}: {self._missing(round_number)} ({waited:.0f} s so far)")
                    self.next_note = 2 * waited
                self.patience.passed()
            except StoreError as error:  # a bucket that is away comes back, and waiting is all we do here
                self.patience.hold(error)
            following = min(self.next_look, until, *[self.next_attempt] * bool(closer))
            self.patience.rest(following - time.monotonic())
        return False

    def _manifest(self, round_number: int) -> Manifest:
        """A manifest that the leader has read: the store may answer another process a little later."""
        look = partial(self.ledger.manifest, round_number)
        while (manifest := self.patience(look)) is None:
            time.sleep(SHORTEST_SECONDS)
        return manifest

    def _missing(self, round_number: int) -> str:
        """What an open round waits for."""
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = previous.members if previous else tuple(self.ledger.at(round_number).keys)
        there = self.ledger.committed(round_number)
        missing = [name for name in members if name not in there]
        if not missing:
            return "every update is there; waiting for a closer to settle the round"
        return f"waiting for the update{'s' * (len(missing) > 1)} of {', '.join(missing)}"

    def _counted(self, manifest: Manifest) -> list[Contribution]:
        """What counts in the round, as far as this process needs it; nothing of a round that is void.

        A listed shard that is not there stops us: readers never skip a payload on their own.
        """
        counted = self.rescue.read(manifest, partial(self._read, manifest))
        if counted is None:
            return []
        if self.closer and self.closer.may_close(manifest.round):
            self.reader.copy_behind(manifest)
        reason = dict(manifest.refused).get(self.replica, "")
        if reason and not is_spent(reason):  # of one that is, whoever keeps the error feedback says more
            self.log(f"round {manifest.round}: our update was refused: {reason}")
        return counted

    def _read(self, manifest: Manifest) -> list[Contribution]:
        """Several shards at a time; Refused where one is not to be had."""
        entries, applies = manifest.entries, self.reader.applies
        wanted = [(entry.replica, entry.shards[index]) for entry in entries for index in applies]
        calls = [partial(self.reader.read, replica, manifest, shard) for replica, shard in wanted]
        data = iter(self.patience(partial(together, calls)))
        shards = [{index: next(data) for index in applies} for _ in entries]
        return [Contribution(e.replica, parts, e.facts) for e, parts in zip(entries, shards, strict=True)]

    def counts_in(self, manifest: Manifest, mine: Contribution) -> bool:
        """Does the manifest count exactly these shards of ours?"""
        entry = None if self.ledger.repairs.is_void(manifest.round) else manifest.entry(self.replica)
        return entry is not None and all(
            entry.shards[index].digest == sha256(data) for index, data in mine.shards.items()
        )
