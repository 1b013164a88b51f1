"""Closing a round: decide when to stop waiting, and create the manifest.

One closer works at a time: the first in line. The others wait for the manifest like every member, look now
and then, and step in if the first is late. Put-if-absent lets one manifest win.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from isthmus.errors import Diverged
from isthmus.layout.requests import LONGEST_LOOK_SECONDS, LONGEST_SECONDS, STEP_IN_SECONDS
from isthmus.protocol.clipping import clipped_in
from isthmus.protocol.documents import Entry, Manifest, Refusal, Skip
from isthmus.protocol.judge import Judge
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.members import Members
from isthmus.protocol.presence import Presence
from isthmus.protocol.shards import ShardReader

CLOSING_ANSWERS = 9  # sequential store requests from the last commit to the manifest
FEW = 8  # at most an eighth of the members is few
NEAR = 2  # places behind the first in line that check whether it is down


class Closer:
    """One replica's part in closing rounds."""

    def __init__(
        self,
        ledger: Ledger,
        reader: ShardReader,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        replayed: Callable[[int], str] = lambda round_number: "",
    ) -> None:
        """`replayed` gives the digest of theta^(t) from the bucket alone, or "" if it cannot."""
        self.ledger, self.log, self.clock, self.replayed = ledger, log, clock, replayed
        self.recipe = ledger.run.recipe
        self.own = ledger.signer.replica
        self.presence, self.members = Presence(ledger, clock), Members(ledger)
        self.judge = Judge(ledger, reader)
        self.names = self.members.names
        self.round = 0
        self.closable_since: float | None = None
        self.looked = self.next_look = -math.inf  # this closer's last look at the round, and its next
        self.next_question = -math.inf  # when to request commits that are not listed
        self.beaten = False  # another closer's manifest was there first
        self.busy = False  # the last attempt had something to judge
        self.away = 0.0  # seconds of the open round that its deadline does not count
        self.came = False  # the round was open before this closer started
        self.down: set[str] = set()  # replicas whose workers ended in this round: too late for them
        self.said = ""  # what `_say` logged last
        self.found: str | None = None  # digest of the round's start as the bucket gives it; None until asked
        self.rebuilt = 0  # the round that this process started from the bucket's anchor

    def pause(self, usual: float) -> float:
        """Seconds until the next attempt; the first in line looks as often as a member does, or more."""
        if self.busy:
            return 0.0  # more may have arrived while we judged
        return max(0.0, self.next_look - self.clock()) or min(LONGEST_SECONDS, usual)

    def attempt(self, round_number: int, anchor: str) -> bool:
        """Close the round if it can be closed now; True if our manifest won."""
        if not self.may_close(round_number):
            return False
        if round_number != self.round:
            self._begin(round_number)
        turn, self.busy = self._turn(round_number), False
        if turn and self.clock() < self.next_look:
            return False
        if 0 < turn <= NEAR:  # if all closers before us are down, it is our turn at once
            self._mark_down(self._line(round_number)[:turn])
            turn = self._turn(round_number)
        previous = self.ledger.manifest(round_number - 1) if round_number > 1 else None
        members = self.members.awaited(round_number)
        self.judge.look()
        if turn == 0:  # the first in line reads updates while it waits for the rest
            self._ask_for_few(members)
            self._judge(anchor)
        if not self._in_time(
            turn, self._may_close(members, self.judge.there, self.judge.faults.keys(), previous)
        ):
            return False
        # A listing may lag: request every missing commit before leaving anyone out.
        self.judge.ask(name for name in members if name not in self.judge.there)
        self._judge(anchor)
        self.judge.check_readable()
        self._check_anchor(anchor)
        accepted, refused = self.judge.compare(previous)
        skipped = self.judge.skipped()
        if not self._may_close(members, accepted, {*refused, *skipped}, previous):
            return False
        return self._settle(anchor, members, accepted, refused, skipped)

    def may_close(self, round_number: int) -> bool:
        """Whether we are a closer in this round's epoch."""
        return self.own in self.ledger.at(round_number).closers

    def _begin(self, round_number: int) -> None:
        self.recipe = self.ledger.at(round_number).recipe
        self.came = not self.round
        self.away = self.presence.absence(round_number) if self.came else 0.0
        self.round, self.closable_since, self.said, self.found = round_number, None, "", None
        self.looked, self.next_look, self.next_question = self.clock(), -math.inf, -math.inf
        self.beaten = False
        self.down.clear()
        self.judge.begin(round_number)
        self.members.begin(self.recipe)
        self.names = self.members.names
        self.presence.answers.clear()

    def _ask_for_few(self, members: Sequence[str]) -> None:
        """When few commits are missing, request them by name now and then. A listing omits what is not an
        object, so we would wait for its author."""
        missing = [name for name in members if name not in self.judge.there]
        if len(missing) <= max(1, len(members) // FEW) and self.clock() >= self.next_question:
            self.next_question = self.clock() + LONGEST_LOOK_SECONDS
            self.judge.ask(missing)

    def _judge(self, anchor: str) -> None:
        self.judge.fetch()
        self.busy = self.judge.judge(anchor)

    def _in_time(self, turn: int, closable: bool) -> bool:
        """Whether we may close it now. A closer gives each one before it in line a few seconds, counted from
        when the round could be closed, and looks no more often than that."""
        now, before, self.looked = self.clock(), self.looked, self.clock()
        if not closable:
            self.closable_since = None
            self.next_look = now + min(self._step_in_seconds * turn, LONGEST_LOOK_SECONDS)
            return False
        if self.closable_since is None:  # since our last look, or since the last commit came
            came = max((i.modified_unix_seconds for i in self.judge.listed.values()), default=math.inf)
            age = self.presence.store_now() - came if turn else 0.0
            self.closable_since = max(before, now - max(0.0, age))
        self.next_look = self.closable_since + self._step_in_seconds * turn
        return now >= self.next_look

    @property
    def _step_in_seconds(self) -> float:
        """Seconds for each place in line. With a slow store the first is not late; it waits for answers."""
        return max(STEP_IN_SECONDS, CLOSING_ANSWERS * self.ledger.store.answer_seconds)

    def _settle(
        self,
        anchor: str,
        members: Sequence[str],
        accepted: Mapping[str, Entry],
        refused: Mapping[str, Refusal],
        skipped: Mapping[str, Skip],
    ) -> bool:
        """Create the manifest; True if ours won."""
        answered = {*accepted, *skipped}
        missing = [name for name in members if name not in answered and name not in refused]
        alive = self.presence.those(lambda name: self.presence.alive(name, self.round), missing)
        self._look_for_orders()
        following = self._next_members(answered, alive)
        seconds = self.presence.store_now() - self.presence.opened(self.round)
        entries = tuple(accepted[name] for name in self.names if name in accepted)
        manifest = Manifest(
            round=self.round,
            anchor=anchor,
            entries=entries,
            refusals=tuple(refused[name] for name in self.names if name in refused),
            skipped=tuple(skipped[name] for name in self.names if name in skipped),
            members=following,
            dealt_in=self._dealt_in({*answered, *refused, *following}),
            deadline_seconds=self.members.next_deadline(
                self.round, None if alive else seconds, self._usual_seconds(accepted)
            ),
            seconds=round(seconds, 3),
            clipped=clipped_in(self.ledger, self.round, {entry.replica: entry.norm for entry in entries}),
        )
        if not self.ledger.create_manifest(manifest):
            self.beaten = True
            return False
        news = [f"refused {name}: {refusal.words}" for name, refusal in refused.items()]
        news += [f"{name} gives nothing ({skip.code})" for name, skip in skipped.items()]
        given_up = [name for name in alive if name not in following]
        news += [f"{name} lives and does not deliver; it is no longer awaited" for name in given_up]
        news += [self.judge.note] if self.judge.note else []
        for words in news:
            self.log(f"round {self.round}: {words}")
        return True

    def _look_for_orders(self) -> None:
        """Read the owner's changes: the next round belongs to that epoch."""
        self.ledger.look()
        if odd := self.ledger.odd:
            self._say(odd)

    def _usual_seconds(self, accepted: Collection[str]) -> float | None:
        """Seconds, by the store's clock, until half of the counted replicas had delivered."""
        listed = [self.judge.listed[name] for name in accepted if name in self.judge.listed]
        opened = self.presence.opened(self.round)
        times = [max(0.0, info.modified_unix_seconds - opened) for info in listed]
        return statistics.median_low(times) if times else None

    # Which anchor

    def _check_anchor(self, anchor: str) -> None:
        """Raise Diverged if we may not close the round with our anchor. Asked once the round could close.

        If at least as many updates start from one other anchor as from ours, the bucket decides: a replay
        gives ours, or we have diverged and rejoin from the bucket. A closer that has just rejoined closes.
        """
        others = Counter(self.judge.other_anchors())
        most = max(others.values(), default=0)
        if not most or most < len(self.judge.good()) or self.rebuilt == self.round:
            return
        if self.found is None:
            self.found = self.replayed(self.round - 1)
        if self.found == anchor:
            self._say(f"{most} updates start from another anchor, but the bucket gives ours")
            return
        raise Diverged(
            f"replica {self.own} holds another anchor than {most} of those who gave to round {self.round}; "
            "it joins anew from the bucket"
        )

    def _say(self, words: str) -> None:
        """Log each message once."""
        if words != self.said:
            self.said = words
            self.log(f"round {self.round}: {words}")

    # Waiting

    def _may_close(
        self,
        members: Sequence[str],
        accepted: Collection[str],
        answered: Collection[str],
        previous: Manifest | None,
    ) -> bool:
        """`answered`: replicas whose update does not count, or that skipped."""
        if not accepted and not self.judge.skipped():
            return False
        awaited = [name for name in members if name not in accepted and name not in answered]
        if not awaited:
            return True
        if self.round == 1 and self._is_starting():
            return False
        self._mark_down(awaited)
        awaited = [name for name in awaited if name not in self.down]
        stated = self.recipe.bucket.quorum
        quorum = min(stated, len(self.names)) or len(members) // 2 + 1
        alive = self.presence.any_alive(awaited, self.round)
        deadlines = self._deadlines_passed(previous) if alive else 0.0
        if deadlines > self.recipe.bucket.missed_rounds:
            alive = False  # they send heartbeats and do not deliver
        if not alive and not stated:
            return True  # all missing replicas have gone, so waiting would not help
        there = {*accepted, *self.judge.skipped()}  # a replica that skips is present all the same
        return len(there) >= quorum and (not alive or deadlines > 1)

    def _is_starting(self) -> bool:
        """Whether round 1 still waits for replicas that may never have started."""
        first = min((info.modified_unix_seconds for info in self.judge.listed.values()), default=math.inf)
        return self.presence.store_now() - first < self.recipe.bucket.start_seconds

    def _mark_down(self, names: Sequence[str]) -> None:
        """Note the replicas whose workers have ended in this round. If the round was open before we started,
        note only those that are not back: a restarted fleet waits for all its members."""
        ended = self.presence.has_ended if self.came else partial(self.presence.was_down, self.round)
        self.down |= set(self.presence.those(ended, names))

    def _deadlines_passed(self, previous: Manifest | None) -> float:
        """How many of its deadlines the round has been open."""
        opened = self.presence.opened(self.round) + self.away
        deadline = self.members.deadline(previous)
        return (self.presence.store_now() - opened) / max(deadline, 1e-3)

    def _next_members(self, answered: Collection[str], alive: Collection[str]) -> tuple[str, ...]:
        """Replicas that gave or skipped and still run, plus live replicas that are in step."""
        ended = self.presence.those(self.presence.has_ended, answered)
        if ended:  # the listing may be old: one that is back since gave after it
            self.presence.look_again()
            ended = self.presence.those(self.presence.has_ended, ended)
        stay = set(answered) - set(ended)
        stay |= {name for name in alive if not self.presence.is_behind(name)}
        rest = (name for name in self.names if name not in {*answered, *alive})
        stay |= set(self.presence.those(self.presence.in_step, rest))
        late = [
            name for name in stay if name not in answered and self.members.given_up(name, self.round, False)
        ]
        return tuple(name for name in self.names if name in stay and name not in late)

    def _dealt_in(self, seen: Collection[str]) -> tuple[str, ...]:
        """Replicas of the newest epoch with a share of the next round's data: those seen in this round, those
        whose heartbeat arrives, and those with a share now that have not been absent for long."""
        names = [member.name for member in self.ledger.run.recipe.fleet()]
        here = {*seen, self.own}
        rest = (name for name in names if name not in here)
        here |= set(self.presence.those(self.presence.is_here, rest))
        before = self.ledger.known(self.round - 1)
        now = before.dealt_in if before else self.names
        here |= {name for name in now if name not in here and not self.members.absent(name, self.round)}
        return tuple(name for name in names if name in here)

    def _turn(self, round_number: int) -> int:
        """Our place in line. Closers take turns, and the next steps in if the one before does not close."""
        return self._line(round_number).index(self.own)

    def _line(self, round_number: int) -> list[str]:
        """Full replicas come first: they read every payload anyway, so checking costs them no bytes. Closers
        that the round does not wait for come last: a closer that has gone costs the others its turn once."""
        parts = {member.name: member.config.parts for member in self.recipe.fleet()}
        closers = self.ledger.at(round_number).closers
        full = [name for name in closers if parts.get(name) == 1]
        rest = [name for name in closers if name not in full]
        line = [name for part in (full, rest) if part for name in _rotated(part, round_number % len(part))]
        there = [name for name in self.members.awaited(round_number) if name not in self.down]
        return sorted(line, key=lambda name: name not in there)


def _rotated(names: Sequence[str], first: int) -> list[str]:
    return [*names[first:], *names[:first]]
