"""Closing a round: verify every commit, decide when to stop waiting, create the manifest."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import Diverged, RunError
from isthmus.printing import visible
from isthmus.protocol.documents import MOST_REASON
from isthmus.protocol.judge import judge
from isthmus.protocol.ledger import Entry, Ledger, Manifest
from isthmus.protocol.members import Members
from isthmus.protocol.norms import compare_norms
from isthmus.protocol.presence import Presence
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.signs import SignReader, compare_signs
from isthmus.protocol.trust import OtherAnchor, Refused, sha256
from isthmus.sparse import SparseChunks
from isthmus.store import StoreRefused, Unreadable

STEP_IN_SECONDS = 3.0  # the next closer in line waits this much longer
MOST_VERDICTS = 3  # on commits of one replica in a round, of which all but the last were refused


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a replica's commit. The first that is good stands, whatever its author puts there later."""

    commit: str  # its hash
    result: Entry | Refused
    number: int  # of the replica's verdicts in this round


class Closer:
    """One replica's judgement of a round. Every closer may judge; put-if-absent lets one manifest win."""

    def __init__(
        self,
        ledger: Ledger,
        reader: ShardReader,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        replayed: Callable[[int], str] = lambda round_number: "",
    ) -> None:
        """`replayed` gives the digest of theta^(t) from the bucket alone, or "" where that cannot be had."""
        self.ledger, self.reader, self.log, self.clock, self.replayed = ledger, reader, log, clock, replayed
        self.recipe = ledger.run.recipe
        self.own = ledger.signer.replica
        self.presence, self.members = Presence(ledger, clock), Members(ledger)
        self.names = self.members.names
        self.round = 0
        self.closable_since: float | None = None
        self.away = 0.0  # seconds of the open round that its deadline does not count
        self.verdicts: dict[str, Verdict] = {}  # by replica
        self.sign_reader, self.signs = SignReader(self.recipe), dict[str, Tensor]()  # of those who are good
        self.note = ""  # what the last judgement says of those who differ and were not refused
        self.said = ""  # about the anchors of others, as it was last logged
        self.found: str | None = None  # digest of the round's start as the bucket gives it, once it was asked
        self.liars: set[str] = set()  # who signed an anchor that the bucket does not give

    def attempt(self, round_number: int, anchor: str) -> bool:
        """Close the round if it can be closed now; True when our manifest is the one."""
        if round_number != self.round:
            self.away = 0.0 if self.round else self.presence.absence(round_number)
            self.round, self.closable_since, self.said, self.found = round_number, None, "", None
            self.verdicts.clear()
            self.signs.clear()
            self.presence.answers.clear()
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = self.members.awaited(round_number)
        self.presence.store_answered()
        commits, faults = self._commits()
        now = self.presence.store_answered()
        turn = self._turn(round_number)
        if turn == 0:  # the first in line reads updates while it waits for the rest
            self._judge(commits, anchor)
        if not self._may_close(members, commits.keys() | self._good(), faults, previous):
            self.closable_since = None
            return False
        self.closable_since = now if self.closable_since is None else self.closable_since
        if now < self.closable_since + STEP_IN_SECONDS * turn:
            return False
        self._judge(commits, anchor)
        if not self._holds(anchor, members, faults):
            return False
        accepted, refused = self._compare(previous)
        refused |= {name: reason for name, reason in faults.items() if name not in accepted}
        if not self._may_close(members, accepted, refused, previous):
            return False
        return self._settle(anchor, members, accepted, refused)

    def _settle(
        self, anchor: str, members: Sequence[str], accepted: Mapping[str, Entry], refused: Mapping[str, str]
    ) -> bool:
        """Create the manifest; True when ours is the one."""
        missing = [name for name in members if name not in accepted and name not in refused]
        alive = [name for name in missing if self.presence.alive(name, self.round)]
        following = self._next_members(accepted)
        seconds = self.presence.store_now() - self.presence.opened(self.round)
        manifest = Manifest(
            round=self.round,
            anchor=anchor,
            entries=tuple(accepted[name] for name in self.names if name in accepted),
            refused=tuple((name, refused[name]) for name in self.names if name in refused),
            members=following,
            deadline_seconds=self.members.next_deadline(self.round, None if alive else seconds),
            seconds=round(seconds, 3),
        )
        if not self.ledger.create_manifest(manifest):
            return False
        news = [f"refused {name}: {reason}" for name, reason in refused.items()]
        given_up = [name for name in alive if name not in following]
        news += [f"{name} lives and does not deliver; it is no longer awaited" for name in given_up]
        news += [self.note] if self.note else []
        for words in news:
            self.log(f"round {self.round}: {words}")
        return True

    # Judging

    def _commits(self) -> tuple[dict[str, bytes], dict[str, str]]:
        """The commits that are still to be judged, and why some objects in their place cannot be read."""
        commits: dict[str, bytes] = {}
        faults: dict[str, str] = {}
        unreadable = []
        good = self._good()
        for name in self.names:
            if name in good:
                continue
            try:
                data = self.ledger.get_commit(name, self.round)
            except StoreRefused as error:
                faults[name] = _printable(f"the commit: {error}")
                unreadable += [error] if isinstance(error, Unreadable) else []
                continue
            if data is not None:
                commits[name] = data
        if len(unreadable) > 1 and not (commits.keys() | self._good()) - {self.own}:
            raise RunError(
                f"no commit of another replica can be read: are these credentials right? {unreadable[0]}"
            )
        return commits, faults

    def _judge(self, commits: Mapping[str, bytes], anchor: str) -> None:
        """One verdict for each replica. A commit that replaces a refused one is judged too, a few times."""
        fresh = {name: data for name, data in commits.items() if self._to_judge(name, data)}
        for name, data in fresh.items():
            with suppress(Refused):  # `judge` will say so
                entry = self.ledger.check_commit(data, name, self.round, anchor)
                self.reader.copy_ahead(self.round, [(name, shard) for shard in entry.shards])
        for name, data in fresh.items():
            before, result = self.verdicts.get(name), self._verdict(data, name, anchor)
            self.verdicts[name] = Verdict(sha256(data), result, before.number + 1 if before else 1)
            if isinstance(result, Refused):
                self.reader.drop(name)

    def _to_judge(self, name: str, data: bytes) -> bool:
        before = self.verdicts.get(name)
        if before is None:
            return True
        stands = isinstance(before.result, Entry) or before.number == MOST_VERDICTS
        return not stands and before.commit != sha256(data)

    def _verdict(self, data: bytes, name: str, anchor: str) -> Entry | Refused:
        signs: list[Tensor] = []

        def note(payloads: Mapping[str, SparseChunks]) -> None:
            signs.append(self.sign_reader.read(payloads))

        try:
            entry = judge(self.ledger, data, name, self.round, anchor, self.reader.judged, note)
            self.signs[name] = torch.cat(signs)
            return entry
        except Refused as reason:
            reason.__context__ = None  # with their frames, both would keep the payload alive
            return reason.with_traceback(None)

    def _good(self) -> dict[str, Entry]:
        return {name: v.result for name, v in self.verdicts.items() if isinstance(v.result, Entry)}

    def _holds(self, anchor: str, members: Sequence[str], faults: Collection[str]) -> bool:
        """Does the round start from our anchor? False: leave it open and wait. Diverged: it is not ours.

        Asked when the round could close, not before: whoever is quick is not the majority. Where as many
        start from one other anchor as from ours, the bucket decides, which gives theta^(t-1) without
        anybody's word. Who was wrong then is not believed again. Only where it cannot be replayed do votes
        decide: more than half of all who are there, those who delivered and the members who still may.
        Half is not enough, and whoever creates the manifest first settles it.
        """
        good, others = self._good(), defaultdict[str, set[str]](set)
        for name, verdict in self.verdicts.items():
            if isinstance(verdict.result, OtherAnchor) and name not in self.liars:
                others[verdict.result.anchor].add(name)
        most = max(map(len, others.values()), default=0)
        if not most or most < len(good):
            return True
        if self.found is None:
            self.found = self.replayed(self.round - 1)
        found = self.found
        if found == anchor:
            self.liars |= set.union(*others.values())
            self._say(f"{most} updates start from another anchor, but the bucket gives ours")
            return True
        if not found and most == len(good):
            return True
        there = self.verdicts.keys() | set(faults)
        there |= {name for name in members if name not in there and self.presence.alive(name, self.round)}
        if found or 2 * most > len(there):
            raise Diverged(
                f"replica {self.own} holds another anchor than {most} of those who gave to round "
                f"{self.round}, and does not close it; it must join anew from the bucket"
            )
        self._say(
            f"{most} updates start from another anchor than ours, {len(good)} from ours; waiting for more"
        )
        return False

    def _say(self, words: str) -> None:
        """Once, however often we come to it."""
        if words != self.said:
            self.said = words
            self.log(f"round {self.round}: {words}")

    def _compare(self, previous: Manifest | None) -> tuple[dict[str, Entry], dict[str, str]]:
        """(accepted, refused with the reason) of all that was judged."""
        good = self._good()
        refused = {
            name: _printable(str(v.result))
            for name, v in self.verdicts.items()
            if isinstance(v.result, Refused)
        }
        # Norms last: a reader, who sees only what is listed, compares them again and must come to the same.
        refused |= compare_signs({name: self.signs[name] for name in good}, self.recipe.bucket.sign_agreement)
        before = {entry.replica: entry.norm for entry in previous.entries} if previous else {}
        norms = {name: entry.norm for name, entry in good.items() if name not in refused}
        compared = compare_norms(norms, before, self.recipe.bucket.norm_limit)
        self.note = compared.note
        refused |= compared.refused
        return {name: entry for name, entry in good.items() if name not in refused}, refused

    # Waiting

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
        alive = any([self.presence.alive(name, self.round) for name in awaited])  # of a list: all are heard
        deadlines = self._deadlines_passed(previous) if alive else 0.0
        if deadlines > self.recipe.bucket.missed_rounds:
            alive = False  # they beat and do not deliver
        if not alive and not stated:
            return True  # all who are missing have gone, so waiting would not help
        return len(accepted) >= quorum and (not alive or deadlines > 1)

    def _deadlines_passed(self, previous: Manifest | None) -> float:
        """For how many of its deadlines the round has been open."""
        opened = self.presence.opened(self.round) + self.away
        return (self.presence.store_now() - opened) / max(self.members.deadline(previous), 1e-3)

    def _next_members(self, accepted: Collection[str]) -> tuple[str, ...]:
        def stays(name: str) -> bool:
            if name in accepted:
                return not self.presence.leaving(name)
            return self.presence.alive(name, self.round) and not self.members.given_up(
                name, self.round, False
            )

        return tuple(name for name in self.names if stays(name))

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


def _printable(text: str) -> str:
    return visible(text[:MOST_REASON])[:MOST_REASON]
