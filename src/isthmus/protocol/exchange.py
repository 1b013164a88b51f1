"""Exchange through an object store: deliver shards and a commit, wait for the manifest, read what counts."""

from collections.abc import Callable, Collection
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any

from isthmus.errors import Diverged
from isthmus.layout.requests import SHORTEST_SECONDS
from isthmus.outer.exchange import Contribution
from isthmus.protocol.closer import Closer
from isthmus.protocol.documents import Commit, Entry, Manifest, Shard
from isthmus.protocol.edge import UNKNOWN, Edge
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.looks import RoundClock
from isthmus.protocol.manifests import other_start
from isthmus.protocol.missing import MissingPayload, tried
from isthmus.protocol.patience import Patience
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.trust import Refused, sha256
from isthmus.replica.control_group import ControlGroup
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
        self.ledger, self.incarnation, self.log = ledger, incarnation, log
        self.writes, self.reader, self.closer = tuple(writes), reader, closer
        self.replica, self.leads = ledger.signer.replica, control.rank == 0
        self.edge = Edge(ledger, control, log)
        self.from_bucket = False  # our anchor is the bucket's until we train, so any other is wrong
        self.awaiting = ""  # what the heartbeat says this process waits for
        self.sent_bytes, self.up_seconds = 0, 0.0  # of payloads
        self.wait_seconds = 0.0  # for manifests
        self.next_note = FIRST_NOTE_SECONDS
        self.told: Facts | None = None  # the last commit's facts, of all processes of the replica
        self.moved_bytes = 0  # what the store had moved at the last `pop_facts`
        self.clock = self.patience.clock
        self.rounds = RoundClock(self.clock)
        self.next_look = self.next_attempt = 0.0  # at the manifest; next attempt to close it
        self.seen_open = False  # whether the awaited round was seen open
        self.missing = MissingPayload(ledger, control, log, self.patience)
        self.starts: set[str] = set()  # this replica's starts, as its private state lists them
        self.catching_up = True  # until this start has come to an open round
        self.standing = Standing.OPEN
        self.following: Standing | None = None  # the next round's, if the last frame named it
        self.committed = False  # whether a commit of ours exists in the open round
        self.wish = 0  # whether a process of this replica was asked to leave; see `Leave.asked`

    @property
    def anchor(self) -> str:
        """The digest of the anchor that all processes of the replica hold."""
        return self.edge.anchor

    def enter(self, round_number: int) -> Standing:
        """How a round stands. All processes take the leader's answer, so that none trains a round the others
        skip."""
        self.reader.forget()
        if self.following is None:
            if self.catching_up:
                self.edge.settle()  # `_commit_of_ours` checks a commit against it
            self._share(True, standing=self._standing(round_number) if self.leads else UNKNOWN)
            assert self.following is not None, "the leader names it"
        self.standing, self.following = self.following, None
        self.catching_up = self.catching_up and self.standing in (Standing.SETTLED, Standing.AGAIN)
        self.committed = self.standing in (Standing.COMMITTED, Standing.AGAIN)
        return self.standing

    def _share(self, ask: bool, **mine: Any) -> bool:
        """A frame with the leader's word on the next round, and with wishes if we `ask` for them. Whether all
        could read this round."""
        leave = self.patience.leave if ask else None
        frames = self.edge.share(wish=leave.asked() if leave else 0, **mine)
        if ask:
            self.wish = min((frame.wish for frame in frames if frame.wish), default=0)
        standing = frames[0].standing
        self.following = Standing(standing) if standing in tuple(Standing) else None
        return all(frame.read for frame in frames)

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

    def deliver(self, round_number: int, mine: Contribution) -> None:
        """Upload the shards first, the commit last. The first commit to a round stands: if an earlier start
        of ours made it, send nothing, since a GPU may have made other shards this time."""
        self._begin_to_give(round_number)
        rows: dict[int, tuple[str, int]] = {}
        for index in self.writes:
            data = mine.shards[index]
            if self.standing is not Standing.OPEN:  # a CPU makes the same shards, so they need not be read
                self.reader.keep(self.replica, Shard(index, sha256(data), len(data)), data)
                continue
            started = self.clock()
            shard = self.patience(partial(self.ledger.put_shard, round_number, index, data))
            self.up_seconds += self.clock() - started
            self.sent_bytes += shard.size
            self.reader.keep(self.replica, shard, data)
            rows[index] = shard.digest, shard.size
        if self.standing is not Standing.OPEN:
            return
        frames = self.edge.share(rows=rows, facts=mine.facts.plus(self.pop_facts()))
        listed = self.edge.collect([frame.rows for frame in frames])
        self.told = Facts.gather([frame.facts or Facts() for frame in frames])
        if self.leads:
            shards = tuple(Shard(i, *row) for i, row in enumerate(listed))
            self.committed = self._commit(round_number, shards=shards, facts=self.told)
            if not self.committed:
                self.log(
                    f"round {round_number}: another start of this replica has committed another update, "
                    "and that one stands"
                )

    def skip(self, round_number: int, code: str) -> bool:
        """State that this replica gives nothing to a round, so that no replica waits for it. False if an
        earlier start has committed an update: that update stands, and may count. Only the leader learns that.

        All processes of the replica call this. `code` is the reason in the manifest: a word of small letters
        and underscores.
        """
        self._begin_to_give(round_number)
        self.edge.settle()
        return not self.leads or self._commit(round_number, skip=code)

    def _begin_to_give(self, round_number: int) -> None:
        if self.from_bucket and self.closer:
            self.closer.rebuilt = round_number
        self.from_bucket = False

    def _commit(self, round_number: int, **given: Any) -> bool:
        """Whether our commit stands."""
        start = self.incarnation
        commit = Commit(round=round_number, anchor=self.anchor, incarnation=start, **given)
        return self.patience(partial(self.ledger.commit, commit))

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

    # The end of a round

    def counted(self, round_number: int) -> tuple[Manifest, list[Contribution]]:
        """Wait until a round is settled; its manifest, and what counts as far as this process needs it. A
        reader never skips a payload."""
        manifest = self._await(round_number)
        found, why = tried(read := partial(self._read, manifest))
        following = UNKNOWN
        if self.leads and not self.catching_up and round_number < self.ledger.run.recipe.outer.rounds:
            following = self._standing(round_number + 1)
        if not self._share(not self.catching_up, read=found is not None, standing=following) or found is None:
            self.following, found = None, self.missing.wait(manifest, read, why)
        if refusal := manifest.refusal(self.replica):
            self.log(f"round {round_number}: our update was refused: {refusal.words}")
        return manifest, found

    def _await(self, round_number: int) -> Manifest:
        """Wait for the manifest; a closer tries to create it meanwhile.

        There is no limit: a round may wait for a quorum as long as necessary. The log says so, and why.
        """
        anchor, there = self.edge.settle(), self.standing is Standing.SETTLED
        self.awaiting = f"the manifest of round {round_number}"
        began, self.next_note, self.seen_open = self.clock(), FIRST_NOTE_SECONDS, False
        early = not there and self.rounds.to_due(round_number) > SHORTEST_SECONDS
        self.next_look = began + self.rounds.pause(round_number) if early else began
        self.next_attempt = began
        # Only the leader asks the store; it answers the other processes before they time out.
        settled = there
        while not settled:
            settled = self.leads and self._look(round_number, began)
            word = self.edge.share(settled=settled, committed=self.committed)[0]
            settled, self.committed = word.settled, word.committed
        self.standing = Standing.OPEN
        self.rounds.ended(round_number, self.seen_open)
        # The store may show it to another process a little later.
        while (manifest := self.patience(partial(self.ledger.manifest, round_number))) is None:
            self.patience.sleep(SHORTEST_SECONDS)
        self.awaiting = ""
        self.wait_seconds += self.clock() - began
        if anchor not in ("", manifest.anchor):
            if self.from_bucket:
                raise other_start(manifest, anchor)
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

    def close_overdue(self) -> None:
        """Close the open round while the caller is away, in a long evaluation for example, once it has lasted
        twice as long as usual. The leader's thread calls this, while no other call of ours runs."""
        t, usual = self.edge.held + 1, self.rounds.seconds
        closer = self.closer if self.edge.control.size == 1 else None  # several agree on digests at the edge
        if closer and usual and self.clock() > self.rounds.ended_at + 2 * usual and closer.may_close(t):
            anchor = self.edge.settle()
            if self.ledger.settled_at(t) is None:
                closer.attempt(t, anchor)

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

    def _read(self, manifest: Manifest) -> list[Contribution]:
        """Read several shards at a time; Refused if one is unavailable."""
        entries, applies = manifest.entries, self.reader.applies
        wanted = [(entry.replica, entry.shards[index]) for entry in entries for index in applies]
        calls = [partial(self.reader.read, replica, manifest.round, shard) for replica, shard in wanted]
        data = iter(self.patience(partial(together, calls)))
        shards = [{index: next(data) for index in applies} for _ in entries]
        return [Contribution(e.replica, parts, e.facts) for e, parts in zip(entries, shards, strict=True)]
