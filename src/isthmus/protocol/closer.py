"""Closing a round: verify every commit, decide when to stop waiting, create the manifest."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from isthmus.config import Recipe
from isthmus.errors import Diverged, RunStopped
from isthmus.layout.traffic import inner_step_bytes
from isthmus.protocol.heartbeat import silent_after
from isthmus.protocol.judge import judge
from isthmus.protocol.ledger import Entry, Ledger, Manifest
from isthmus.protocol.norms import compare_norms
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.trust import OtherAnchor, Refused, sha256

FIRST_DEADLINE_SECONDS = 600.0  # of round 1: nobody knows yet how long a round takes
STARTING_SECONDS = 60.0  # in round 1, a replica without a heartbeat may still be starting for so long
STEP_IN_SECONDS = 3.0  # the next closer in line waits this much longer
CLOCK_ERROR_SECONDS = 2.0  # the store's clock is right to about a second
PAUSE_SECONDS = 2.0  # without an answer from the store: it may have been away, for the others too
BACK_OFF_SECONDS = 6.0  # the longest that a client waits before it tries the store again, and a little


def opening_seconds(recipe: Recipe) -> float:
    """How much longer a round gets, at most, when boundaries open and whole streams cross the links.

    For links as the recipe states them, if compute hides none of it.
    """
    last, most = recipe.in_round(recipe.outer.rounds), 0.0
    for usual, opened in zip(recipe.fleet(), last.fleet(), strict=True):
        if links := usual.config.stages - 1:
            sent = [inner_step_bytes(recipe, member)["activations"] for member in (usual, opened)]
            # A step's bytes over one link, one way, and two micro-batches a link to fill and drain.
            more = (sent[1] - sent[0]) / links * (1 + 2 * links / recipe.inner.micro_batches)
            most = max(most, recipe.outer.inner_steps * more * 8 / (usual.config.link.mbps * 1e6))
    return most


class Closer:
    """One replica's judgement of a round. Every closer may judge; put-if-absent lets one manifest win."""

    def __init__(
        self,
        ledger: Ledger,
        reader: ShardReader,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger, self.reader, self.log, self.clock = ledger, reader, log, clock
        self.recipe = ledger.run.recipe
        self.own = ledger.signer.replica
        self.names = [member.name for member in self.recipe.fleet()]
        self.round = 0
        self.closable_since: float | None = None
        self.away = 0.0  # seconds of the open round that its deadline does not count
        self.verdicts: dict[
            tuple[str, str], Entry | Refused
        ] = {}  # by name and the commit's hash: judged once
        self.answers: dict[str, tuple[float, bool]] = {}  # replica -> (when we looked, was it alive)
        self.silences: dict[str, tuple[float | None, float]] = {}  # replica -> (its last beat, since when)
        self.answered, self.forgive_until = self.clock(), 0.0
        self.note = ""  # what the last judgement says of those who differ and were not refused

    def attempt(self, round_number: int, anchor: str) -> bool:
        """Close the round if it can be closed now; True when our manifest is the one."""
        if round_number != self.round:
            self.away = 0.0 if self.round else self._absence(round_number)
            self.round, self.closable_since = round_number, None
            self.verdicts.clear()
            self.answers.clear()
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = [m for m in (previous.members if previous else self.names) if m in self.ledger.run.keys]
        self._store_answered()
        commits, oversized = self._commits(round_number)
        now = self._store_answered()
        turn = self._turn(round_number)
        if turn == 0:  # the first in line reads updates while it waits for the rest
            self.judge(commits, round_number, anchor, previous)
        if not self._may_close(members, commits, oversized, previous):
            self.closable_since = None
            return False
        self.closable_since = now if self.closable_since is None else self.closable_since
        if now < self.closable_since + STEP_IN_SECONDS * turn:
            return False
        accepted, refused = self.judge(commits, round_number, anchor, previous)
        refused |= oversized
        if not self._may_close(members, accepted, refused, previous):
            return False
        seconds = self._store_now() - self._opened(round_number)
        following = self._next_members(accepted)
        left_behind = any(m in following and m not in accepted and m not in refused for m in members)
        manifest = Manifest(
            round=round_number,
            anchor=anchor,
            entries=tuple(accepted[name] for name in self.names if name in accepted),
            refused=tuple((name, refused[name]) for name in self.names if name in refused),
            members=following,
            deadline_seconds=self._deadline(round_number, None if left_behind else seconds),
            seconds=round(seconds, 3),
        )
        won = self.ledger.create_manifest(manifest)
        if won:
            for name, reason in refused.items():
                self.log(f"round {round_number}: refused {name}: {reason}")
            if self.note:
                self.log(f"round {round_number}: {self.note}")
        return won

    def _commits(self, round_number: int) -> tuple[dict[str, bytes], dict[str, str]]:
        """The commits that are there, and why some objects in their place are too large to be one."""
        commits, oversized = {}, {}
        for name in self.names:
            try:
                data = self.ledger.get_commit(name, round_number)
            except ValueError as error:
                oversized[name] = f"the commit: {error}"
                continue
            if data is not None:
                commits[name] = data
        return commits, oversized

    def judge(
        self, commits: Mapping[str, bytes], round_number: int, anchor: str, previous: Manifest | None
    ) -> tuple[dict[str, Entry], dict[str, str]]:
        """(accepted, refused with the reason) of all the commits that are there."""
        accepted: dict[str, Entry] = {}
        refused: dict[str, str] = {}
        others = 0
        for name, data in commits.items():
            # By name too: another's commit under one's own name is not that other's verdict.
            key = name, sha256(data)
            if key not in self.verdicts:
                self.verdicts[key] = self._verdict(data, name, round_number, anchor)
            verdict = self.verdicts[key]
            if isinstance(verdict, Entry):
                accepted[name] = verdict
            else:
                refused[name] = "".join(c if c.isprintable() else "?" for c in str(verdict)[:300])
                others += isinstance(verdict, OtherAnchor)
        if others > len(accepted):
            raise Diverged(
                f"replica {self.own} holds another anchor than {others} of those who gave to round "
                f"{round_number}, and does not close it; it must join anew from the bucket"
            )
        before = {entry.replica: entry.norm for entry in previous.entries} if previous else {}
        norms = {name: entry.norm for name, entry in accepted.items()}
        compared = compare_norms(norms, before, self.recipe.bucket.norm_limit)
        self.note = compared.note
        accepted = {name: entry for name, entry in accepted.items() if name not in compared.refused}
        return accepted, refused | compared.refused

    def _verdict(self, data: bytes, name: str, round_number: int, anchor: str) -> Entry | Refused:
        try:
            return judge(self.ledger, data, name, round_number, anchor, self.reader.read)
        except Refused as reason:
            return type(reason)(str(reason))  # without its traceback, which keeps the payloads alive

    def _may_close(
        self,
        members: Sequence[str],
        accepted: Collection[str],
        refused: Collection[str],
        previous: Manifest | None,
    ) -> bool:
        if not accepted:
            return False
        awaited = [name for name in members if name not in accepted and name not in refused]
        if not awaited:
            return True
        stated = self.recipe.bucket.quorum
        quorum = min(stated, len(self.names)) or len(members) // 2 + 1
        alive = any([self.alive(name) for name in awaited])  # a list: every silence is listened to
        if not alive and not stated:
            return True  # all who are missing have gone, so waiting would not help
        return len(accepted) >= quorum and (not alive or self._past_deadline(previous))

    def _past_deadline(self, previous: Manifest | None) -> bool:
        limit = previous.deadline_seconds if previous else FIRST_DEADLINE_SECONDS
        opened = self._opened(self.round) + self.away
        return self._store_now() > opened + (self.recipe.bucket.deadline_seconds or limit)

    def _opened(self, round_number: int) -> float:
        """When the round before was settled, by the store's clock."""
        settled = self.ledger.settled_at(round_number - 1)
        if settled is None:
            raise RunStopped(f"the document before round {round_number} is gone; the run stops here")
        return settled

    def _store_now(self) -> float:
        return self.ledger.store.now(self._clock_key())

    def _clock_key(self) -> str:
        return f"members/{self.own}/clock"

    def _absence(self, round_number: int) -> float:
        """How long a round was open before we came. The others may have been away for all of that time.

        Counted from the last time that our start before this one read the store's clock: a replica that
        starts again and again must not put off a round for ever.
        """
        read, since = self.ledger.store.head(self._clock_key()), self._opened(round_number)
        since = max(since, read.modified_unix_seconds) if read else since
        return self._store_now() - since

    def alive(self, name: str) -> bool:
        """Does the replica's heartbeat still come? The store is asked at most once in a heartbeat's time.

        A replica is silent after five missed heartbeats, the last two of them while we watched: when the
        store was away nobody's heartbeat came through, and the first to return must not take the others for
        dead.
        """
        every = self.recipe.bucket.heartbeat_seconds
        looked, answer = self.answers.get(name, (-math.inf, True))
        if self.clock() - looked < every:
            return answer
        heard = self.ledger.heartbeat(name)
        written = heard and heard[1]
        if written is not None:
            age = self._store_now() - written
        else:
            age = self._store_now() - self._opened(1) - STARTING_SECONDS if self.round == 1 else math.inf
        now = self._store_answered()
        if age < silent_after(self.recipe) - 2 * every + CLOCK_ERROR_SECONDS:
            self.silences.pop(name, None)
            answer = True
        else:
            before, since = self.silences.get(name, (written, now))
            since = since if before == written else now
            self.silences[name] = written, since
            answer = now - since < 2 * every or now < self.forgive_until
        answer = answer and not (heard and heard[0].leaving)
        self.answers[name] = now, answer
        return answer

    def _store_answered(self) -> float:
        """The store answers now. After a pause the others may still be backing off: silence is forgiven."""
        now = self.clock()
        if now - self.answered > PAUSE_SECONDS:
            self.forgive_until = now + BACK_OFF_SECONDS
        self.answered = now
        return now

    def _next_members(self, accepted: Collection[str]) -> tuple[str, ...]:
        def stays(name: str) -> bool:
            if name not in accepted:
                return self.alive(name)
            heard = self.ledger.heartbeat(name)
            return not (heard and heard[0].leaving)

        return tuple(name for name in self.names if stays(name))

    def _deadline(self, round_number: int, seconds: float | None) -> float:
        """Of the next round: generous against the rounds measured, so that only the stuck are left behind.

        A round that ended at its deadline (`seconds` None) measures the deadline, not the fleet. If it
        counted, one stuck member would make every deadline longer than the one before.
        """
        known = self.ledger.manifests
        recent = [t for t in range(round_number - 5, round_number) if t in known and not self._left_behind(t)]
        taken = {t: known[t].seconds for t in recent} | ({} if seconds is None else {round_number: seconds})
        if not taken:
            previous = known.get(round_number - 1)
            return previous.deadline_seconds if previous else FIRST_DEADLINE_SECONDS
        # Where finishing begins, rounds get longer: whole streams cross from then on.
        begins = self.recipe.opening(round_number + 1) is not None
        more = opening_seconds(self.recipe) if begins else 0.0
        median = statistics.median(
            s + (more if self.recipe.opening(t) is None else 0) for t, s in taken.items()
        )
        return round(max(15.0, 4 * median) + 10, 3)

    def _left_behind(self, round_number: int) -> bool:
        """Did a settled round end without a member that was still there?"""
        manifest, before = self.ledger.manifests[round_number], self.ledger.manifests.get(round_number - 1)
        judged = {entry.replica for entry in manifest.entries} | {name for name, _ in manifest.refused}
        awaited = before.members if before else self.names
        return any(name in manifest.members and name not in judged for name in awaited)

    def _turn(self, round_number: int) -> int:
        """Our place in line. Closers take turns, and the next steps in when the one before does not close.

        Full replicas come first: they read every payload anyway, so checking costs them no bytes.
        """
        parts = {member.name: member.config.parts for member in self.recipe.fleet()}
        full = [name for name in self.ledger.run.closers if parts.get(name) == 1]
        rest = [name for name in self.ledger.run.closers if name not in full]
        if self.own in full:
            return (full.index(self.own) - round_number) % len(full)
        return len(full) + (rest.index(self.own) - round_number) % len(rest)
