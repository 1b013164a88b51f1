"""Closing a round: decide when to stop waiting, and create the manifest.

One closer works at a time: the first in line. The others wait for the manifest as every member does, look
once in a while, and step in when the first is late. Put-if-absent lets one manifest win.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from isthmus.errors import Diverged
from isthmus.layout.requests import LONGEST_LOOK_SECONDS, LONGEST_SECONDS, STEP_IN_SECONDS
from isthmus.protocol.changes import Requests
from isthmus.protocol.ledger import Entry, Ledger, Manifest
from isthmus.protocol.members import Members
from isthmus.protocol.presence import Presence
from isthmus.protocol.scores import has_passed, not_counted
from isthmus.protocol.shards import ShardReader
from isthmus.protocol.verdicts import ScoreUpdate, Verdicts

CLOSING_ANSWERS = 9  # one after another, from the last commit to the manifest
FEW = 8  # an eighth of the members
NEAR = 2  # so many behind the first in line look whether it is down


class Closer:
    """One replica's part in closing rounds."""

    def __init__(
        self,
        ledger: Ledger,
        reader: ShardReader,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        replayed: Callable[[int], str] = lambda round_number: "",
        score: ScoreUpdate | None = None,
    ) -> None:
        """`replayed` gives the digest of theta^(t) from the bucket alone, or "" where that cannot be had.
        `score` gives an update's score, where this process has what that takes."""
        self.ledger, self.log, self.clock, self.replayed = ledger, log, clock, replayed
        self.recipe = ledger.run.recipe
        self.own = ledger.signer.replica
        self.presence, self.members = Presence(ledger, clock), Members(ledger)
        self.verdicts, self.requests = Verdicts(ledger, reader, score, log), Requests(ledger, log)
        self.names = self.members.names
        self.round = 0
        self.closable_since: float | None = None
        self.looked = self.next_look = -math.inf  # this closer's last look at the round, and its next
        self.next_question = -math.inf  # when commits are asked for that are not listed
        self.beaten = False  # another's manifest was there when we had made ours
        self.busy = False  # the last attempt had something to judge
        self.away = 0.0  # seconds of the open round that its deadline does not count
        self.came = False  # it was open before this closer started
        self.down: set[str] = set()  # whose workers have ended in this round: it is too late for them
        self.said = ""  # about the anchors of others, as it was last logged
        self.found: str | None = None  # digest of the round's start as the bucket gives it, once it was asked
        self.liars: set[str] = set()  # who signed an anchor that the bucket does not give

    def pause(self, usual: float) -> float:
        """Seconds until the next attempt; the first in line looks as often as a member does, or more."""
        if self.busy:
            return 0.0  # while we judged, more may have come
        return max(0.0, self.next_look - self.clock()) or min(LONGEST_SECONDS, usual)

    def attempt(self, round_number: int, anchor: str) -> bool:
        """Close the round if it can be closed now; True when our manifest is the one."""
        if not self.may_close(round_number):
            return False
        if round_number != self.round:
            self._begin(round_number)
        turn, self.busy = self._turn(round_number), False
        if turn and self.clock() < self.next_look:
            return False
        if 0 < turn <= NEAR:  # who stands before us may have died: then it is our turn at once
            self._mark_down(self._line(round_number)[:turn])
            turn = self._turn(round_number)
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = self.members.awaited(round_number)
        self.verdicts.look()
        if turn == 0:  # it reads updates while it waits for the rest
            self._ask_for_few(members)
            self._judge(anchor)
        if not self._in_time(
            turn, self._may_close(members, self.verdicts.there, self.verdicts.faults, previous)
        ):
            return False
        # A listing may lag: nobody is left out who was not asked for.
        self.verdicts.ask(name for name in members if name not in self.verdicts.there)
        self._judge(anchor)
        self.verdicts.check_readable()
        if not self._holds(anchor, members):
            return False
        accepted, refused = self.verdicts.compare(previous)
        refused |= {name: reason for name, reason in self.verdicts.faults.items() if name not in accepted}
        if not self._may_close(members, accepted, refused, previous):
            return False
        return self._settle(anchor, members, accepted, refused)

    def may_close(self, round_number: int) -> bool:
        """Are we a closer in this round's epoch?"""
        return self.own in self.ledger.at(round_number).closers

    def _begin(self, round_number: int) -> None:
        self.recipe = self.ledger.at(round_number).recipe
        self.came = not self.round
        self.away = self.presence.absence(round_number) if self.came else 0.0
        self.round, self.closable_since, self.said, self.found = round_number, None, "", None
        self.looked, self.next_look, self.next_question = self.clock(), -math.inf, -math.inf
        self.beaten = False
        self.down.clear()
        self.verdicts.begin(round_number)
        self.members.begin(self.recipe)
        self.names = self.members.names
        self.presence.answers.clear()

    def _ask_for_few(self, members: Sequence[str]) -> None:
        """Where few are missing, they are asked for now and then: what is no object is in no listing, and its
        author would be waited for."""
        missing = [name for name in members if name not in self.verdicts.there]
        if len(missing) <= max(1, len(members) // FEW) and self.clock() >= self.next_question:
            self.next_question = self.clock() + LONGEST_LOOK_SECONDS
            self.verdicts.ask(missing)

    def _judge(self, anchor: str) -> None:
        self.verdicts.fetch()
        self.busy = self.verdicts.judge(anchor)

    def _in_time(self, turn: int, closable: bool) -> bool:
        """May we close it now? A closer in line gives each one before it some seconds, from when the round
        could be closed, and looks no more often than that."""
        now, before, self.looked = self.clock(), self.looked, self.clock()
        if not closable:
            self.closable_since = None
            self.next_look = now + min(self._step_in_seconds * turn, LONGEST_LOOK_SECONDS)
            return False
        if self.closable_since is None:  # since our last look, or since the last commit came
            came = max((i.modified_unix_seconds for i in self.verdicts.listed.values()), default=math.inf)
            age = self.presence.store_now() - came if turn else 0.0
            self.closable_since = max(before, now - max(0.0, age))
        self.next_look = self.closable_since + self._step_in_seconds * turn
        return now >= self.next_look

    @property
    def _step_in_seconds(self) -> float:
        """Of each place in line. With a slow store the first is not late, it waits for its answers; and it
        scores, which takes it about as long as it took us."""
        answers = CLOSING_ANSWERS * self.ledger.store.answer_seconds
        return max(STEP_IN_SECONDS, answers) + 2 * self.verdicts.last_score_seconds

    def _settle(
        self, anchor: str, members: Sequence[str], accepted: Mapping[str, Entry], refused: Mapping[str, str]
    ) -> bool:
        """Create the manifest; True when ours is the one."""
        missing = [name for name in members if name not in accepted and name not in refused]
        alive = self.presence.alive_of(missing, self.round)
        self.requests.take(self.presence.store_now)
        passed = {name for name, reason in refused.items() if has_passed(reason)}
        following = self._next_members({*accepted, *passed}, alive)
        seconds = self.presence.store_now() - self.presence.opened(self.round)
        manifest = Manifest(
            round=self.round,
            anchor=anchor,
            entries=tuple(accepted[name] for name in self.names if name in accepted),
            refused=tuple((name, refused[name]) for name in self.names if name in refused),
            members=following,
            deadline_seconds=self.members.next_deadline(self.round, None if alive else seconds),
            seconds=round(seconds, 3),
            scores=self.verdicts.scores.listed(self.names),
            probation=self.verdicts.scores.next_probation(refused),
        )
        if not self.ledger.create_manifest(manifest):
            self.beaten = True
            return False
        news = [not_counted(name, reason) for name, reason in refused.items()]
        given_up = [name for name in alive if name not in following]
        news += [f"{name} lives and does not deliver; it is no longer awaited" for name in given_up]
        news += [self.verdicts.note] if self.verdicts.note else []
        for words in news:
            self.log(f"round {self.round}: {words}")
        return True

    # Which anchor

    def _holds(self, anchor: str, members: Sequence[str]) -> bool:
        """Does the round start from our anchor? False: leave it open and wait. Diverged: it is not ours.

        Asked when the round could close, not before: whoever is quick is not the majority. Where as many
        start from one other anchor as from ours, the bucket decides, which gives theta^(t-1) without
        anybody's word. Who was wrong then is not believed again. Only where it cannot be replayed do votes
        decide: more than half of all who are there, those who delivered and the members who still may.
        Half is not enough, and whoever creates the manifest first settles it.
        """
        good, others = self.verdicts.good(), defaultdict[str, set[str]](set)
        for name, other in self.verdicts.other_anchors().items():
            if name not in self.liars:
                others[other].add(name)
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
        there = self.verdicts.given.keys() | self.verdicts.faults.keys()
        there |= set(self.presence.alive_of([name for name in members if name not in there], self.round))
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
        self._mark_down(awaited)
        awaited = [name for name in awaited if name not in self.down]
        stated = self.recipe.bucket.quorum
        quorum = min(stated, len(self.names)) or len(members) // 2 + 1
        alive = self.presence.any_alive(awaited, self.round)
        deadlines = self._deadlines_passed(previous) if alive else 0.0
        if deadlines > self.recipe.bucket.missed_rounds:
            alive = False  # they beat and do not deliver
        if not alive and not stated:
            return True  # all who are missing have gone, so waiting would not help
        return len(accepted) >= quorum and (not alive or deadlines > 1)

    def _mark_down(self, names: Sequence[str]) -> None:
        """Note whose workers have ended in this round. Of one that was open before we started ourselves, only
        those who are not back: a fleet that was stopped and started again waits for all its members."""
        found = self.presence.ended_of(names) if self.came else self.presence.down_of(names, self.round)
        self.down |= set(found)

    def _deadlines_passed(self, previous: Manifest | None) -> float:
        """For how many of its deadlines the round has been open."""
        opened = self.presence.opened(self.round) + self.away
        deadline = self.members.deadline(previous, partial(self.presence.lengths, self.round))
        return (self.presence.store_now() - opened) / max(deadline, 1e-3)

    def _next_members(self, accepted: Collection[str], alive: Collection[str]) -> tuple[str, ...]:
        """Who gave, unless its worker has ended since; and of the others whoever lives and is in step."""
        ended = self.presence.ended_of(accepted)
        if ended:  # the listing may be a moment old, and one of them back since: then it gave after that
            self.presence.look_again()
            ended = self.presence.ended_of(ended)
        stay = set(accepted) - set(ended)
        stay |= {name for name in alive if not self.presence.is_behind(name)}
        stay |= set(self.presence.in_step_of(name for name in self.names if name not in {*accepted, *alive}))
        late = [
            name for name in stay if name not in accepted and self.members.given_up(name, self.round, False)
        ]
        return tuple(name for name in self.names if name in stay and name not in late)

    def _turn(self, round_number: int) -> int:
        """Our place in line. Closers take turns, and the next steps in when the one before does not close."""
        return self._line(round_number).index(self.own)

    def _line(self, round_number: int) -> list[str]:
        """Full replicas come first: they read every payload anyway, so checking costs them no bytes. Whoever
        the round does not wait for stands last: a closer that has gone costs the others its turn once."""
        parts = {member.name: member.config.parts for member in self.recipe.fleet()}
        closers = self.ledger.at(round_number).closers
        full = [name for name in closers if parts.get(name) == 1]
        rest = [name for name in closers if name not in full]
        line = [name for part in (full, rest) if part for name in _rotated(part, round_number % len(part))]
        there = [name for name in self.members.awaited(round_number) if name not in self.down]
        return sorted(line, key=lambda name: name not in there)


def _rotated(names: Sequence[str], first: int) -> list[str]:
    return [*names[first:], *names[:first]]
