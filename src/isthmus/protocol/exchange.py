"""Exchange through an object store: deliver shards and a commit, wait for the manifest, read what counts."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any

from isthmus.errors import Diverged, RunError
from isthmus.layout.requests import SHORTEST_SECONDS
from isthmus.model.digest import anchor_digest
from isthmus.outer.exchange import Contribution
from isthmus.protocol.closer import Closer
from isthmus.protocol.documents import Commit, Entry, Manifest, Shard
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.looks import RoundClock
from isthmus.protocol.manifests import other_start
from isthmus.protocol.missing import MissingPayload
from isthmus.protocol.patience import Patience
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.trust import Refused, sha256
from isthmus.replica.control_group import (
    ControlGroup,
    all_true,
    collect,
    shard_texts,
    share_json,
    whole_number,
)
from isthmus.runlog.facts import Facts
from isthmus.store import StoreError, StoreRefused
from isthmus.store.together import together

LOOK_SECONDS = 30.0  # after which the leader tells its replica's processes that it still waits
FIRST_NOTE_SECONDS = 30.0  # until the log names what a round waits for


class Standing(IntEnum):
    """The state of a round as a process finds it."""

    OPEN = 0
    COMMITTED = 1  # open, and an earlier start of ours has delivered
    SKIPPED = 2  # open, and an earlier start of ours has skipped
    SETTLED = 3  # apply it without training
    AGAIN = 4  # settled, and an earlier start delivered: train again for feedback and moments


class LedgerExchange:
    """One process's end of the exchange. It delivers the shards `writes` and applies `reader.applies`.

    Only the manifest settles a round, never the result of a PUT: one that reported an error may have
    succeeded. Requests to the store go through `patience`, which waits out a fault of the store and does not
    end the worker.
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
        self.anchor = ""  # digest of the anchor that all processes hold now
        self.from_bucket = False  # our anchor is the bucket's until we train, so any other is wrong
        self.awaiting = ""  # what the heartbeat says this process waits for
        self.unsettled: tuple[int, Future[Mapping[int, str]]] | None = None  # not agreed on yet
        self.sent_bytes, self.up_seconds = 0, 0.0  # of payloads
        self.wait_seconds = 0.0  # for manifests
        self.next_note = FIRST_NOTE_SECONDS
        self.tells_anchors = True  # log anchor digests, by which replicas are compared; off on a terminal
        self.told: Facts | None = None  # the last commit's facts, of all processes of the replica
        self.moved_bytes = 0  # what the store had moved at the last `pop_facts`
        self.clock = self.patience.clock
        self.rounds = RoundClock(self.clock)
        self.next_look = self.next_attempt = 0.0  # at the manifest; next attempt to close it
        self.seen_open = False  # whether the awaited round was seen open
        self.missing = MissingPayload(ledger, control, log, self.patience)
        self.held = 0  # the round of this process's anchor, as the heartbeat says
        self.starts: set[str] = set()  # this replica's starts, as its private state lists them
        self.catching_up = True  # until this start has come to an open round
        self.standing = Standing.OPEN
        self.committed = False  # whether a commit of ours exists in the open round

    def hold_anchor(self, round_number: int, digests: Mapping[int, str]) -> str:
        """Record this replica's anchor after `round_number`; all its processes must hold the same."""
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
        self.held = round_number
        return self.anchor

    def hold_later(self, round_number: int, digests: "Future[Mapping[int, str]]") -> None:
        """Like `hold_anchor`, while the digests are still being computed; the next round trains meanwhile."""
        self.held, self.unsettled = round_number, (round_number, digests)

    def settle_anchor(self) -> str:
        """The digest of the anchor that all processes hold now. All of them call this at the same points."""
        if self.unsettled:
            (round_number, digests), self.unsettled = self.unsettled, None
            self.hold_anchor(round_number, digests.result())
            if self.tells_anchors:
                self.log(f"round {round_number}: anchor {self.anchor[:16]}")
        return self.anchor

    def closed(self, round_number: int) -> Sequence[Contribution] | None:
        """What counts in a settled round; None if it is open, or if we must train it again.

        All processes take the leader's answer, so that none trains a round the others skip.
        """
        self.reader.forget()
        if self.catching_up:
            self.settle_anchor()  # `_commit_of_ours` checks a commit against it
        word = self.control.share(bytes([self._standing(round_number) if self.control.rank == 0 else 0]))[0]
        self.standing = Standing(word[0])
        self.catching_up = self.catching_up and self.standing in (Standing.SETTLED, Standing.AGAIN)
        self.committed = self.standing in (Standing.COMMITTED, Standing.AGAIN)
        if self.standing is not Standing.SETTLED:
            return None
        return self._counted(self._await(round_number, there=True))

    def _standing(self, round_number: int) -> "Standing":
        """The state of a round. A commit by an earlier start is possible only until this start has reached an
        open round."""
        if not self.catching_up and self.rounds.is_young(round_number):
            return Standing.OPEN
        manifest, own = self.patience(partial(self.ledger.manifest, round_number)), None
        if self.catching_up:
            own = self.patience(partial(self._commit_of_ours, round_number, manifest))
        if manifest is not None:
            return Standing.AGAIN if own and own.shards else Standing.SETTLED
        return Standing.OPEN if own is None else Standing.COMMITTED if own.shards else Standing.SKIPPED

    def _commit_of_ours(self, round_number: int, manifest: Manifest | None) -> Entry | Commit | None:
        """What a start of this replica has committed, counted or not. A start that `starts` does not list is
        not ours: an older copy of the private state was restored, or another process has our key."""
        found: Entry | Commit | None = manifest.entry(self.replica) if manifest else None
        if found is None and self.starts:
            with suppress(Refused, StoreRefused):
                data, anchor = self.ledger.get_commit(self.replica, round_number), self.anchor
                found = self.ledger.check_commit(data, self.replica, round_number, anchor) if data else None
        return found if found and found.incarnation in self.starts else None

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        for mine in own:  # empty if this replica has no update this time
            self.deliver(round_number, mine)
        return self._counted(self._await(round_number))

    def deliver(self, round_number: int, mine: Contribution) -> None:
        """Upload the shards first, the commit last. The first commit to a round stands: if an earlier start
        of ours made it, send nothing, since a GPU may have made other shards this time."""
        if self.from_bucket and self.closer:
            self.closer.rebuilt = round_number
        self.from_bucket = False
        self.settle_anchor()
        self.reader.forget()
        if self.standing is not Standing.OPEN:
            for index in self.writes:  # a CPU makes the same shards, so they need not be read
                data = mine.shards[index]
                self.reader.keep(self.replica, Shard(index, sha256(data), len(data)), data)
            return
        rows: dict[int, str] = {}
        for index in self.writes:
            data = mine.shards[index]
            started = self.clock()
            shard = self.patience(partial(self.ledger.put_shard, round_number, index, data))
            self.up_seconds += self.clock() - started
            self.sent_bytes += shard.size
            self.reader.keep(self.replica, shard, data)
            rows[index] = json.dumps([shard.digest, shard.size])
        listed = collect(self.control, rows, len(self.ledger.shards))
        facts = self.told = self.gather_facts(mine.facts)
        if self.control.rank == 0:
            shards = tuple(self._shard(i, row) for i, row in enumerate(listed))
            commit = self._commit(round_number, shards=shards, facts=facts)
            self.committed = self.patience(partial(self.ledger.commit, commit))
            if not self.committed:
                self.log(
                    f"round {round_number}: another start of this replica has committed another update, "
                    "and that one stands"
                )

    def skip(self, round_number: int, code: str) -> bool:
        """State that this replica gives nothing to a round, so that no replica waits for it. False if an
        earlier start has committed an update: that update stands, and may count.

        All processes of the replica call this, then `close` without an update. `code` is the reason in the
        manifest: a word of small letters and underscores.
        """
        if self.from_bucket and self.closer:
            self.closer.rebuilt = round_number
        self.from_bucket = False
        self.settle_anchor()
        stands = True
        if self.control.rank == 0:
            commit = self._commit(round_number, skip=code)
            stands = self.patience(partial(self.ledger.commit, commit))
        return all_true(self.control, stands)

    def _commit(self, round_number: int, **given: Any) -> Commit:
        return Commit(round=round_number, anchor=self.anchor, incarnation=self.incarnation, **given)

    def _shard(self, index: int, row: str) -> Shard:
        """A shard that another process of this replica reports as uploaded."""
        try:
            digest, size = json.loads(row)
            return Shard(index, str(digest), whole_number(size))
        except (ValueError, TypeError, RecursionError):
            raise RunError(f"replica {self.replica}: shard {index} was put as {row[:80]!r}") from None

    def gather_facts(self, own: Facts) -> Facts:
        """The replica's facts: those of all its processes, each with the counts of its exchange."""
        return Facts.gather(share_json(self.control, own.plus(self.pop_facts()).to_dict(), Facts.from_dict))

    def pop_facts(self) -> Facts:
        """Bytes since the last call, and the seconds spent on uploads, downloads and waiting.

        `control` is everything else that the store moved: documents, heartbeats, anchors, and shards that a
        closer reads only to check them.
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
        """Wait for the manifest; a closer tries to create it meanwhile.

        There is no limit: a round may wait for a quorum as long as necessary. The log says so, and why.
        """
        self.settle_anchor()
        self.awaiting = f"the manifest of round {round_number}"
        began, self.next_note, self.seen_open = self.clock(), FIRST_NOTE_SECONDS, False
        early = not there and self.rounds.to_due(round_number) > SHORTEST_SECONDS
        self.next_look = began + self.rounds.pause(round_number) if early else began
        self.next_attempt = began
        # Only the leader asks the store; it answers the other processes before they time out.
        settled = committed = False
        while not settled:
            settled = self.control.rank == 0 and self._look(round_number, began)
            settled, committed = self.control.share(bytes([settled, self.committed]))[0]
        self.committed, self.standing = bool(committed), Standing.OPEN
        self.rounds.ended(round_number, self.seen_open)
        manifest = self._manifest(round_number)
        self.awaiting = ""
        self.wait_seconds += self.clock() - began
        if self.anchor not in ("", manifest.anchor):
            if self.from_bucket:
                raise other_start(manifest, self.anchor)
            raise Diverged(
                f"replica {self.replica} holds another anchor than round {round_number} started from; it "
                "must join anew from the bucket"
            )
        return manifest

    def _look(self, round_number: int, began: float) -> bool:
        """Whether the round is settled. The leader looks for a while, and closes the round if it may."""
        until, closer = self.clock() + LOOK_SECONDS, None
        while (now := self.clock()) < until:
            try:
                if now >= self.next_look:
                    if self.ledger.manifest(round_number) is not None:
                        return True
                    self.seen_open = True
                    self.next_look = self.clock() + self.rounds.pause(round_number)
                closer = self.closer if self.closer and self.closer.may_close(round_number) else None
                if closer and now >= self.next_attempt:
                    if closer.attempt(round_number, self.anchor) or closer.beaten:
                        self.next_look = now
                        continue
                    self.next_attempt = self.clock() + closer.pause(self.rounds.pause(round_number))
                if (waited := self.clock() - began) > self.next_note:
                    self.log(f"round {round_number}: {self._missing(round_number)} ({waited:.0f} s so far)")
                    self.next_note = 2 * waited
                self.patience.passed()
            except StoreError as error:  # the bucket will come back, and all we do here is wait
                self.patience.hold(error)
            following = min(self.next_look, until, *[self.next_attempt] * bool(closer))
            self.patience.rest(following - self.clock())
        return False

    def _manifest(self, round_number: int) -> Manifest:
        """A manifest that the leader has read. The store may show it to another process a little later."""
        look = partial(self.ledger.manifest, round_number)
        while (manifest := self.patience(look)) is None:
            self.patience.sleep(SHORTEST_SECONDS)
        return manifest

    def _missing(self, round_number: int) -> str:
        """What an open round waits for."""
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = previous.members if previous else tuple(self.ledger.at(round_number).keys)
        there = self.ledger.committed(round_number)
        missing = [name for name in members if name not in there]
        if not missing:
            return "every update is there; waiting for a closer to settle the round"
        words = f"waiting for the update{'s' * (len(missing) > 1)} of {', '.join(missing)}"
        seconds = self.ledger.run.recipe.bucket.start_seconds
        if round_number == 1 and seconds:
            words += f", {seconds:g} s at most; `isthmus revoke` begins without a replica that will not come"
        return words

    def _counted(self, manifest: Manifest) -> list[Contribution]:
        """What counts in the round, as far as this process needs it. A reader never skips a payload."""
        counted = self.missing.read(manifest, partial(self._read, manifest))
        if refusal := manifest.refusal(self.replica):
            self.log(f"round {manifest.round}: our update was refused: {refusal.words}")
        return counted

    def _read(self, manifest: Manifest) -> list[Contribution]:
        """Read several shards at a time; Refused if one is unavailable."""
        entries, applies = manifest.entries, self.reader.applies
        wanted = [(entry.replica, entry.shards[index]) for entry in entries for index in applies]
        calls = [partial(self.reader.read, replica, manifest.round, shard) for replica, shard in wanted]
        data = iter(self.patience(partial(together, calls)))
        shards = [{index: next(data) for index in applies} for _ in entries]
        return [Contribution(e.replica, parts, e.facts) for e, parts in zip(entries, shards, strict=True)]
